//! The device plugin: what the kubelet asks, and what it is answered: [`Plugin`].

use std::collections::BTreeMap;
use std::error::Error;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use cgpu_core::request::grant::GrantedGpu;
use cgpu_host::grants::Grants;
use cgpu_kubelet::Kubelet;
use cgpu_kubelet::api::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse,
    ContainerPreferredAllocationResponse, Device, DevicePluginOptions, Empty, HEALTHY,
    ListAndWatchResponse, ListPodResourcesResponse, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse, UNHEALTHY,
};
use cgpu_kubelet::device_plugin_server::DevicePlugin;
use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::try_join;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use crate::annotations::ByGpu;
use crate::cluster::Cluster;
use crate::environment::{ContainerFacts, environment, weight};
use crate::gpu_modes::{Use, Uses, modes};
use crate::grant::{self, GrantDetails};
use crate::node::{Lost, said};
use crate::placement::{Demand, Placement, parts, preferred};
use crate::pod_request::AskRules;
use crate::pods::{
    Answered, DeviceRequest, Holdings, candidates, device_requests, holdings, mistaken, reserved,
};
use crate::units::{SharedGpu, Unit};

/// What a plugin gives out, and how.
#[derive(Debug, Clone)]
pub struct PluginRules {
    /// What pods ask for.
    pub asks: AskRules,
    /// How much memory a unit is.
    pub unit: Unit,
    /// Which GPU is preferred.
    pub placement: Placement,
    /// Whether no container's quota is to be enforced (`cgpu.disable.isolation` of the original).
    pub disable_isolation: bool,
    /// The largest weight of a container (`admission.max_inst`).
    pub most_weight: u32,
}

/// The plugin of one node.
#[derive(Debug, Clone)]
pub struct Plugin {
    rules: PluginRules,
    /// Where what is given is recorded.
    grants: Grants,
    /// Where it is asked whose the units are; `None` if there is no API server to ask.
    cluster: Option<Cluster>,
    kubelet: Kubelet,
    gpus: Arc<RwLock<Vec<SharedGpu>>>,
    /// What the kubelet reported last of which containers have what, and what the GPUs are used for by that.
    held: Arc<RwLock<Option<ListPodResourcesResponse>>>,
    uses: Arc<RwLock<Uses>>,
    /// The pods whose GPU is gone.
    lost: Arc<RwLock<Lost>>,
    /// Whether the engine makes containers by cgpu.
    served: Arc<AtomicBool>,
    began: Instant,
    /// The task that has it gives something out; no other does meanwhile.
    giving: Arc<Mutex<()>>,
    /// Changes once the kubelet is to get a new report.
    changes: watch::Sender<u64>,
}

impl Plugin {
    /// A plugin that gives out the memory of these GPUs.
    #[must_use]
    pub fn new(
        gpus: Vec<SharedGpu>,
        (rules, grants): (PluginRules, Grants),
        cluster: Option<Cluster>,
        kubelet: Kubelet,
    ) -> Self {
        Plugin {
            rules,
            grants,
            cluster,
            kubelet,
            gpus: Arc::new(RwLock::new(gpus)),
            held: Arc::default(),
            uses: Arc::default(),
            lost: Arc::default(),
            served: Arc::new(AtomicBool::new(true)),
            began: Instant::now(),
            giving: Arc::default(),
            changes: watch::Sender::new(0),
        }
    }

    /// What is given out from now on. The kubelet gets a report if that is something else.
    pub fn set(&self, gpus: Vec<SharedGpu>) {
        let mut known = self.gpus.write().unwrap_or_else(PoisonError::into_inner);
        if *known == gpus {
            return;
        }
        *known = gpus;
        drop(known);
        self.changes.send_modify(|count| *count += 1);
    }

