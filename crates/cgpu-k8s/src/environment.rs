//! What a container is made with: the variables that the runtime reads. Pure.

use std::collections::BTreeMap;

use cgpu_core::request::setting_names::{DISABLE, GPUS, NEUTRAL};

use crate::units::{SharedGpu, Unit};

/// What is known of a container in addition to its units.
#[derive(Debug, Clone, Copy, Default)]
pub struct ContainerFacts {
    /// What all containers of its pod ask for.
    pub pod_units: Option<u32>,
    /// Its weight in sharing compute.
    pub weight: Option<u32>,
    /// Whether its quota is not to be enforced.
    pub is_free: bool,
}

/// The weight of a container that asks for `percent` of compute on `gpus` GPUs together, for weights of 1 to
/// `most`; `None` if it asks for none.
#[must_use]
pub fn weight(percent: u32, gpus: usize, most: u32) -> Option<u32> {
    let each = percent / u32::try_from(gpus).unwrap_or(u32::MAX).max(1);
    (percent > 0).then(|| (each.min(100) * most / 100).clamp(1, most.max(1)))
}

/// The variables of a container that has so many units of each of these GPUs, as
/// AliyunContainerService's plugin sets them, but for `NVIDIA_VISIBLE_DEVICES`, which has UUIDs: an
/// index can be another GPU's after a reboot. Each name that the runtime reads is set, for one that is
/// missing would be the image's to set.
///
/// # Errors
///
/// If the runtime would not give as much of each GPU: units that differ.
pub fn environment(
    parts: &[(&SharedGpu, u32)],
    unit: Unit,
    asked: &ContainerFacts,
) -> Result<BTreeMap<String, String>, String> {
    let Some((first, units)) = parts.first() else { return Err("no unit of a GPU".to_owned()) };
    if parts.iter().any(|(_, other)| other != units) {
        let list = parts.iter().map(|(gpu, units)| format!("{units} of GPU {}", gpu.index));
        return Err(format!(
            "a container gets as much of each of its GPUs, and these are {}",
            list.collect::<Vec<_>>().join(", ")
        ));
    }
    let joined = |of: fn(&SharedGpu) -> String| {
        parts.iter().map(|(gpu, _)| of(gpu)).collect::<Vec<_>>().join(",")
    };
    let total = *units as usize * parts.len();
    let mut variables = vec![
        ("NVIDIA_VISIBLE_DEVICES", joined(|gpu| gpu.uuid.clone())),
        ("ALIYUN_COM_GPU_VISIBLE_DEVICES", joined(|gpu| gpu.uuid.clone())),
        ("ALIYUN_COM_GPU_MEM_IDX", joined(|gpu| gpu.index.to_string())),
        (
            "ALIYUN_COM_GPU_MEM_POD",
            asked.pod_units.map_or(total, |units| units as usize).to_string(),
        ),
        ("ALIYUN_COM_GPU_MEM_CONTAINER", units.to_string()),
    ];
    // The quota is the ratio of both if all GPUs have as much; else it is so many units.
    let is_ratio = parts.iter().all(|(gpu, _)| gpu.whole_units == first.whole_units);
    let total = if is_ratio { first.whole_units.to_string() } else { String::new() };
    variables.extend([
        ("ALIYUN_COM_GPU_MEM_DEV", total),
        ("ALIYUN_COM_GPU_MEM_UNIT", unit.name().to_owned()),
        ("ALIYUN_COM_GPU_SCHD_WEIGHT", asked.weight.unwrap_or(1).to_string()),
        ("ALIYUN_COM_GPU_HIGH_PRIO", "0".to_owned()),
        ("CGPU_DISABLE", asked.is_free.to_string()),
    ]);
    // An image's: the quota is said above.
    variables.extend(NEUTRAL.map(|name| (name.variable, String::new())));
    Ok(variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

/// The variables of a container that has these GPUs exclusively, and no quota of its image's or of the host's.
#[must_use]
pub fn whole_environment(uuids: &[String]) -> BTreeMap<String, String> {
    let variables = [
        ("NVIDIA_VISIBLE_DEVICES", uuids.join(",")),
        ("ALIYUN_COM_GPU_VISIBLE_DEVICES", uuids.join(",")),
        (GPUS.variable, String::new()),
        (DISABLE.variable, "true".to_owned()),
    ];
    variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::shared;
    use crate::units::tests::gpu;

    #[test]
    fn a_container_gets_what_the_runtime_reads() {
        let gpus = [gpu(0, "aaa", 16 << 30), gpu(1, "bbb", 16 << 30), gpu(2, "ccc", 24 << 30)];
        let gpus = shared(&gpus, Unit::GiB).unwrap();
        let of = |parts: &[(usize, u32)], is_free| {
            let parts: Vec<_> = parts.iter().map(|(at, units)| (&gpus[*at], *units)).collect();
            environment(&parts, Unit::GiB, &ContainerFacts { is_free, ..ContainerFacts::default() })
        };
        let one = of(&[(1, 6)], false).unwrap();
        let expected = [
            ("ALIYUN_COM_GPU_HIGH_PRIO", "0"),
            ("ALIYUN_COM_GPU_MEM_CONTAINER", "6"),
            ("ALIYUN_COM_GPU_MEM_DEV", "16"),
            ("ALIYUN_COM_GPU_MEM_IDX", "1"),
            ("ALIYUN_COM_GPU_MEM_POD", "6"),
            ("ALIYUN_COM_GPU_MEM_UNIT", "GiB"),
            ("ALIYUN_COM_GPU_SCHD_WEIGHT", "1"),
            ("ALIYUN_COM_GPU_VISIBLE_DEVICES", &gpus[1].uuid),
            ("CGPU_DISABLE", "false"),
            ("CGPU_GPUS", ""),
            ("CGPU_MEMORY", ""),
            ("CGPU_PRIORITY", ""),
            ("CGPU_WEIGHT", ""),
            ("NVIDIA_VISIBLE_DEVICES", &gpus[1].uuid),
        ];
        assert!(one.iter().map(|(name, value)| (&**name, &**value)).eq(expected), "{one:?}");
        let both = of(&[(0, 2), (1, 2)], true).unwrap();
        assert_eq!(both["NVIDIA_VISIBLE_DEVICES"], format!("{},{}", gpus[0].uuid, gpus[1].uuid));
        assert_eq!(both["ALIYUN_COM_GPU_MEM_CONTAINER"], "2");
        assert_eq!(both["ALIYUN_COM_GPU_MEM_POD"], "4");
        assert_eq!(both["CGPU_DISABLE"], "true");
        let mixed = of(&[(0, 2), (2, 2)], false).unwrap();
        assert_eq!(mixed["ALIYUN_COM_GPU_MEM_UNIT"], "GiB");
        // An image's total must not count: 2 of 2 would be all of a GPU.
        assert_eq!(mixed["ALIYUN_COM_GPU_MEM_DEV"], "", "there is none of both");
        let of_two =
            ContainerFacts { pod_units: Some(9), weight: Some(3), ..ContainerFacts::default() };
        let of_two = environment(&[(&gpus[0], 2)], Unit::GiB, &of_two).unwrap();
        assert_eq!(of_two["ALIYUN_COM_GPU_MEM_POD"], "9");
        assert_eq!(of_two["ALIYUN_COM_GPU_SCHD_WEIGHT"], "3");
        let error = of(&[(0, 2), (1, 1)], false).unwrap_err();
        assert!(error.contains("2 of GPU 0, 1 of GPU 1"), "{error}");
        assert!(of(&[], false).is_err());
    }

    /// What the runtime reads and the plugin doesn't set would be the image's to set.
    #[test]
    fn each_name_that_the_runtime_reads_is_set() {
        let gpus = [gpu(0, "aaa", 16 << 30), gpu(1, "bbb", 24 << 30)];
        let gpus = shared(&gpus, Unit::GiB).unwrap();
        for parts in [&[(&gpus[0], 2)][..], &[(&gpus[0], 2), (&gpus[1], 2)]] {
            let set = environment(parts, Unit::GiB, &ContainerFacts::default()).unwrap();
            for name in cgpu_core::request::setting_names::NAMES {
                assert!(set.contains_key(name.variable), "{} {set:?}", name.variable);
            }
            assert!(set.contains_key(cgpu_core::request::setting_names::NVIDIA_VISIBLE_DEVICES));
        }
    }

    #[test]
    fn percent_of_compute_are_a_weight() {
        let of = |percent, gpus| weight(percent, gpus, 20);
        assert_eq!(of(0, 1), None);
        assert_eq!([of(1, 1), of(30, 1), of(100, 1)], [Some(1), Some(6), Some(20)]);
        assert_eq!([of(200, 4), of(900, 1)], [Some(10), Some(20)]);
    }
}
