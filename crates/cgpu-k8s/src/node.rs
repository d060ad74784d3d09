//! What this node's labels say, and what is written on the node. Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use serde::{Deserialize, Serialize};

use crate::annotations::{ByContainer, Words, words};
use crate::placement::Placement;
use crate::pod_request::whole;
use crate::units::{SharedGpu, Unit};

/// The label of a node on which no container's quota is to be enforced (AliyunContainerService's).
pub const DISABLE_ISOLATION: &str = "cgpu.disable.isolation";

/// The label that says which GPU is preferred: `binpack` or `spread` (ACK's).
pub const PLACEMENT: &str = "ack.node.gpu.placement";

/// The label that says how many pods a GPU may have (ACK's).
pub const MOST_PODS: &str = "ack.node.gpu.max-pod";

/// What a node has as many of as it has GPUs.
pub const GPU_COUNT_CAPACITY: &str = "aliyun.com/gpu-count";

/// The annotation of a node that says how many units which of its GPUs has, `{"unit":"GiB","gpus":{"0":15,"4":24}}`; of
/// which nothing can be given out (`closed`), and which pods have something of a GPU that is gone (`lost`).
pub const DEVICES: &str = "cgpu.devices";

/// The annotation of a node that says what its pods have, by their UID:
/// `{"UID":{"units":15,"containers":{"main":{"0":4}}}}`. The scheduler extender writes it on the pods: a node may write
/// on itself alone.
pub const PODS: &str = "cgpu.pods";

/// The most bytes of [`PODS`]: the API server takes 256 KiB of annotations in all, and the kubelet runs 110 pods.
const MOST_PODS_BYTES: usize = 128 << 10;

/// More units than this on one GPU are MiB if nothing says what they are: as gpushare guesses.
const MOST_GIB: u32 = 100;

/// Pods, `NAMESPACE/NAME` by UID.
pub type Lost = BTreeMap<String, String>;

/// What a pod has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Given {
    /// All units of the first of its GPUs.
    pub units: u32,
    /// Units that it has, by container and the GPU's index.
    pub containers: ByContainer,
}

impl Given {
    /// What is written on the pod.
    #[must_use]
    pub fn words(&self) -> Words {
        words(&self.containers, self.units, true)
    }
}

/// What pods have, by their UID.
pub type GivenByUid = BTreeMap<String, Given>;

#[derive(Debug, Serialize, Deserialize)]
struct Devices {
    unit: String,
    gpus: BTreeMap<u32, u32>,
    /// Those of which nothing can be given out.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    closed: BTreeSet<u32>,
    /// `NAMESPACE/NAME` of pods, by UID.
    #[serde(default, skip_serializing_if = "Lost::is_empty")]
    lost: Lost,
}

/// What a node reports of its shared GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeGpus {
    /// How much memory a unit is.
    pub unit: Unit,
    /// Units of each GPU, by its index.
    pub gpus: BTreeMap<u32, u32>,
    /// Those of which nothing can be given out: a lost one, or one that is exclusive to a container.
    pub closed: BTreeSet<u32>,
    /// Its pods that have something of a GPU which is no longer there.
    pub lost: Lost,
}

/// What is written on a node about its GPUs, about the pods whose GPU is gone, and about those that have
/// something, if that is known and isn't too much.
#[must_use]
pub fn annotations(
    gpus: &[SharedGpu],
    unit: Unit,
    lost: &Lost,
    given: Option<&GivenByUid>,
) -> BTreeMap<String, String> {
    let closed = gpus.iter().filter(|gpu| !gpu.healthy).map(|gpu| gpu.index).collect();
    let gpus = gpus.iter().map(|gpu| (gpu.index, gpu.units)).collect();
    let devices = Devices { unit: unit.name().to_owned(), gpus, closed, lost: lost.clone() };
    // Strings and numbers; nothing of it can fail.
    let text = serde_json::to_string(&devices).unwrap_or_default();
    let mut written = BTreeMap::from([(DEVICES.to_owned(), text)]);
    let pods = given.map(|given| serde_json::to_string(given).unwrap_or_default());
    written.extend(pods.filter(|pods| fits(pods)).map(|pods| (PODS.to_owned(), pods)));
    written
}