    /// What is given out now.
    #[must_use]
    pub fn gpus(&self) -> Vec<SharedGpu> {
        self.gpus.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The same, with those for lost of which nothing can be shared now.
    #[must_use]
    pub fn open_gpus(&self) -> Vec<SharedGpu> {
        let mut gpus = self.gpus();
        gpus.iter_mut().for_each(|gpu| gpu.healthy &= self.can_be(gpu.index, Use::Shared));
        gpus
    }

    /// Takes over which pods have something of a GPU that is gone.
    pub(crate) fn set_lost(&self, pods: Lost) {
        *self.lost.write().unwrap_or_else(PoisonError::into_inner) = pods;
    }

    pub(crate) fn lost(&self) -> Lost {
        self.lost.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on the engine makes containers by cgpu, or it doesn't, and nothing is given out.
    pub fn set_served(&self, served: bool) {
        if self.served.swap(served, Ordering::AcqRel) != served {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    fn is_served(&self) -> bool {
        self.served.load(Ordering::Acquire)
    }

    pub(crate) fn rules(&self) -> &PluginRules {
        &self.rules
    }

    /// What the kubelet reported last of which containers have what; `None` before it has.
    #[must_use]
    pub fn held(&self) -> Option<ListPodResourcesResponse> {
        self.held.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks the kubelet which containers have what.
    ///
    /// # Errors
    ///
    /// If it can't be asked.
    pub async fn check(&self) -> anyhow::Result<()> {
        let asked = self.began.elapsed();
        let held = self.kubelet.held().await?;
        let AskRules { memory, whole, .. } = &self.rules.asks;
        let modes = modes(&held, &self.gpus(), memory, whole);
        let was_known =
            self.held.write().unwrap_or_else(PoisonError::into_inner).replace(held).is_some();
        let used = self.change_uses(|uses| uses.set(modes, asked));
        if used || !was_known {
            self.changes.send_modify(|count| *count += 1);
        }
        Ok(())
    }

    /// Returns whether a GPU is used another way by that.
    fn change_uses(&self, change: impl FnOnce(&mut Uses)) -> bool {
        let indices: Vec<u32> = self.gpus().iter().map(|gpu| gpu.index).collect();
        let mut uses = self.uses.write().unwrap_or_else(PoisonError::into_inner);
        let of = |uses: &Uses| indices.iter().map(|index| uses.of(*index)).collect::<Vec<_>>();
        let before = of(&uses);
        change(&mut uses);
        before != of(&uses)
    }

    /// Gives GPUs out so, or says why that can't be.
    pub(crate) fn give(&self, indices: &[u32], wanted: Use) -> Result<(), String> {
        let mut given = Ok(());
        if self.change_uses(|uses| given = uses.give(indices, wanted, self.began.elapsed())) {
            self.changes.send_modify(|count| *count += 1);
        }
        let AskRules { memory, whole, .. } = &self.rules.asks;
        given.map_err(|index| match wanted.other() {
            Use::Whole => format!(
                "GPU {index} has just become another container's as a whole ({whole}); the next pod finds \
                 another GPU"
            ),
            Use::Shared => format!(
                "memory of GPU {index} has just become another container's ({memory}); the next pod finds \
                 another GPU"
            ),
        })
    }

    /// Lets no other task give anything out, and knows which containers have what. If the kubelet doesn't
    /// report that, it is as it was last.
    pub(crate) async fn begin_giving(&self) -> MutexGuard<'_, ()> {
        let giving = self.giving.lock().await;
        if let Err(error) = self.check().await {
            warn!("who has what may have changed: {error:#}");
        }
        giving
    }

    /// Records what a container is given, before the kubelet hears of it.
    pub(crate) fn record(
        &self,
        gpus: Vec<GrantedGpu>,
        beside: GrantDetails,
        envs: &mut BTreeMap<String, String>,
    ) -> Result<(), String> {
        let failed = |error: &dyn Error| format!("what is given can't be recorded: {error}");
        let grant = grant::new(gpus, beside, envs).map_err(|error| failed(&error))?;
        self.grants.give(&grant).map_err(|error| failed(&error))
    }

    /// The containers that can be meant by a request for so many of `resource`, whatever GPUs they are of.
    pub(crate) async fn who_asks(&self, resource: &str, count: usize) -> Vec<DeviceRequest> {
        let Some(cluster) = &self.cluster else { return Vec::new() };
        let reported = async {
            let (held, pods) = try_join!(self.kubelet.held(), cluster.pods())?;
            let answered = self.answered(resource);
            let meant = |pods: &[Pod]| -> Vec<DeviceRequest> {
                let device_requests =
                    device_requests(pods, resource, &self.rules.asks, self.rules.unit);
                let meant =
                    candidates(&device_requests, &holdings(&held, resource), &answered, count);
                meant.into_iter().cloned().collect()
            };
            match meant(&pods) {
                // The kubelet may have heard of a pod sooner.
                none if none.is_empty() => anyhow::Ok(meant(&cluster.latest_pods().await?)),
                device_requests => Ok(device_requests),
            }
        };
        match reported.await {
            Ok(device_requests) => device_requests,
            Err(error) => {
                warn!("the pod of this request is not known: {error:#}");
                Vec::new()
            }
        }
    }

    /// Which containers were given something of `resource`, whatever the kubelet reports.
    fn answered(&self, resource: &str) -> Answered {
        match self.grants.all() {
            Ok(grants) => Answered::of(&grants, resource),
            Err(error) => {
                warn!("who was given something is known by the kubelet alone: {error}");
                Answered::default()
            }
        }
    }

    /// Whether a GPU can be given out so now.
    pub(crate) fn can_be(&self, index: u32, wanted: Use) -> bool {
        self.is_served()
            && self.uses.read().unwrap_or_else(PoisonError::into_inner).can_be(index, wanted)
    }

    /// Comes once at first, and then for each change.
    pub(crate) fn changes(&self) -> WatchStream<u64> {
        WatchStream::new(self.changes.subscribe())
    }

    fn devices(&self) -> ListAndWatchResponse {
        let devices = self.open_gpus().into_iter().flat_map(|gpu| {
            let health = if gpu.healthy { HEALTHY } else { UNHEALTHY };
            let device = |id| Device { id, health: health.to_owned() };
            gpu.ids().map(device).collect::<Vec<_>>()
        });
        ListAndWatchResponse { devices: devices.collect() }
    }

    /// What the kubelet is to ask: whether a container has its own is known by the cluster alone.
    #[must_use]
    pub fn options(&self) -> DevicePluginOptions {
        DevicePluginOptions {
            pre_start_required: self.cluster.is_some(),
            get_preferred_allocation_available: true,
        }
    }

    /// What is known of the containers that ask for so many units.
    async fn asked(&self, units: usize) -> Asked {
        let mut asked = Asked {
            device_requests: Vec::new(),
            reserved: ByGpu::new(),
            is_free: self.rules.disable_isolation,
            placement: self.rules.placement,
            unknown: None,
        };
        let Some(cluster) = &self.cluster else { return asked };
        let memory = &self.rules.asks.memory;
        let held = self.kubelet.held().await.map(|held| holdings(&held, memory));
        let reported = async {
            let (node, pods) = try_join!(cluster.node(), cluster.pods())?;
            let (is_free, placement) = said(&node.metadata.labels.unwrap_or_default());
            let answered = self.answered(memory);
            let none_held = Holdings::new();
            let held = held.as_ref().unwrap_or(&none_held);
            let meant = |pods: &[Pod]| -> (Vec<DeviceRequest>, ByGpu) {
                let all = device_requests(pods, memory, &self.rules.asks, self.rules.unit);
                let meant: Vec<DeviceRequest> =
                    candidates(&all, held, &answered, units).into_iter().cloned().collect();
                let reserved = meant.first().map(|first| reserved(&all, held, first));
                (meant, reserved.unwrap_or_default())
            };
            let device_requests = match meant(&pods) {
                // The kubelet may have heard of a pod sooner.
                (none, _) if none.is_empty() => meant(&cluster.latest_pods().await?),
                device_requests => device_requests,
            };
            anyhow::Ok((is_free, placement, device_requests))
        };
        match reported.await {
            Ok((is_free, placement, (device_requests, reserved))) => {
                asked.reserved = reserved;
                asked.is_free |= is_free;
                asked.placement = placement.unwrap_or(asked.placement);
                asked.unknown =
                    held.as_ref().err().and_then(|error| unknown(&device_requests, error));
                asked.device_requests = device_requests;
            }
            Err(error) => warn!("the pod of this request is not known; it gets one GPU: {error:#}"),
        }
        asked
    }

    /// What a container gets that the kubelet gives these units.
    fn allocate_one(
        &self,
        ids: &[String],
        asked: &Asked,
    ) -> Result<ContainerAllocateResponse, String> {
        if let Some(unknown) = &asked.unknown {
            return Err(unknown.clone());
        }
        let gpus = self.gpus();
        let gone = |id| format!("this node has no unit {id:?}; its GPUs have changed");
        let parts = parts(&gpus, ids).map_err(gone)?;
        let unit = self.rules.unit;
        let is_even = parts.windows(2).all(|pair| pair[0].1 == pair[1].1);
        let of_gpus: ByGpu = parts.iter().map(|(gpu, units)| (gpu.index, *units)).collect();
        let mut meant = asked
            .device_requests
            .iter()
            .filter(|device_request| is_even && device_request.is_on(parts.len()));
        let device_request = meant
            .clone()
            .find(|device_request| device_request.decided == of_gpus)
            .or_else(|| meant.next());
        if device_request.is_none() && (parts.len() > 1 || !asked.device_requests.is_empty()) {
            // The kubelet knows no GPUs, and takes what is left wherever it is.
            return Err(refusal(&parts, ids.len(), asked.device_requests.first(), unit));
        }
        let known = ContainerFacts {
            pod_units: device_request.map(|device_request| device_request.pod_units),
            weight: device_request.and_then(|device_request| {
                weight(device_request.percent, parts.len(), self.rules.most_weight)
            }),
            is_free: asked.is_free,
        };
        let mut envs = environment(&parts, unit, &known)?;
        let may_be = asked
            .device_requests
            .iter()
            .filter(|device_request| is_even && device_request.is_on(parts.len()));
        let beside = GrantDetails {
            resource: self.rules.asks.memory.clone(),
            devices: ids.to_vec(),
            weight: known.weight,
            unenforced: known.is_free,
            candidates: may_be.map(DeviceRequest::container).collect(),
            holder: None,
        };
        let indices: Vec<u32> = parts.iter().map(|(gpu, _)| gpu.index).collect();
        self.give(&indices, Use::Shared)?;
        self.record(grant::memory(&parts, unit), beside, &mut envs)?;
        let pod = device_request.map(|device_request| {
            format!("{}/{}", device_request.of.namespace, device_request.of.pod)
        });
        info!(gpus = ?indices, units = ids.len(), %unit, pod, "given out");
        Ok(ContainerAllocateResponse { envs, ..ContainerAllocateResponse::default() })
    }

    /// Whether a container that is about to start has units as its pod asks for them. The kubelet doesn't
    /// say whose units it asks for, and of two pods that ask for as many at once, on another number of
    /// GPUs, one may get what was chosen for the other. If that isn't known, it starts.
    async fn is_its_own(&self, ids: &[String]) -> Result<(), String> {
        let Some(cluster) = &self.cluster else { return Ok(()) };
        let gpus = self.gpus();
        let Ok(parts) = parts(&gpus, ids) else { return Ok(()) };
        let (held, pods) = match try_join!(self.kubelet.held(), cluster.pods()) {
            Ok(reported) => reported,
            Err(error) => {
                warn!("whether a container has what its pod asks for isn't known: {error:#}");
                return Ok(());
            }
        };
        let AskRules { memory, .. } = &self.rules.asks;
        let held = holdings(&held, memory);
        let device_requests = device_requests(&pods, memory, &self.rules.asks, self.rules.unit);
        mistaken(&device_requests, &held, ids, parts.len()).map_or(Ok(()), Err)
    }
}

/// What is known of one of the kubelet's requests.
#[derive(Debug)]
struct Asked {
    /// The requests that can be meant, the likeliest first.
    device_requests: Vec<DeviceRequest>,
    /// Units of each GPU that are decided on for others than the first.
    reserved: ByGpu,
    /// Whether the container's quota is not to be enforced.
    is_free: bool,
    /// Which GPU is preferred.
    placement: Placement,
    /// Why it isn't known what the container is to get.
    unknown: Option<String>,
}

/// Why it isn't known which of these is meant, if the kubelet doesn't report which containers have what, for that
/// `error`: they don't all ask for one GPU.
fn unknown(device_requests: &[DeviceRequest], error: &anyhow::Error) -> Option<String> {
    let other = device_requests.iter().find(|device_request| !device_request.is_on(1))?;
    Some(format!(
        "{error:#}, so it is not known whether this is for {}/{}, which asks for its memory on other than one GPU; name \
         the kubelet's socket (--pod-resources; node.kubeletRoot of the chart)",
        other.of.namespace, other.of.pod
    ))
}

/// Why units that the kubelet chose by itself aren't given out.
fn refusal(
    parts: &[(&SharedGpu, u32)],
    units: usize,
    device_request: Option<&DeviceRequest>,
    unit: Unit,
) -> String {
    match device_request.map(|device_request| (device_request, &device_request.gpus)) {
        Some((device_request, Err(reason))) => {
            format!("{}/{}: {reason}", device_request.of.namespace, device_request.of.pod)
        }
        Some((device_request, Ok(count))) if *count > 1 => format!(
            "{}/{} asks for {} {unit} on each of {count} GPUs, and this node has no {count} GPUs with so \
             much free; ask for less, or for fewer GPUs",
            device_request.of.namespace,
            device_request.of.pod,
            units / *count as usize
        ),
        _ => {
            let list =
                parts.iter().map(|(gpu, units)| format!("{units} {unit} of GPU {}", gpu.index));
            format!(
                "no GPU of this node has {units} {unit} free, though all together do (here {}); ask for \
                 less",
                list.collect::<Vec<_>>().join(", ")
            )
        }
    }
}

/// What the kubelet is answered.
pub(crate) fn answer(
    responses: Vec<Result<ContainerAllocateResponse, String>>,
) -> Result<Response<AllocateResponse>, Status> {
    match responses.into_iter().collect::<Result<Vec<_>, String>>() {
        Ok(container_responses) => Ok(Response::new(AllocateResponse { container_responses })),
        Err(reason) => {
            warn!(reason, "a container does not get its GPU");
            Err(Status::failed_precondition(reason))
        }
    }
}

pub(crate) type Devices = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(self.options()))
    }

    type ListAndWatchStream = Devices;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Devices>, Status> {
        let plugin = self.clone();
        let reported = self.changes().map(move |_| Ok(plugin.devices()));
        Ok(Response::new(Box::pin(reported)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let gpus = self.gpus();
        let mut container_responses = Vec::new();
        for question in request.into_inner().container_requests {
            let size = usize::try_from(question.allocation_size).unwrap_or_default();
            let asked = self.asked(size).await;
            let first = asked.device_requests.first();
            let count = first.map_or(Ok(1), |device_request| device_request.gpus.clone());
            let demand = |count| Demand {
                units: size,
                gpus: count as usize,
                placement: asked.placement,
                decided: first
                    .map(|device_request| device_request.decided.clone())
                    .unwrap_or_default(),
                reserved: asked.reserved.clone(),
            };
            let (available, must) =
                (&question.available_device_ids, &question.must_include_device_ids);
            // If no GPU has enough free units the kubelet chooses, and is refused by `allocate`.
            let device_ids =
                count.ok().and_then(|count| preferred(&gpus, available, must, &demand(count)));
            let device_ids = device_ids.unwrap_or_default();
            container_responses.push(ContainerPreferredAllocationResponse { device_ids });
        }
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let requests = request.into_inner().container_requests;
        let _giving = self.begin_giving().await;
        let mut responses = Vec::new();
        for question in &requests {
            let asked = self.asked(question.device_ids.len()).await;
            responses.push(self.allocate_one(&question.device_ids, &asked));
        }
        answer(responses)
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        self.is_its_own(&request.into_inner().device_ids).await.map_err(|reason| {
            warn!(reason, "a container does not start");
            Status::failed_precondition(reason)
        })?;
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// While the kubelet does not report which containers have what, none gets another number of
    /// GPUs than it asks for.
    #[test]
    fn pods_differing_in_gpu_count_need_pod_resources() {
        let device_requests_of = |counts: &[Option<&str>]| -> Vec<DeviceRequest> {
            let pod = |count: &Option<&str>| -> Pod {
                let labels = count.map(|count| json!({"aliyun.com/gpu-count": count}));
                let container =
                    json!({"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "4"}}});
                serde_json::from_value(json!({
                    "metadata": {"name": "p", "namespace": "team", "labels": labels.unwrap_or(json!({}))},
                    "spec": {"containers": [container]},
                }))
                .unwrap()
            };
            let pods: Vec<Pod> = counts.iter().map(pod).collect();
            device_requests(
                &pods,
                "aliyun.com/gpu-mem",
                &AskRules::default(),
                crate::units::Unit::GiB,
            )
        };
        let error = anyhow::anyhow!("the kubelet does not tell at /x who has what");
        assert_eq!(unknown(&device_requests_of(&[None, Some("1")]), &error), None);
        let reported = unknown(&device_requests_of(&[None, Some("2")]), &error).unwrap();
        assert!(
            reported.starts_with("the kubelet does not tell at /x who has what, so"),
            "{reported}"
        );
        assert!(reported.contains("team/p") && reported.contains("--pod-resources"), "{reported}");
    }
}
