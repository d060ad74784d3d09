//! The GPUs as devices that many claims share: what the API server is given of each. Pure.
//!
//! A device has its memory as a capacity, of which each claim consumes what it asks for, and the whole of it if it asks
//! for no amount; and its computing time in per cent, of which a claim that asks for none consumes none.

use std::collections::BTreeMap;

use cgpu_core::gpu::{Gpu, GpuState};
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity,
    DeviceTaint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The capacity that is memory, without the driver's name before it.
pub(crate) const MEMORY: &str = "memory";

/// The capacity that is computing time, in per cent of the GPU.
pub(super) const CORES: &str = "cores";

/// The longest string of an attribute (`DeviceAttributeMaxValueLength`).
const LONGEST_ATTRIBUTE: usize = 64;

/// A GPU of this node, and why it can't be used, if it can't.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeGpu {
    pub(super) gpu: Gpu,
    /// The Xid by which the driver called it broken.
    pub(super) xid: Option<u32>,
    /// The pod or container that the device plugin gave some of it.
    pub(super) given_by_plugin: Option<String>,
}

impl NodeGpu {
    /// What of its memory can be divided, in MiB.
    #[must_use]
    pub(super) fn divisible_mib(&self) -> u64 {
        self.gpu.memory_bytes.saturating_sub(self.gpu.reserved_bytes) >> 20
    }

    /// Its device's name: a DNS label that stays the same whatever its index becomes.
    #[must_use]
    pub(super) fn device_name(&self) -> String {
        self.gpu.uuid.to_ascii_lowercase()
    }

    /// Why nothing runs on it, in words; nothing, if it is healthy.
    #[must_use]
    pub(super) fn fault(&self) -> Option<String> {
        match (self.gpu.state, self.xid) {
            (GpuState::Lost, _) => Some("the driver can't reach it any more".to_owned()),
            (GpuState::Ok, Some(xid)) => {
                Some(format!("the driver reported Xid {xid}: it is broken until it has been reset"))
            }
            (GpuState::Ok, None) => None,
        }
    }

    /// Whether it is offered to claims at all.
    fn is_offered(&self) -> bool {
        // A GPU of MIG's is used by its parts, and one GPU is given out in one way.
        !self.gpu.mig_enabled && self.given_by_plugin.is_none() && self.divisible_mib() > 1
    }

    fn taint(&self, driver: &str) -> Option<DeviceTaint> {
        self.fault()?;
        let (key, value) = match self.xid {
            Some(xid) => ("xid", Some(xid.to_string())),
            None => ("gpu-lost", None),
        };
        Some(DeviceTaint {
            key: format!("{driver}/{key}"),
            value,
            effect: "NoSchedule".to_owned(),
            time_added: None,
        })
    }
}

/// The devices that a node of these GPUs has. `taints` says whether the API server keeps taints: if it doesn't, a GPU that
/// can't be used is left out.
#[must_use]
pub(super) fn devices(
    gpus: &[NodeGpu],
    driver: &str,
    driver_version: Option<&str>,
    taints: bool,
) -> Vec<Device> {
    let offered = gpus.iter().filter(|gpu| gpu.is_offered() && (taints || gpu.fault().is_none()));
    offered.map(|gpu| device(gpu, driver, driver_version)).collect()
}

fn device(node_gpu: &NodeGpu, driver: &str, driver_version: Option<&str>) -> Device {
    let gpu = &node_gpu.gpu;
    let text = |text: &str| DeviceAttribute {
        string: Some(text.chars().take(LONGEST_ATTRIBUTE).collect()),
        ..DeviceAttribute::default()
    };
    let mut attributes =
        BTreeMap::from([("type".to_owned(), text("gpu")), ("uuid".to_owned(), text(&gpu.uuid))]);
    if !gpu.name.is_empty() {
        attributes.insert("productName".to_owned(), text(&gpu.name));
    }
    if let Some(version) = driver_version.and_then(semantic) {
        let version = DeviceAttribute { version: Some(version), ..DeviceAttribute::default() };
        attributes.insert("driverVersion".to_owned(), version);
    }
    if !gpu.bus_id.is_empty() {
        attributes.insert("resource.kubernetes.io/pciBusID".to_owned(), text(&bus_id(&gpu.bus_id)));
    }
    let memory = format!("{}Mi", node_gpu.divisible_mib());
    let capacity = BTreeMap::from([
        (MEMORY.to_owned(), shared(&memory, &memory, "1Mi", "1Mi")),
        (CORES.to_owned(), shared("100", "0", "0", "1")),
    ]);
    Device {
        name: node_gpu.device_name(),
        allow_multiple_allocations: Some(true),
        attributes: Some(attributes),
        capacity: Some(capacity),
        taints: node_gpu.taint(driver).map(|taint| vec![taint]),
        ..Device::default()
    }
}

