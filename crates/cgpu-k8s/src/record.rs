//! Writes on node and pods what is so: how many GPUs the node has and which, and which pod has what of
//! which GPU. By the kubelet's word, whatever was chosen or told before.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use tokio::time::sleep;

use crate::cluster::Cluster;
use crate::life::Complaint;
use crate::node::{self, GPU_COUNT_CAPACITY, labels};
use crate::plugin::Plugin;
use crate::pods::{annotations, holdings};

/// How often the kubelet is asked who has what.
const LOOK: Duration = Duration::from_secs(1);

/// After how many looks all is compared, though nothing changed: what somebody else wrote over.
const LOOKS_PER_AUDIT: u32 = 10;

/// The annotations of pods, by namespace and name.
type Annotations = BTreeMap<(String, String), BTreeMap<String, String>>;

/// Writes until it is dropped. What can't be written is told, and tried again.
pub(crate) async fn keep_record(cluster: Cluster, plugin: Plugin, resource: String) {
    let (mut complaint, mut written) = (Complaint::default(), Annotations::new());
    for look in 0_u32.. {
        let is_audit = look.is_multiple_of(LOOKS_PER_AUDIT);
        if is_audit && let Err(error) = write_node(&cluster, &plugin).await {
            complaint.tell(format!("{error:#}"));
        }
        match write_pods(&cluster, &plugin, &resource, &written, is_audit).await {
            Ok(now) => written = now,
            Err(error) => complaint.tell(format!("{error:#}")),
        }
        sleep(LOOK).await;
    }
}

async fn write_node(cluster: &Cluster, plugin: &Plugin) -> Result<()> {
    let (node, gpus) = (cluster.node().await?, plugin.gpus());
    let mut labels = labels(&gpus);
    let has = node.metadata.labels.unwrap_or_default();
    labels.retain(|name, value| has.get(name) != Some(value));
    let mut annotations = node::annotations(&gpus, plugin.unit());
    let has = node.metadata.annotations.unwrap_or_default();
    annotations.retain(|name, value| has.get(name) != Some(value));
    if !labels.is_empty() || !annotations.is_empty() {
        cluster.describe_node(&labels, &annotations).await?;
    }
    let count = gpus.len().to_string();
    let status = node.status.unwrap_or_default();
    let is_told = |amounts: Option<BTreeMap<String, Quantity>>| {
        amounts.is_some_and(|has| has.get(GPU_COUNT_CAPACITY).is_some_and(|has| has.0 == count))
    };
    if !(is_told(status.capacity) && is_told(status.allocatable)) {
        cluster.set_capacity(GPU_COUNT_CAPACITY, gpus.len()).await?;
    }
    Ok(())
}

/// Writes what the pods have, where it isn't what was `written` last; that is what is returned.
async fn write_pods(
    cluster: &Cluster,
    plugin: &Plugin,
    resource: &str,
    written: &Annotations,
    is_audit: bool,
) -> Result<Annotations> {
    let held = holdings(&cluster.held().await?, resource);
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