/// Whether an annotation of that text can be written together with others.
fn fits(pods: &str) -> bool {
    pods.len() <= MOST_PODS_BYTES
}

/// What a node says that its pods have; of a node that says nothing of the kind, nothing.
#[must_use]
pub fn given_of(node: &Node) -> GivenByUid {
    let text = node.metadata.annotations.as_ref().and_then(|annotations| annotations.get(PODS));
    let text = text.filter(|text| fits(text));
    text.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

/// What a node says of its GPUs that has units of `resource`. If it doesn't say how many of which GPU, all
/// GPUs have as many.
#[must_use]
pub fn gpus_of(node: &Node, resource: &str) -> Option<NodeGpus> {
    let capacity = node.status.as_ref()?.capacity.as_ref()?;
    let amount = |name: &str| capacity.get(name).and_then(whole);
    let units = amount(resource).filter(|units| *units > 0)?;
    let reported = node.metadata.annotations.as_ref().and_then(devices);
    Some(reported.unwrap_or_else(|| {
        let count = amount(GPU_COUNT_CAPACITY).unwrap_or(1).max(1);
        let unit = if units / count > MOST_GIB { Unit::MiB } else { Unit::GiB };
        let gpus = (0..count).map(|index| (index, units / count)).collect();
        NodeGpus { unit, gpus, closed: BTreeSet::new(), lost: Lost::new() }
    }))
}

fn devices(annotations: &BTreeMap<String, String>) -> Option<NodeGpus> {
    let Devices { unit, gpus, closed, lost } =
        serde_json::from_str(annotations.get(DEVICES)?).ok()?;
    Some(NodeGpus { unit: unit.parse().ok()?, gpus, closed, lost })
}

/// What the labels say of containers: whether their quotas are not to be enforced, and which GPU is
/// preferred, if they say that.
#[must_use]
pub fn said(labels: &BTreeMap<String, String>) -> (bool, Option<Placement>) {
    let is_free = labels.get(DISABLE_ISOLATION).is_some_and(|value| value == "true");
    (is_free, placement_of(labels))
}

/// Which GPU is preferred, if the labels say that.
#[must_use]
pub fn placement_of(labels: &BTreeMap<String, String>) -> Option<Placement> {
    labels.get(PLACEMENT).and_then(|value| value.parse().ok())
}

/// How many pods a GPU may have, if the labels say that.
#[must_use]
pub fn most_pods_of(labels: &BTreeMap<String, String>) -> Option<u32> {
    labels.get(MOST_PODS).and_then(|value| value.parse().ok())
}

/// The labels that a node of these GPUs has, as ACK's nodes have them: how many there are, their model and
/// the memory of each (only if all are the same), and the driver's version.
#[must_use]
pub fn labels(gpus: &[SharedGpu], driver: Option<&str>) -> BTreeMap<String, String> {
    let mut labels =
        BTreeMap::from([("aliyun.accelerator/nvidia_count".to_owned(), gpus.len().to_string())]);
    if let Some(driver) = driver {
        labels.insert("aliyun.accelerator/nvidia_driver".to_owned(), label_value(driver));
    }
    let Some(first) = gpus.first() else { return labels };
    if gpus.iter().all(|gpu| gpu.model == first.model) && !label_value(&first.model).is_empty() {
        labels.insert("aliyun.accelerator/nvidia_name".to_owned(), label_value(&first.model));
    }
    if gpus.iter().all(|gpu| gpu.memory_mib == first.memory_mib) {
        let memory = format!("{}MiB", first.memory_mib);
        labels.insert("aliyun.accelerator/nvidia_mem".to_owned(), memory);
    }
    labels
}

/// `text` as the value of a label: 63 characters at most, of those that a label may have, and with a letter
/// or digit at both ends (`k8s.io/apimachinery/pkg/util/validation`).
fn label_value(text: &str) -> String {
    let may_be = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let value: String = text.chars().map(|c| if may_be(c) { c } else { '-' }).take(63).collect();
    value.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::tests::gpu;
    use crate::units::{Unit, shared};

    /// A node's labels state what is the same for all its GPUs, and its annotation lists the size
    /// of each.
    #[test]
    fn node_labels_state_only_shared_gpu_facts() {
        let gpus = [gpu(0, "aaa", 16 << 30), gpu(1, "bbb", 16 << 30), gpu(2, "ccc", 24 << 30)];
        let mut gpus = shared(&gpus, Unit::GiB).unwrap();
        for gpu in &mut gpus {
            gpu.model = "NVIDIA A10 (24 GB)".into();
        }
        let reported = labels(&gpus, Some("535.161.08"));
        assert_eq!(reported["aliyun.accelerator/nvidia_driver"], "535.161.08");
        assert_eq!(reported["aliyun.accelerator/nvidia_count"], "3");
        assert_eq!(reported["aliyun.accelerator/nvidia_name"], "NVIDIA-A10--24-GB");
        assert!(!reported.contains_key("aliyun.accelerator/nvidia_mem"));
        assert_eq!(labels(&gpus[..2], None)["aliyun.accelerator/nvidia_mem"], "16384MiB");
        assert_eq!(labels(&[], None)["aliyun.accelerator/nvidia_count"], "0");
        let none_lost = Lost::new();
        let written = annotations(&gpus, Unit::GiB, &none_lost, None);
        assert_eq!(written.get(PODS), None);
        assert_eq!(written[DEVICES], r#"{"unit":"GiB","gpus":{"0":16,"1":16,"2":24}}"#);
        gpus[1].healthy = false;
        let lost = Lost::from([("uid".to_owned(), "team/pod".to_owned())]);
        let read = devices(&annotations(&gpus, Unit::GiB, &lost, None)).unwrap();
        assert_eq!(read.lost, lost);
        assert_eq!(read.unit, Unit::GiB);
        assert_eq!((read.gpus, read.closed), ([(0, 16), (1, 16), (2, 24)].into(), [1].into()));
        assert_eq!(devices(&[(DEVICES.to_owned(), "{".to_owned())].into()), None);
    }

    /// What a node reports of its pods is read as it is written, and text that is malformed or too
    /// long as nothing.
    #[test]
    fn nodes_pod_report_reads_back_as_written() {
        let given = GivenByUid::from([(
            "uid".to_owned(),
            Given { units: 15, containers: [("main".to_owned(), [(0, 4)].into())].into() },
        )]);
        let node = |text: &str| Node {
            metadata: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
                annotations: Some([(PODS.to_owned(), text.to_owned())].into()),
                ..Default::default()
            },
            ..Node::default()
        };
        let written = annotations(&[], Unit::GiB, &Lost::new(), Some(&given));
        assert_eq!(written[PODS], r#"{"uid":{"units":15,"containers":{"main":{"0":4}}}}"#);
        assert_eq!(given_of(&node(&written[PODS])), given);
        for text in ["", "7", "{\"uid\":7}", &" ".repeat(MOST_PODS_BYTES + 1)] {
            assert_eq!(given_of(&node(text)), GivenByUid::new());
        }
        let many = (0..5_000).map(|at| (format!("{at:036}"), given["uid"].clone())).collect();
        assert_eq!(annotations(&[], Unit::GiB, &Lost::new(), Some(&many)).get(PODS), None);
    }

    /// A node's labels are followed if their values are cgpu's own words, and ignored otherwise.
    #[test]
    fn node_labels_with_known_values_are_followed() {
        let of = |name: &str, value: &str| said(&[(name.to_owned(), value.to_owned())].into());
        assert_eq!(of(DISABLE_ISOLATION, "true"), (true, None));
        assert_eq!(of(DISABLE_ISOLATION, "yes"), (false, None));
        assert_eq!(of(PLACEMENT, "spread"), (false, Some(Placement::Spread)));
        assert_eq!(of(PLACEMENT, "best"), (false, None));
    }
}
