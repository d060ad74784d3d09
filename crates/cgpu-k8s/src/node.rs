//! What this node's labels say, and what is written on the node. Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use serde::{Deserialize, Serialize};

use crate::ask::whole;
use crate::place::Placement;
use crate::units::{SharedGpu, Unit};

/// The label of a node whose containers are to be held to nothing (AliyunContainerService's).
pub const DISABLE_ISOLATION: &str = "cgpu.disable.isolation";

/// The label that says which GPU is preferred: `binpack` or `spread` (ACK's).
pub const PLACEMENT: &str = "ack.node.gpu.placement";

/// The label that says how many pods a GPU may have (ACK's).
pub const MOST_PODS: &str = "ack.node.gpu.max-pod";

/// What a node has as many of as it has GPUs.
pub const GPU_COUNT_CAPACITY: &str = "aliyun.com/gpu-count";

/// The annotation of a node that says how many units which of its GPUs has:
/// `{"unit":"GiB","gpus":{"0":15,"4":24}}`.
pub const DEVICES: &str = "cgpu.devices";

/// More units than this on one GPU are MiB where nothing says what they are: as gpushare guesses.
const MOST_GIB: u32 = 100;

#[derive(Debug, Serialize, Deserialize)]
struct Devices {
    unit: String,
    gpus: BTreeMap<u32, u32>,
    /// Those of which nothing can be given out.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    closed: BTreeSet<u32>,
}

/// What a node tells of its shared GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeGpus {
    /// How much memory a unit is.
    pub unit: Unit,
    /// Units of each GPU, by its index.
    pub gpus: BTreeMap<u32, u32>,
    /// Those of which nothing can be given out: a lost one, or one that is a container's as a whole.
    pub closed: BTreeSet<u32>,
}

/// What is written on a node about its GPUs.
#[must_use]
pub fn annotations(gpus: &[SharedGpu], unit: Unit) -> BTreeMap<String, String> {
    let closed = gpus.iter().filter(|gpu| !gpu.healthy).map(|gpu| gpu.index).collect();
    let gpus = gpus.iter().map(|gpu| (gpu.index, gpu.units)).collect();
    let devices = Devices { unit: unit.name().to_owned(), gpus, closed };
    // Strings and numbers; nothing of it can fail.
    let text = serde_json::to_string(&devices).unwrap_or_default();
    BTreeMap::from([(DEVICES.to_owned(), text)])
}

/// What a node says of its GPUs that has units of `resource`. Where it doesn't say how many of which GPU, all
/// GPUs have as many.
#[must_use]
pub fn gpus_of(node: &Node, resource: &str) -> Option<NodeGpus> {
    let capacity = node.status.as_ref()?.capacity.as_ref()?;
    let amount = |name: &str| capacity.get(name).and_then(whole);
    let units = amount(resource).filter(|units| *units > 0)?;
    let told = node.metadata.annotations.as_ref().and_then(devices);
    Some(told.unwrap_or_else(|| {
        let count = amount(GPU_COUNT_CAPACITY).unwrap_or(1).max(1);
        let unit = if units / count > MOST_GIB { Unit::MiB } else { Unit::GiB };
        let gpus = (0..count).map(|index| (index, units / count)).collect();
        NodeGpus { unit, gpus, closed: BTreeSet::new() }
    }))
}

fn devices(annotations: &BTreeMap<String, String>) -> Option<NodeGpus> {
    let Devices { unit, gpus, closed } = serde_json::from_str(annotations.get(DEVICES)?).ok()?;
    Some(NodeGpus { unit: unit.parse().ok()?, gpus, closed })
}

/// What the labels say of containers: whether nothing is to hold them, and which GPU is preferred, where
/// they say that.
#[must_use]
pub fn said(labels: &BTreeMap<String, String>) -> (bool, Option<Placement>) {
    let is_free = labels.get(DISABLE_ISOLATION).is_some_and(|value| value == "true");
    (is_free, placement_of(labels))
}

/// Which GPU is preferred, where the labels say that.
#[must_use]
pub fn placement_of(labels: &BTreeMap<String, String>) -> Option<Placement> {
    labels.get(PLACEMENT).and_then(|value| value.parse().ok())
}

/// How many pods a GPU may have, where the labels say that.
#[must_use]
pub fn most_pods_of(labels: &BTreeMap<String, String>) -> Option<u32> {
    labels.get(MOST_PODS).and_then(|value| value.parse().ok())
}

/// The labels that a node of these GPUs has, as ACK's nodes have them: how many there are, their model and
/// the memory of each (only where all are the same), and the driver's version.
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

    #[test]
    fn a_node_s_labels_say_what_is_the_same_for_all_its_gpus() {
        let gpus = [gpu(0, "aaa", 16 << 30), gpu(1, "bbb", 16 << 30), gpu(2, "ccc", 24 << 30)];
        let mut gpus = shared(&gpus, Unit::GiB).unwrap();
        for gpu in &mut gpus {
            gpu.model = "NVIDIA A10 (24 GB)".into();
        }
        let told = labels(&gpus, Some("535.161.08"));
        assert_eq!(told["aliyun.accelerator/nvidia_driver"], "535.161.08");
        assert_eq!(told["aliyun.accelerator/nvidia_count"], "3");
        assert_eq!(told["aliyun.accelerator/nvidia_name"], "NVIDIA-A10--24-GB");
        assert!(!told.contains_key("aliyun.accelerator/nvidia_mem"));
        assert_eq!(labels(&gpus[..2], None)["aliyun.accelerator/nvidia_mem"], "16384MiB");
        assert_eq!(labels(&[], None)["aliyun.accelerator/nvidia_count"], "0");
        let written = annotations(&gpus, Unit::GiB);
        assert_eq!(written[DEVICES], r#"{"unit":"GiB","gpus":{"0":16,"1":16,"2":24}}"#);
        gpus[1].healthy = false;
        let read = devices(&annotations(&gpus, Unit::GiB)).unwrap();
        assert_eq!(read.unit, Unit::GiB);
        assert_eq!((read.gpus, read.closed), ([(0, 16), (1, 16), (2, 24)].into(), [1].into()));
        assert_eq!(devices(&[(DEVICES.to_owned(), "{".to_owned())].into()), None);
    }

    #[test]
    fn a_node_s_labels_are_followed_where_they_are_words_of_ours() {
        let of = |name: &str, value: &str| said(&[(name.to_owned(), value.to_owned())].into());
        assert_eq!(of(DISABLE_ISOLATION, "true"), (true, None));
        assert_eq!(of(DISABLE_ISOLATION, "yes"), (false, None));
        assert_eq!(of(PLACEMENT, "spread"), (false, Some(Placement::Spread)));
        assert_eq!(of(PLACEMENT, "best"), (false, None));
    }
}
