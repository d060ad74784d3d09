//! Writes on the node what is so: how many GPUs it has and which, and which of its pods has what of which GPU. By the
//! kubelet's word, whatever was chosen or reported before.
//!
//! On pods the extender writes it, which a cluster has one of: each node would need the right to write on all pods.
//! Where a cluster has none of ours, the node does, with credentials of its own.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use cgpu_host::inventory::driver_version;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Client;
use tokio::time::sleep;

use crate::cluster::{Cluster, annotate};
use crate::complaint::Complaint;
use crate::node::{self, GPU_COUNT_CAPACITY, Given, GivenByUid, Lost, labels};
use crate::plugin::Plugin;
use crate::pod_request::{CORE_PERCENTAGE, whole};
use crate::pods::{given, holdings, named};
use crate::units::SharedGpu;

/// How often it is compared with what the kubelet reported.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// After how many polls all is compared, though nothing changed: what another program wrote over.
const POLLS_PER_AUDIT: u32 = 10;

/// What pods have, by namespace and name.
type GivenByName = BTreeMap<(String, String), Given>;

/// What is written on the node.
#[derive(Debug, PartialEq, Eq)]
struct Written {
    gpus: Vec<SharedGpu>,
    lost: Lost,
    /// `None` until the kubelet has reported which containers have what.
    given: Option<GivenByName>,
}

/// Writes until it is dropped. What can't be written is reported, and retried. Also on pods, with `annotator`.
pub(crate) async fn keep_record(
    cluster: Cluster,
    plugin: Plugin,
    proc_root: PathBuf,
    annotator: Option<Client>,
) {
    let mut complaint = Complaint::default();
    let mut written = None;
    for check in 0_u32.. {
        if check > 0 {
            sleep(POLL_INTERVAL).await;
        }
        let held = plugin.held().map(|held| holdings(&held, &plugin.rules().asks.memory));
        let given = held.map(|held| given(&held, &plugin.gpus()));
        let now = Written { gpus: plugin.open_gpus(), lost: plugin.lost(), given };
        if !check.is_multiple_of(POLLS_PER_AUDIT) && written.as_ref() == Some(&now) {
            continue;
        }
        let driver = driver_version(&proc_root);
        match write(&cluster, &plugin, &now, driver.as_deref(), annotator.as_ref()).await {
            Ok(()) => written = Some(now),
            Err(error) => {
                written = None;
                complaint.report(format!("{error:#}"));
            }
        }
    }
}

async fn write(
    cluster: &Cluster,
    plugin: &Plugin,
    now: &Written,
    driver: Option<&str>,
    annotator: Option<&Client>,
) -> Result<()> {
    let pods = match &now.given {
        Some(given) if !given.is_empty() => cluster.pods().await?,
        _ => Vec::new(),
    };
    let by_uid = now.given.as_ref().map(|given| by_uid(given, &pods));
    write_node(cluster, plugin, now, by_uid.as_ref(), driver).await?;
    match (annotator, &now.given) {
        (Some(client), Some(given)) => write_pods(client, given, &pods).await,
        _ => Ok(()),
    }
}

/// By the UID of the pod. One that the API server doesn't report yet is written with the next audit of all.
fn by_uid(given: &GivenByName, pods: &[Pod]) -> GivenByUid {
    let of = |((namespace, name), given): (&(String, String), &Given)| {
        Some((named(pods, namespace, name)?.metadata.uid.clone()?, given.clone()))
    };
    given.iter().filter_map(of).collect()
}

async fn write_node(
    cluster: &Cluster,
    plugin: &Plugin,
    Written { gpus, lost, .. }: &Written,
    given: Option<&GivenByUid>,
    driver: Option<&str>,
) -> Result<()> {
    let node = cluster.node().await?;
    let mut labels = labels(gpus, driver);
    let has = node.metadata.labels.unwrap_or_default();
    labels.retain(|name, value| has.get(name) != Some(value));
    let mut annotations = node::annotations(gpus, plugin.rules().unit, lost, given);
    let is_all = given.is_none() || annotations.contains_key(node::PODS);
    let has = node.metadata.annotations.unwrap_or_default();
    annotations.retain(|name, value| has.get(name) != Some(value));
    if !labels.is_empty() || !annotations.is_empty() {
        cluster.describe_node(&labels, &annotations).await?;
    }
    let status = node.status.unwrap_or_default();
    for (resource, count) in [(GPU_COUNT_CAPACITY, gpus.len()), (CORE_PERCENTAGE, 100 * gpus.len())]
    {
        let is_reported = |amounts: &Option<BTreeMap<String, Quantity>>| {
            let reported = amounts.as_ref().and_then(|has| whole(has.get(resource)?));
            reported.is_some_and(|reported| reported as usize == count)
        };
        if !(is_reported(&status.capacity) && is_reported(&status.allocatable)) {
            cluster.set_capacity(resource, count).await?;
        }
    }
    ensure!(
        is_all,
        "what this node's pods have is too much for its annotation {}: on new pods it isn't written",
        node::PODS
    );
    Ok(())
}

/// Writes on the pods what they have, if that isn't there.
async fn write_pods(client: &Client, given: &GivenByName, pods: &[Pod]) -> Result<()> {
    let mut failed = None;
    for ((namespace, name), given) in given {
        let Some(pod) = named(pods, namespace, name) else { continue };
        let words = given.words();
        let has = pod.metadata.annotations.as_ref();
        let is_there =
            |(name, value): (&String, &String)| has.is_some_and(|has| has.get(name) == Some(value));
        if !words.iter().all(is_there)
            && let Err(error) = annotate(client, pod, &words).await
        {
            // What is the matter with one is nothing to the others.
            failed.get_or_insert(error);
        }
    }
    failed.map_or(Ok(()), Err)
}