/// A capacity of `value` of which a claim consumes at least `min`, in whole steps, and `default` if it doesn't say.
fn shared(value: &str, default: &str, min: &str, step: &str) -> DeviceCapacity {
    let quantity = |text: &str| Quantity(text.to_owned());
    DeviceCapacity {
        value: quantity(value),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(quantity(default)),
            valid_range: Some(CapacityRequestPolicyRange {
                min: quantity(min),
                max: Some(quantity(value)),
                step: Some(quantity(step)),
            }),
            valid_values: None,
        }),
    }
}

/// A driver's version as one of semantic versioning: `580.65.06` is `580.65.6`. `None` if it has other parts.
fn semantic(version: &str) -> Option<String> {
    let parts: Option<Vec<u32>> = version.split('.').map(|part| part.parse().ok()).collect();
    match parts?.as_slice() {
        [major, minor] => Some(format!("{major}.{minor}.0")),
        [major, minor, patch] => Some(format!("{major}.{minor}.{patch}")),
        _ => None,
    }
}

/// A PCI address as Linux writes it, with four digits of the domain: NVML writes eight.
fn bus_id(text: &str) -> String {
    let text = text.to_ascii_lowercase();
    match text.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 && domain.starts_with("0000") => {
            format!("{}:{rest}", &domain[4..])
        }
        _ => text,
    }
}

