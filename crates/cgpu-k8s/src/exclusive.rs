//! Exclusive GPUs: [`WholePlugin`].

use cgpu_kubelet::api::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions,
    Empty, HEALTHY, ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse, UNHEALTHY,
};
use cgpu_kubelet::device_plugin_server::DevicePlugin;
use tokio_stream::StreamExt;
use tonic::{Request, Response, Status};
use tracing::info;

use crate::environment::whole_environment;
use crate::gpu_modes::Use;
use crate::grant::{self, GrantDetails};
use crate::plugin::{Devices, Plugin, answer};
use crate::pods::DeviceRequest;

/// The same plugin for exclusive GPUs.
#[derive(Debug, Clone)]
pub struct WholePlugin(pub Plugin);

impl WholePlugin {
    /// The GPUs that a container can have exclusively. None can until the kubelet has reported which containers have
    /// what.
    fn devices(&self) -> ListAndWatchResponse {
        let is_known = self.0.held().is_some();
        let devices = self.0.gpus().into_iter().map(|gpu| {
            let is_free = is_known && gpu.healthy && self.0.can_be(gpu.index, Use::Whole);
            let health = if is_free { HEALTHY } else { UNHEALTHY };
            Device { id: gpu.uuid, health: health.to_owned() }
        });
        ListAndWatchResponse { devices: devices.collect() }
    }

    /// What a container gets if the kubelet gives it these GPUs exclusively.
    async fn allocate_one(&self, uuids: &[String]) -> Result<ContainerAllocateResponse, String> {
        let gpus = self.0.gpus();
        let index = |uuid: &String| {
            let gpu = gpus.iter().find(|gpu| gpu.uuid == *uuid);
            gpu.map(|gpu| gpu.index)
                .ok_or_else(|| format!("this node has no GPU {uuid:?}; its GPUs have changed"))
        };
        let indices = uuids.iter().map(index).collect::<Result<Vec<u32>, String>>()?;
        let resource = self.0.rules().asks.whole.clone();
        let asked = self.0.who_asks(&resource, uuids.len()).await;
        if let Some((device_request, reason)) = asked
            .first()
            .and_then(|device_request| Some((device_request, device_request.refused.clone()?)))
        {
            return Err(format!(
                "{}/{}: {reason}",
                device_request.of.namespace, device_request.of.pod
            ));
        }
        self.0.give(&indices, Use::Whole)?;
        let beside = GrantDetails {
            devices: uuids.to_vec(),
            candidates: asked.iter().map(DeviceRequest::container).collect(),
            resource,
            ..GrantDetails::default()
        };
        let mut envs = whole_environment(uuids);
        self.0.record(grant::whole(uuids), beside, &mut envs)?;
        info!(gpus = ?indices, "given out as a whole");
        Ok(ContainerAllocateResponse { envs, ..ContainerAllocateResponse::default() })
    }
}

#[tonic::async_trait]
impl DevicePlugin for WholePlugin {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    type ListAndWatchStream = Devices;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Devices>, Status> {
        let plugin = self.clone();
        let reported = self.0.changes().map(move |_| Ok(plugin.devices()));
        Ok(Response::new(Box::pin(reported)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("any GPU will do"))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let _giving = self.0.begin_giving().await;
        let requests = request.into_inner().container_requests;
        let mut responses = Vec::new();
        for asked in &requests {
            responses.push(self.allocate_one(&asked.device_ids).await);
        }
        answer(responses)
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
