//! Binds pods to nodes, with the GPUs that were decided on written on them: [`Binder`].

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Status};
use kube::Client;
use kube::api::{Api, PostParams};
use serde_json::json;
use thiserror::Error;
use tokio::time::sleep;

use super::fleet::{Fleet, Reservation, Seeker};
use super::leadership::Leadership;
use super::protocol::BindArgs;
use crate::annotations::{ASSUME_TIME, CORE_ALLOCATION, Words, sum, words};
use crate::cluster::{Refused, TIMEOUT, annotate, in_time};

/// Why nothing is known of the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "this replica of cgpu-scheduler-extender does not serve: another one does, or it has not heard of all nodes \
     and pods yet"
)]
pub(crate) struct NotServing;

/// Decides and binds.
pub(crate) struct Binder {
    client: Client,
    leadership: Leadership,
    /// `None` while this replica doesn't serve.
    fleet: Mutex<Option<Fleet>>,
    /// The UIDs of the pods that are being bound.
    busy: Mutex<HashSet<String>>,
}

/// One pod that is being bound.
struct Busy<'a> {
    all: &'a Mutex<HashSet<String>>,
    uid: &'a str,
}

impl<'a> Busy<'a> {
    fn begin(all: &'a Mutex<HashSet<String>>, uid: &'a str) -> Result<Self> {
        let is_new = all.lock().unwrap_or_else(PoisonError::into_inner).insert(uid.to_owned());
        ensure!(is_new, "the pod is being bound already");
        Ok(Busy { all, uid })
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.all.lock().unwrap_or_else(PoisonError::into_inner).remove(self.uid);
    }
}

impl Binder {
    pub(crate) fn new(client: Client, leadership: Leadership) -> Self {
        Binder { client, leadership, fleet: Mutex::new(None), busy: Mutex::default() }
    }

    /// Serves with that fleet from now on, or not at all.
    pub(crate) fn set_fleet(&self, fleet: Option<Fleet>) {
        *self.lock() = fleet;
    }

    fn lock(&self) -> MutexGuard<'_, Option<Fleet>> {
        self.fleet.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no pod is being bound.
    pub(crate) async fn finish(&self) {
        while !self.busy.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether it is this replica that serves.
    pub(crate) fn is_serving(&self) -> bool {
        self.lock().is_some()
    }

    /// Where the replica listens that serves, if it is another one.
    pub(crate) async fn leader(&self) -> Result<Option<SocketAddr>> {
        self.leadership.leader(TIMEOUT).await
    }

    /// Queries the fleet, or reports something to it.
    pub(crate) fn with_fleet<T>(&self, ask: impl FnOnce(&mut Fleet) -> T) -> Result<T, NotServing> {
        self.lock().as_mut().map(ask).ok_or(NotServing)
    }

    /// Binds a pod, and returns which GPUs it has.
    pub(crate) async fn bind(&self, args: &BindArgs) -> Result<String> {
        let _busy = Busy::begin(&self.busy, &args.pod_uid)?;
        self.leadership.require(TIMEOUT).await?;
        let pods = Api::<Pod>::namespaced(self.client.clone(), &args.pod_namespace);
        let pod = in_time(async { Ok(pods.get(&args.pod_name).await?) })
            .await
            .context("the pod can't be read")?;
        ensure!(
            pod.metadata.uid.as_deref() == Some(&*args.pod_uid),
            "the pod is another one of that name by now"
        );
        ensure!(pod.metadata.deletion_timestamp.is_none(), "the pod is being deleted");
        if let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) {
            ensure!(node == args.node, "the pod is on node {node} already");
            return Ok("as it is bound already".to_owned());
        }
        let seeker = self.with_fleet(|fleet| Seeker::of(&pod, fleet.asks()))?;
        if let Err(why) = &seeker.ask.gpus {
            bail!("{why}");
        }
        ensure!(
            self.with_fleet(|fleet| fleet.asks().is_asked_for(&pod))?,
            "the pod asks for nothing of cgpu's, and is no concern of this extender"
        );
        if seeker.ask.is_empty() {
            self.post_binding(args).await?;
            return Ok("none".to_owned());
        }
        let reservation = self.with_fleet(|fleet| fleet.reservation(&seeker, &args.node))??;
        if let Err(error) = self.write(&pod, &reservation).await {
            // Nothing was bound.
            self.with_fleet(|fleet| fleet.forget(&args.pod_uid))?;
            return Err(error);
        }
        match self.post_binding(args).await {
            Ok(()) => {}
            // The API server has refused: the reservation belongs to no pod. If it did not answer, it may still bind.
            Err(error) if is_refusal(&error) => {
                self.with_fleet(|fleet| fleet.forget(&args.pod_uid))?;
                return Err(error);
            }
            Err(error) => return Err(error),
        }
        let gpus = sum(&reservation.choice.memory);
        let listed: Vec<String> =
            gpus.iter().map(|(gpu, units)| format!("{gpu}:{units}")).collect();
        Ok(listed.join(","))
    }

    /// Writes on the pod what it is to have.
    async fn write(&self, pod: &Pod, reservation: &Reservation) -> Result<()> {
        let mut words: Words = words(&reservation.choice.memory, reservation.gpu_units, false);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        words.insert(ASSUME_TIME.to_owned(), now.as_nanos().to_string());
        if !reservation.choice.percent.is_empty() {
            let percent = json!(reservation.choice.percent).to_string();
            words.insert(CORE_ALLOCATION.to_owned(), percent);
        }
        annotate(&self.client, pod, &words).await
    }

    async fn post_binding(&self, args: &BindArgs) -> Result<()> {
        let binding = Binding {
            metadata: ObjectMeta {
                name: Some(args.pod_name.clone()),
                namespace: Some(args.pod_namespace.clone()),
                uid: Some(args.pod_uid.clone()),
                ..ObjectMeta::default()
            },
            target: ObjectReference {
                kind: Some("Node".to_owned()),
                name: Some(args.node.clone()),
                ..ObjectReference::default()
            },
        };
        let pods = Api::<Pod>::namespaced(self.client.clone(), &args.pod_namespace);
        let how = PostParams::default();
        let posted = async {
            let name = &args.pod_name;
            Ok(pods.create_subresource::<_, Status>("binding", name, &how, &binding).await?)
        };
        in_time(posted).await.context("the pod can't be bound")?;
        Ok(())
    }
}

/// Whether the API server has answered that it doesn't.
fn is_refusal(error: &anyhow::Error) -> bool {
    let refused = error.downcast_ref::<Refused>();
    // In conflict is also what is bound already.
    refused.is_some_and(|refused| (400..500).contains(&refused.code) && refused.code != 409)
}
