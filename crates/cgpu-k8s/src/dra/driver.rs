//! The driver next to the kubelet: prepares claims and lets them go, and reports the devices' health: [`Driver`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use cgpu_core::request::claim::{Claim, ClaimedGpu, Share};
use cgpu_host::failpoint::failpoint;
use cgpu_host::grants::{Claims, GrantError};
use cgpu_kubelet::dra::{
    Claim as ClaimName, Device, DeviceHealth, DeviceIdentifier, HEALTHY,
    NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
    NodeWatchResourcesRequest, NodeWatchResourcesResponse, UNHEALTHY,
};
use cgpu_kubelet::dra_plugin_server::DRAPlugin;
use cgpu_kubelet::dra_resource_health_server::DRAResourceHealth;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::sync::{Mutex, watch};
use tokio_stream::wrappers::{IntervalStream, WatchStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use super::allocation::{NodeRules, PrepareError, record};
use super::api::Api;
use super::cdi::CdiFiles;
use super::devices::NodeGpu;

/// How often the health is reported if nothing changes: half of the time after which the kubelet takes it for unknown.
const HEALTH_INTERVAL: Duration = Duration::from_secs(15);

/// The driver of one node.
#[derive(Debug, Clone)]
pub(crate) struct Driver {
    pub(crate) name: String,
    pub(crate) node: String,
    pub(crate) most_weight: u32,
    pub(crate) api: Api,
    pub(crate) claims: Claims,
    pub(crate) cdi: CdiFiles,
    /// The node's GPUs; changes once there is something new to report.
    pub(crate) gpus: watch::Sender<Vec<NodeGpu>>,
    /// The task that has it prepares something or lets it go; no other does meanwhile.
    pub(crate) preparing: Arc<Mutex<()>>,
}

impl Driver {
    /// Prepares a claim: its record first, then its CDI file. Asked again, it answers the same; after a crash in between,
    /// what is missing is made.
    async fn prepare(&self, claim: &ClaimName) -> Result<Claim, PrepareError> {
        let title = || format!("{}/{}", claim.namespace, claim.name);
        let gone = || PrepareError::Gone { claim: title(), uid: claim.uid.clone() };
        let known = self.claims.find(&claim.uid)?;
        let prepared = match (self.api.claim(&claim.namespace, &claim.name).await, known) {
            (Ok(Some(found)), _) if found.metadata.uid.as_ref() == Some(&claim.uid) => {
                self.recorded(&found)?
            }
            (Ok(_), _) => return Err(gone()),
            // What it was allocated stays so for as long as a pod has it.
            (Err(error), Some(known)) => {
                warn!(claim = title(), "{error:#}; it is prepared by its record");
                known
            }
            (Err(error), None) => {
                return Err(PrepareError::Failed(format!(
                    "claim {} can't be read: {error:#}",
                    title()
                )));
            }
        };
        failpoint("claim-recorded");
        self.cdi.write(&prepared).map_err(|error| {
            let path = self.cdi.path(&prepared.uid);
            PrepareError::Failed(format!("cannot write {}: {error}", path.display()))
        })?;
        failpoint("claim-cdi-written");
        Ok(prepared)
    }

    fn recorded(&self, claim: &ResourceClaim) -> Result<Claim, PrepareError> {
        let gpus = self.gpus.borrow().clone();
        let rules = NodeRules {
            driver: &self.name,
            node: &self.node,
            gpus: &gpus,
            most_weight: self.most_weight,
        };
        let mut random = File::open("/dev/urandom")
            .map_err(|error| PrepareError::Failed(format!("/dev/urandom: {error}")))?;
        let decided = |given: &_| {
            let mut failed = None;
            let token = || {
                let mut bytes = [0; 16];
                failed = failed.take().or(random.read_exact(&mut bytes).err());
                bytes.iter().map(|byte| format!("{byte:02x}")).collect()
            };
            let decided = record(claim, &rules, given, token)?;
            match failed {
                Some(error) => Err(PrepareError::Failed(format!("/dev/urandom: {error}"))),
                None => Ok(decided),
            }
        };
        self.claims.put(decided)
    }

    /// Lets a claim go, which may be unknown: by its record alone, its CDI file first.
    fn unprepare(&self, uid: &str) -> Result<(), String> {
        let path = self.cdi.path(uid);
        self.cdi
            .remove(uid)
            .map_err(|error| format!("cannot remove {}: {error}", path.display()))?;
        failpoint("claim-cdi-removed");
        self.claims.remove(uid).map_err(|error| error.to_string())
    }

    /// Takes in for which pods the claims are reserved by now: the kubelet asks once for a claim that several pods use.
    pub(crate) async fn refresh_pods(&self) -> anyhow::Result<()> {
        // Most are a template's: of these nothing is asked.
        for known in self.claims.all()?.into_iter().filter(|claim| !claim.of_one_pod) {
            let Some(found) = self.api.claim(&known.namespace, &known.name).await? else {
                continue;
            };
            let reserved = found.status.and_then(|status| status.reserved_for).unwrap_or_default();
            let pods: Vec<String> = reserved
                .into_iter()
                .filter(|user| user.resource == "pods")
                .map(|user| user.uid)
                .collect();
            if found.metadata.uid.as_ref() != Some(&known.uid) || pods == known.pods {
                continue;
            }
            let _preparing = self.preparing.lock().await;
            if self.claims.find(&known.uid)?.is_some() {
                let (uid, title) = (known.uid.clone(), known.title());
                self.claims.put(|given| {
                    let now = given.claims.iter().find(|claim| claim.uid == uid).unwrap_or(&known);
                    Ok::<_, GrantError>(Claim { pods, ..now.clone() })
                })?;
                info!(claim = title, "it is reserved for other pods now");
            }
        }
        Ok(())
    }

    fn devices(&self, claim: &Claim) -> Vec<Device> {
        let of_share = |share: &Share| {
            let id = self.cdi.device(claim, &share.request);
            let request = share.request.clone();
            let device = move |gpu: &ClaimedGpu| Device {
                request_names: vec![request.clone()],
                pool_name: gpu.pool.clone(),
                device_name: gpu.device.clone(),
                cdi_device_ids: vec![id.clone()],
                share_id: gpu.share_id.clone(),
            };
            share.gpus.iter().map(device).collect::<Vec<_>>()
        };
        claim.shares.iter().flat_map(of_share).collect()
    }

    fn health(node: &str, gpus: &[NodeGpu]) -> NodeWatchResourcesResponse {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let devices = gpus.iter().filter(|gpu| !gpu.gpu.mig_enabled).map(|gpu| {
            let fault = gpu.fault();
            DeviceHealth {
                device: Some(DeviceIdentifier {
                    pool_name: node.to_owned(),
                    device_name: gpu.device_name(),
                }),
                health: if fault.is_none() { HEALTHY } else { UNHEALTHY },
                last_updated_time: now.cast_signed(),
                health_check_timeout_seconds: 2 * HEALTH_INTERVAL.as_secs().cast_signed(),
                message: fault.unwrap_or_default(),
            }
        });
        NodeWatchResourcesResponse { devices: devices.collect() }
    }
}

#[tonic::async_trait]
impl DRAPlugin for Driver {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let _preparing = self.preparing.lock().await;
        let mut claims = BTreeMap::new();
        for claim in request.into_inner().claims {
            let answer = match self.prepare(&claim).await {
                Ok(prepared) => {
                    info!(claim = prepared.title(), uid = prepared.uid, "prepared");
                    NodePrepareResourceResponse {
                        devices: self.devices(&prepared),
                        error: String::new(),
                    }
                }
                Err(error) => {
                    warn!(uid = claim.uid, "{error}");
                    NodePrepareResourceResponse { devices: Vec::new(), error: error.to_string() }
                }
            };
            claims.insert(claim.uid, answer);
        }
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let _preparing = self.preparing.lock().await;
        let answer = |claim: ClaimName| {
            let error = self.unprepare(&claim.uid).err().unwrap_or_default();
            match error.is_empty() {
                true => info!(uid = claim.uid, "let go"),
                false => warn!(uid = claim.uid, "{error}"),
            }
            (claim.uid, NodeUnprepareResourceResponse { error })
        };
        let claims = request.into_inner().claims.into_iter().map(answer).collect();
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}

#[tonic::async_trait]
impl DRAResourceHealth for Driver {
    type NodeWatchResourcesStream =
        Pin<Box<dyn Stream<Item = Result<NodeWatchResourcesResponse, Status>> + Send>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let (node, gpus) = (self.node.clone(), self.gpus.clone());
        let changes = WatchStream::new(self.gpus.subscribe()).map(drop);
        let again = IntervalStream::new(tokio::time::interval(HEALTH_INTERVAL)).skip(1).map(drop);
        // Each message is the complete list.
        let reported =
            changes.merge(again).map(move |()| Ok(Driver::health(&node, &gpus.borrow())));
        Ok(Response::new(Box::pin(reported)))
    }
}
