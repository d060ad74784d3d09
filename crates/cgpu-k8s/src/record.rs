//! Writes on node and pods what is so: how many GPUs the node has and which, and which pod has what of
//! which GPU. By the kubelet's word, whatever was chosen or told before.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use cgpu::inventory::driver_version;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use tokio::time::sleep;

use crate::ask::{CORE_PERCENTAGE, whole};
use crate::cluster::Cluster;
use crate::life::Complaint;
use crate::node::{self, GPU_COUNT_CAPACITY, labels};
use crate::plugin::Plugin;
use crate::pods::{annotations, holdings};
use crate::units::SharedGpu;

/// How often it is compared with what the kubelet told.
const LOOK: Duration = Duration::from_secs(1);

/// After how many looks all is compared, though nothing changed: what somebody else wrote over.
const LOOKS_PER_AUDIT: u32 = 10;

/// The annotations of pods, by namespace and name.
type Annotations = BTreeMap<(String, String), BTreeMap<String, String>>;

/// Writes until it is dropped. What can't be written is told, and tried again.
pub(crate) async fn keep_record(cluster: Cluster, plugin: Plugin, proc_root: PathBuf) {
    let (mut complaint, mut written) = (Complaint::default(), Annotations::new());
    let mut described = None;
    for look in 0_u32.. {
        let is_audit = look.is_multiple_of(LOOKS_PER_AUDIT);
        let gpus = plugin.open_gpus();
        if is_audit || described.as_ref() != Some(&gpus) {
            let driver = driver_version(&proc_root);
            match write_node(&cluster, &plugin, &gpus, driver.as_deref()).await {
                Ok(()) => described = Some(gpus),
                Err(error) => complaint.tell(format!("{error:#}")),
            }
        }
        match write_pods(&cluster, &plugin, &written, is_audit).await {
            Ok(now) => written = now,
            Err(error) => complaint.tell(format!("{error:#}")),
        }
        sleep(LOOK).await;
    }
}

async fn write_node(
    cluster: &Cluster,
    plugin: &Plugin,
    gpus: &[SharedGpu],
    driver: Option<&str>,
) -> Result<()> {
    let node = cluster.node().await?;
    let mut labels = labels(gpus, driver);
    let has = node.metadata.labels.unwrap_or_default();
    labels.retain(|name, value| has.get(name) != Some(value));
    let mut annotations = node::annotations(gpus, plugin.rules().unit);
    let has = node.metadata.annotations.unwrap_or_default();
    annotations.retain(|name, value| has.get(name) != Some(value));
    if !labels.is_empty() || !annotations.is_empty() {
        cluster.describe_node(&labels, &annotations).await?;
    }
    let status = node.status.unwrap_or_default();
    for (resource, count) in [(GPU_COUNT_CAPACITY, gpus.len()), (CORE_PERCENTAGE, 100 * gpus.len())]
    {
        let is_told = |amounts: &Option<BTreeMap<String, Quantity>>| {
            let told = amounts.as_ref().and_then(|has| whole(has.get(resource)?));
            told.is_some_and(|told| told as usize == count)
        };
        if !(is_told(&status.capacity) && is_told(&status.allocatable)) {
            cluster.set_capacity(resource, count).await?;
        }
    }
    Ok(())
}

/// Writes what the pods have, where it isn't what was `written` last; that is what is returned.
async fn write_pods(
    cluster: &Cluster,
    plugin: &Plugin,
    written: &Annotations,
    is_audit: bool,
) -> Result<Annotations> {
    let Some(held) = plugin.held() else { return Ok(written.clone()) };
    let held = holdings(&held, &plugin.rules().resource);
    let told = annotations(&held, &plugin.gpus());
    if told == *written && !is_audit || told.is_empty() {
        return Ok(told);
    }
    for pod in cluster.pods().await? {
        let name = |name: &Option<String>| name.clone().unwrap_or_default();
        let of = (name(&pod.metadata.namespace), name(&pod.metadata.name));
        let Some(words) = told.get(&of) else { continue };
        let has = pod.metadata.annotations.as_ref();
        let is_there =
            |(name, value): (&String, &String)| has.is_some_and(|has| has.get(name) == Some(value));
        if !words.iter().all(is_there) {
            cluster.annotate(&pod, words).await?;
        }
    }
    Ok(told)
}