/// A quantity in bytes, or in units, rounded up: `4Gi`, `6452Mi`, `4e9`, `1500m`. `None` if it isn't one, or is too large.
#[must_use]
pub(crate) fn amount(quantity: &Quantity) -> Option<u64> {
    let text = quantity.0.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    // Multiplied and divided by: no quantity of the API is finer than nano.
    let (times, over): (u128, u128) = match suffix {
        "n" => (1, 1_000_000_000),
        "u" => (1, 1_000_000),
        "m" => (1, 1000),
        "" => (1, 1),
        "k" => (1000, 1),
        "M" => (1_000_000, 1),
        "G" => (1_000_000_000, 1),
        "T" => (1_000_000_000_000, 1),
        "P" => (1_000_000_000_000_000, 1),
        "E" => (1_000_000_000_000_000_000, 1),
        "Ki" => (1 << 10, 1),
        "Mi" => (1 << 20, 1),
        "Gi" => (1 << 30, 1),
        "Ti" => (1 << 40, 1),
        "Pi" => (1 << 50, 1),
        "Ei" => (1 << 60, 1),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?.parse::<u32>().ok()?;
            (10_u128.checked_pow(exponent)?, 1)
        }
    };
    let (whole, part) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() && part.is_empty() || part.len() > 18 {
        return None;
    }
    let scale = 10_u128.checked_pow(u32::try_from(part.len()).ok()?)?;
    let read = |digits: &str| if digits.is_empty() { Some(0) } else { digits.parse::<u128>().ok() };
    let number = read(whole)?.checked_mul(scale)?.checked_add(read(part)?)?;
    let scaled = number.checked_mul(times)?.div_ceil(scale.checked_mul(over)?);
    u64::try_from(scaled).ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::units::tests::gpu;

    pub(crate) const DRIVER: &str = "gpu.cgpu.io";

    pub(crate) fn node_gpu(index: u32, begin: &str, mib: u64) -> NodeGpu {
        NodeGpu { gpu: gpu(index, begin, mib << 20), xid: None, given_by_plugin: None }
    }

    #[test]
    fn a_gpu_is_one_device_with_divisible_memory() {
        let mut one = node_gpu(0, "AAA", 16_130);
        one.gpu.reserved_bytes = (2 << 20) + 5;
        one.gpu.name = "Tesla V100-SXM2-16GB".to_owned();
        one.gpu.bus_id = "00000000:3B:00.0".to_owned();
        let found = devices(&[one], DRIVER, Some("580.65.06"), true);
        assert_eq!(
            serde_json::to_value(&found).unwrap(),
            json!([{
                "name": "gpu-aaa11565-1f83-903c-a65a-7ba138af0000".replace("aaa11565", &found[0].name[4..12]),
                "allowMultipleAllocations": true,
                "attributes": {
                    "type": {"string": "gpu"},
                    "uuid": {"string": found[0].attributes.as_ref().unwrap()["uuid"].string},
                    "productName": {"string": "Tesla V100-SXM2-16GB"},
                    "driverVersion": {"version": "580.65.6"},
                    "resource.kubernetes.io/pciBusID": {"string": "0000:3b:00.0"},
                },
                "capacity": {
                    "memory": {
                        "value": "16127Mi",
                        "requestPolicy": {"default": "16127Mi", "validRange": {"min": "1Mi", "max": "16127Mi", "step": "1Mi"}},
                    },
                    "cores": {
                        "value": "100",
                        "requestPolicy": {"default": "0", "validRange": {"min": "0", "max": "100", "step": "1"}},
                    },
                },
            }])
        );
        assert!(
            found[0].name.starts_with("gpu-aaa") && found[0].name.len() == 40,
            "{}",
            found[0].name
        );
    }

    #[test]
    fn unusable_gpus_are_tainted_or_left_out() {
        let mut lost = node_gpu(0, "aaa", 16_000);
        lost.gpu.state = GpuState::Lost;
        let broken = NodeGpu { xid: Some(79), ..node_gpu(1, "bbb", 16_000) };
        let mut mig = node_gpu(2, "ccc", 16_000);
        mig.gpu.mig_enabled = true;
        let given = NodeGpu { given_by_plugin: Some("p".to_owned()), ..node_gpu(3, "ddd", 16_000) };
        let all = [lost, broken, mig, given, node_gpu(4, "eee", 16_000)];
        let taints = |kept| -> Vec<String> {
            let key = |device: &Device| {
                let taint = device.taints.as_ref().and_then(|taints| taints.first())?;
                Some(format!("{}={}", taint.key, taint.value.as_deref().unwrap_or_default()))
            };
            let devices = devices(&all, DRIVER, None, kept);
            devices.iter().map(|device| key(device).unwrap_or_default()).collect()
        };
        assert_eq!(taints(true), ["gpu.cgpu.io/gpu-lost=", "gpu.cgpu.io/xid=79", ""]);
        assert_eq!(taints(false), [""]);
    }

    #[test]
    fn versions_of_the_driver_become_semantic() {
        assert_eq!(semantic("580.65.06").as_deref(), Some("580.65.6"));
        assert_eq!(semantic("615.71").as_deref(), Some("615.71.0"));
        for other in ["", "580", "1.2.3.4", "580.65.06-beta"] {
            assert_eq!(semantic(other), None, "{other}");
        }
    }

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        let of = |text: &str| amount(&Quantity(text.to_owned()));
        for (text, expected) in [
            ("4Gi", 4 << 30),
            ("6452Mi", 6452 << 20),
            ("4294967296", 4 << 30),
            ("4e9", 4_000_000_000),
            ("2k", 2000),
            ("1.5Gi", 3 << 29),
            ("1500m", 2),
            (".5Ki", 512),
            ("0", 0),
        ] {
            assert_eq!(of(text), Some(expected), "{text}");
        }
        for text in ["", ".", "-1", "4GiB", "1e99", "1..2", "99Ei", "x"] {
            assert_eq!(of(text), None, "{text}");
        }
    }

    proptest! {
        /// The API server refuses a policy whose amounts don't fit one another.
        #[test]
        fn policies_keep_the_api_servers_rules(memory in 0_u64..(200 << 30), reserved in 0_u64..(2 << 30)) {
            let mut one = node_gpu(0, "aaa", 0);
            (one.gpu.memory_bytes, one.gpu.reserved_bytes) = (memory, reserved);
            for device in devices(&[one], DRIVER, None, true) {
                for capacity in device.capacity.unwrap().into_values() {
                    let policy = capacity.request_policy.unwrap();
                    let range = policy.valid_range.unwrap();
                    let of = |quantity: Option<&Quantity>| amount(quantity.unwrap()).unwrap();
                    let (value, default) = (amount(&capacity.value).unwrap(), of(policy.default.as_ref()));
                    let (min, max, step) =
                        (amount(&range.min).unwrap(), of(range.max.as_ref()), of(range.step.as_ref()));
                    prop_assert!(min <= default && default <= max && max <= value && min + step <= value);
                    prop_assert!(max % step == 0 && default % step == 0);
                }
            }
        }

        #[test]
        fn no_quantity_breaks_it(text: String) {
            let _ = amount(&Quantity(text));
        }
    }
}
