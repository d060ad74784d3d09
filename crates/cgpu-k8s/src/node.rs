//! What this node's labels say, and what is written on the node. Pure.

use std::collections::BTreeMap;

use crate::place::Placement;
use crate::units::SharedGpu;

/// The label of a node whose containers are to be held to nothing (AliyunContainerService's).
pub const DISABLE_ISOLATION: &str = "cgpu.disable.isolation";

/// The label that says which GPU is preferred: `binpack` or `spread` (ACK's).
pub const PLACEMENT: &str = "ack.node.gpu.placement";

/// What a node has as many of as it has GPUs.
pub const GPU_COUNT_CAPACITY: &str = "aliyun.com/gpu-count";

/// What the labels say of containers: whether nothing is to hold them, and which GPU is preferred, where
/// they say that.
#[must_use]
pub fn said(labels: &BTreeMap<String, String>) -> (bool, Option<Placement>) {
    let is_free = labels.get(DISABLE_ISOLATION).is_some_and(|value| value == "true");
    (is_free, labels.get(PLACEMENT).and_then(|value| value.parse().ok()))
}

/// The labels that a node of these GPUs has, as ACK's nodes have them: how many there are, their model and
/// the memory of each; the latter two only where all are the same.
#[must_use]
pub fn labels(gpus: &[SharedGpu]) -> BTreeMap<String, String> {
    let mut labels =
        BTreeMap::from([("aliyun.accelerator/nvidia_count".to_owned(), gpus.len().to_string())]);
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
        let told = labels(&gpus);
        assert_eq!(told["aliyun.accelerator/nvidia_count"], "3");
        assert_eq!(told["aliyun.accelerator/nvidia_name"], "NVIDIA-A10--24-GB");
        assert!(!told.contains_key("aliyun.accelerator/nvidia_mem"));
        assert_eq!(labels(&gpus[..2])["aliyun.accelerator/nvidia_mem"], "16384MiB");
        assert_eq!(labels(&[])["aliyun.accelerator/nvidia_count"], "0");
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
