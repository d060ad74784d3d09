//! The device plugin: what the kubelet asks, and what it is answered: [`Plugin`].

use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};

use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use crate::api::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse,
    ContainerPreferredAllocationResponse, Device, DevicePluginOptions, Empty, HEALTHY,
    ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse,
    PreferredAllocationRequest, PreferredAllocationResponse, UNHEALTHY,
};
use crate::device_plugin_server::DevicePlugin;
use crate::environment::environment;
use crate::place::{Placement, parts, preferred};
use crate::units::{SharedGpu, Unit};

/// What a plugin gives out, and how.
#[derive(Debug, Clone, Copy)]
pub struct PluginRules {
    /// How much memory a unit is.
    pub unit: Unit,
    /// Which GPU is preferred.
    pub placement: Placement,
    /// Whether containers are to be held to nothing (`cgpu.disable.isolation` of the original).
    pub disable_isolation: bool,
}

/// The plugin of one node.
#[derive(Debug, Clone)]
pub struct Plugin {
    rules: PluginRules,
    gpus: Arc<RwLock<Vec<SharedGpu>>>,
    /// Changes once the kubelet is to be told anew.
    changes: watch::Sender<u64>,
}

impl Plugin {
    /// A plugin that gives out the memory of these GPUs.
    #[must_use]
    pub fn new(gpus: Vec<SharedGpu>, rules: PluginRules) -> Self {
        Plugin { rules, gpus: Arc::new(RwLock::new(gpus)), changes: watch::Sender::new(0) }
    }

    /// What is given out from now on. The kubelet is told where that is something else.
    pub fn set(&self, gpus: Vec<SharedGpu>) {
        let mut known = self.gpus.write().unwrap_or_else(PoisonError::into_inner);
        if *known == gpus {
            return;
        }
        *known = gpus;
        drop(known);
        self.changes.send_modify(|count| *count += 1);
    }

    fn gpus(&self) -> Vec<SharedGpu> {
        self.gpus.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn devices(&self) -> ListAndWatchResponse {
        let devices = self.gpus().into_iter().flat_map(|gpu| {
            let health = if gpu.healthy { HEALTHY } else { UNHEALTHY };
            let device = |id| Device { id, health: health.to_owned() };
            gpu.ids().map(device).collect::<Vec<_>>()
        });
        ListAndWatchResponse { devices: devices.collect() }
    }

    /// What a container gets that the kubelet gives these units.
    fn allocate_one(&self, ids: &[String]) -> Result<ContainerAllocateResponse, String> {
        let gpus = self.gpus();
        let unknown = |id| format!("this node has no unit {id:?}; its GPUs have changed");
        let parts = parts(&gpus, ids).map_err(unknown)?;
        let unit = self.rules.unit;
        if let [(_, first), (_, second), ..] = parts.as_slice() {
            // The kubelet knows no GPUs, and takes what is left wherever it is.
            return Err(format!(
                "no GPU of this node has {} {unit} free, though all together do (here {first} {unit} of \
                 one and {second} {unit} of the next); ask for less",
                ids.len()
            ));
        }
        let envs = environment(&parts, unit, self.rules.disable_isolation)?;
        if let Some((gpu, units)) = parts.first() {
            info!(gpu = gpu.index, uuid = gpu.uuid, units, %unit, "given out");
        }
        Ok(ContainerAllocateResponse { envs, ..ContainerAllocateResponse::default() })
    }
}

type Devices = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(options()))
    }

    type ListAndWatchStream = Devices;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Devices>, Status> {
        let plugin = self.clone();
        // The first comes at once, then one for each change.
        let told = WatchStream::new(self.changes.subscribe()).map(move |_| Ok(plugin.devices()));
        Ok(Response::new(Box::pin(told)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let gpus = self.gpus();
        let responses = request.into_inner().container_requests.into_iter().map(|asked| {
            let size = usize::try_from(asked.allocation_size).unwrap_or_default();
            let (available, must) = (&asked.available_device_ids, &asked.must_include_device_ids);
            let ids = preferred(&gpus, available, must, size, self.rules.placement);
            // Where no GPU has room the kubelet chooses, and is refused by `allocate`.
            ContainerPreferredAllocationResponse { device_ids: ids.unwrap_or_default() }
        });
        Ok(Response::new(PreferredAllocationResponse { container_responses: responses.collect() }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let requests = request.into_inner().container_requests;
        let responses = requests.iter().map(|asked| self.allocate_one(&asked.device_ids));
        match responses.collect::<Result<Vec<_>, String>>() {
            Ok(container_responses) => Ok(Response::new(AllocateResponse { container_responses })),
            Err(reason) => {
                warn!(reason, "a container does not get its memory");
                Err(Status::failed_precondition(reason))
            }
        }
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

/// What the kubelet is to ask.
#[must_use]
pub fn options() -> DevicePluginOptions {
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}
