//! The annotations of a pod that say which of its node's GPUs it has: as AliyunContainerService's scheduler and
//! plugin write them, and newer ones. Pure.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};

use serde_json::json;

use crate::pod_request::{ContainerAsk, PodAsk};

/// `{"CONTAINER":{"INDEX":UNITS}}`, as newer schedulers write it.
pub const ALLOCATION: &str = "scheduler.framework.gpushare.allocation";

/// The same of percent of compute.
pub const CORE_ALLOCATION: &str = "gpushare.alibabacloud.com/core-percentage";

/// The GPUs' indices. -1 is gpushare's word for none.
pub const IDX: &str = "ALIYUN_COM_GPU_MEM_IDX";

/// Whether the container has what is written, or is to have it.
pub const ASSIGNED: &str = "ALIYUN_COM_GPU_MEM_ASSIGNED";

/// How much all of the pod's containers have.
const POD_UNITS: &str = "ALIYUN_COM_GPU_MEM_POD";

/// How much the first of its GPUs has.
const GPU_UNITS: &str = "ALIYUN_COM_GPU_MEM_DEV";

/// When the scheduler decided, in nanoseconds since 1970.
pub const ASSUME_TIME: &str = "ALIYUN_COM_GPU_MEM_ASSUME_TIME";

/// Annotations, or labels, by name.
pub type Words = BTreeMap<String, String>;

/// Units of memory (or percent of compute) by the GPU's index.
pub type ByGpu = BTreeMap<u32, u32>;

/// The same of each container.
pub type ByContainer = BTreeMap<String, ByGpu>;

/// What is written of a pod that asks for that: by container, or by indices that have as much each. `None` if nothing
/// is, or nothing that can be meant: the creator of a pod can write its annotations, and they give no container more or
/// less than it asks for, nor on another number of GPUs.
#[must_use]
pub fn shares(annotations: &Words, ask: &PodAsk) -> Option<ByContainer> {
    let count = *ask.gpus.as_ref().ok()?;
    let beside = || ask.containers.iter().filter(|ask| !ask.is_init);
    let read = |text: &String| serde_json::from_str::<ByContainer>(text).ok();
    let shares =
        annotations.get(ALLOCATION).and_then(read).or_else(|| by_indices(annotations, ask));
    let mut shares = shares?;
    shares.retain(|name, _| beside().any(|ask| ask.name == *name));
    let is_asked = |container: &ContainerAsk| {
        shares.get(&container.name).is_some_and(|of_gpus| {
            of_gpus.len() == count as usize
                && of_gpus.values().all(|units| units.checked_mul(count) == Some(container.units))
        })
    };
    beside().all(is_asked).then_some(shares)
}

/// What is written by indices alone.
fn by_indices(annotations: &Words, ask: &PodAsk) -> Option<ByContainer> {
    let indices: BTreeSet<u32> = annotations
        .get(IDX)?
        .split(',')
        .map(|index| index.trim().parse().ok())
        .collect::<Option<_>>()?;
    let count = u32::try_from(indices.len()).ok().filter(|count| *count > 0)?;
    let beside = ask.containers.iter().filter(|ask| !ask.is_init);
    let each = |units: u32| indices.iter().map(|index| (*index, units / count)).collect();
    Some(beside.map(|ask| (ask.name.clone(), each(ask.units))).collect())
}

/// The sum over all containers.
#[must_use]
pub fn sum(shares: &ByContainer) -> ByGpu {
    let mut sum = ByGpu::new();
    for (index, units) in shares.values().flatten() {
        let of_gpu = sum.entry(*index).or_default();
        *of_gpu = of_gpu.saturating_add(*units);
    }
    sum
}

/// What is written on a pod of which each container has that, on GPUs the first of which has `gpu_units`.
#[must_use]
pub fn words(shares: &ByContainer, gpu_units: u32, is_assigned: bool) -> Words {
    let indices: BTreeSet<u32> = shares.values().flatten().map(|(index, _)| *index).collect();
    let listed: Vec<String> = indices.iter().map(u32::to_string).collect();
    let total = sum(shares).into_values().fold(0, u32::saturating_add);
    let words = [
        (ASSIGNED, is_assigned.to_string()),
        (IDX, listed.join(",")),
        (POD_UNITS, total.to_string()),
        (GPU_UNITS, gpu_units.to_string()),
        (ALLOCATION, json!(shares).to_string()),
    ];
    words.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// A value that is equal for two pods that have the same of what [`words`] writes.
#[must_use]
pub fn digest(annotations: &Words) -> u64 {
    let mut hasher = DefaultHasher::new();
    for name in [ASSIGNED, IDX, POD_UNITS, GPU_UNITS, ALLOCATION] {
        annotations.get(name).hash(&mut hasher);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod_request::ContainerAsk;

    fn ask(units: &[u32]) -> PodAsk {
        let container = |(at, units): (usize, &u32)| ContainerAsk {
            name: format!("c{at}"),
            units: *units,
            percent: 0,
            is_init: false,
        };
        PodAsk { containers: units.iter().enumerate().map(container).collect(), gpus: Ok(1) }
    }

    /// Annotations are read as they are written, and so are those of the original.
    #[test]
    fn own_and_original_annotations_are_both_read() {
        let two = PodAsk { gpus: Ok(2), ..ask(&[4, 2]) };
        let shares_of = |words: &Words| shares(words, &two);
        let given = ByContainer::from([
            ("c0".to_owned(), [(1, 2), (3, 2)].into()),
            ("c1".to_owned(), [(1, 1), (3, 1)].into()),
        ]);
        let mut written = words(&given, 16, false);
        assert_eq!((&*written[IDX], &*written[ASSIGNED]), ("1,3", "false"));
        assert_eq!(shares_of(&written), Some(given.clone()));
        written.remove(ALLOCATION);
        assert_eq!(shares_of(&written), Some(given.clone()), "by the indices alone");
        assert_eq!(sum(&given), [(1, 3), (3, 3)].into());
        for text in ["-1", "", "x", "1,"] {
            assert_eq!(shares_of(&[(IDX.to_owned(), text.to_owned())].into()), None, "{text}");
        }
        assert_eq!(shares_of(&Words::new()), None);
    }
}
