//! What a change makes of the plan of a running container.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use thiserror::Error;

use super::Plan;
use crate::units::{bytes_to_mib, mib_to_bytes};

/// A change to a running container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// A new quota on one GPU.
    MemoryLimit {
        /// Index of the GPU.
        gpu_index: u32,
        /// The quota in bytes.
        bytes: u64,
    },
    /// A new compute weight on all its GPUs.
    Weight(u32),
    /// A new priority on all its GPUs.
    HighPriority(bool),
}

/// Why a change can't be meant for this container.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ChangeError {
    /// It has no such GPU.
    #[error("the container has no GPU {index}; it has {}", list(has))]
    NoSuchGpu {
        /// The index asked for.
        index: u32,
        /// The indices it has.
        has: Vec<u32>,
    },
    /// It has that GPU for itself.
    #[error("GPU {index} is the container's as a whole, without a quota to change")]
    Whole {
        /// Index of the GPU.
        index: u32,
    },
    /// Several GPUs, and none was named.
    #[error("the container has the GPUs {}; say with --gpu which one", list(has))]
    WhichGpu {
        /// The indices it has.
        has: Vec<u32>,
    },
    /// No quota at all, or more than a number holds.
    #[error("a quota of {mib} MiB is not possible; give it 1 MiB or more")]
    BadSize {
        /// The size in MiB.
        mib: u64,
    },
    /// The weight is out of its range.
    #[error("a weight of {weight} is not possible; it is 1 to {max_inst} (admission.max_inst)")]
    BadWeight {
        /// The weight.
        weight: u32,
        /// The bound.
        max_inst: u32,
    },
}

fn list(indices: &[u32]) -> String {
    indices.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

impl Change {
    /// A new quota of `mib` MiB on the GPU `index` of `plan`; without one, on its only GPU.
    ///
    /// # Errors
    ///
    /// Where it isn't clear which GPU is meant, or the quota can't be.
    pub fn memory(plan: &Plan, index: Option<u32>, mib: u64) -> Result<Change, ChangeError> {
        let has = || plan.gpus.iter().map(|gpu| gpu.index).collect();
        let gpu_index = match (index, plan.gpus.as_slice()) {
            (Some(index), _) => index,
            (None, [only]) => only.index,
            (None, _) => return Err(ChangeError::WhichGpu { has: has() }),
        };
        let bytes = mib_to_bytes(mib).filter(|&bytes| bytes > 0);
        Ok(Change::MemoryLimit { gpu_index, bytes: bytes.ok_or(ChangeError::BadSize { mib })? })
    }
}

impl Plan {
    /// The plan after `change`.
    ///
    /// # Errors
    ///
    /// Where the container has nothing that could change so.
    pub fn after(&self, change: Change, max_inst: u32) -> Result<Plan, ChangeError> {
        let mut plan = self.clone();
        match change {
            Change::MemoryLimit { gpu_index: index, bytes } => {
                let has = || self.gpus.iter().map(|gpu| gpu.index).collect();
                let mut gpus = plan.gpus.iter_mut();
                let gpu = gpus
                    .find(|gpu| gpu.index == index)
                    .ok_or_else(|| ChangeError::NoSuchGpu { index, has: has() })?;
                let limit = gpu.memory_limit_bytes.as_mut().ok_or(ChangeError::Whole { index })?;
                if bytes == 0 {
                    return Err(ChangeError::BadSize { mib: bytes_to_mib(bytes) });
                }
                *limit = bytes;
                // The container's settings don't say this.
                plan.caveats.quota_by = None;
            }
            Change::Weight(weight) if !(1..=max_inst).contains(&weight) => {
                return Err(ChangeError::BadWeight { weight, max_inst });
            }
            Change::Weight(weight) => plan.weight = weight,
            Change::HighPriority(high) => plan.high_priority = high,
        }
        Ok(plan)
    }

    /// What holds while this plan becomes `other`: of each quota and weight the larger.
    #[must_use]
    pub fn covering(&self, other: &Plan) -> Plan {
        let mut plan = self.clone();
        for (gpu, next) in plan.gpus.iter_mut().zip(&other.gpus) {
            gpu.memory_limit_bytes = gpu.memory_limit_bytes.max(next.memory_limit_bytes);
        }
        plan.weight = plan.weight.max(other.weight);
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Kind, PlannedGpu};
    use crate::units::MIB;

    fn plan(limits: &[Option<u64>]) -> Plan {
        let gpu = |(index, limit): (u32, &Option<u64>)| PlannedGpu {
            index,
            uuid: format!("GPU-{index}"),
            minor: index,
            memory_total_bytes: 100 * MIB,
            memory_reserved_bytes: 0,
            memory_limit_bytes: limit.map(|mib| mib * MIB),
            mig: None,
        };
        let gpus = (0..).zip(limits).map(gpu).collect();
        Plan {
            backend: Kind::Km,
            gpus,
            weight: 2,
            high_priority: false,
            caveats: crate::plan::Caveats::default(),
        }
    }

    #[test]
    fn a_change_touches_what_it_names() {
        let before = plan(&[Some(10), Some(20)]);
        let change = Change::memory(&before, Some(1), 30).unwrap();
        assert_eq!(before.after(change, 20).unwrap(), plan(&[Some(10), Some(30)]));
        let after = before.after(Change::Weight(5), 20).unwrap();
        assert_eq!((after.weight, after.gpus), (5, before.gpus.clone()));
        assert!(before.after(Change::HighPriority(true), 20).unwrap().high_priority);
    }

    #[test]
    fn the_only_gpu_need_not_be_named() {
        let change = Change::memory(&plan(&[Some(10)]), None, 7).unwrap();
        assert_eq!(change, Change::MemoryLimit { gpu_index: 0, bytes: 7 * MIB });
        let error = Change::memory(&plan(&[Some(1), Some(1)]), None, 7).unwrap_err().to_string();
        assert_eq!(error, "the container has the GPUs 0, 1; say with --gpu which one");
    }

    #[test]
    fn what_cannot_change_so_is_refused() {
        let before = plan(&[Some(10), None]);
        for (change, error) in [
            (
                Change::MemoryLimit { gpu_index: 4, bytes: MIB },
                "the container has no GPU 4; it has 0, 1",
            ),
            (
                Change::MemoryLimit { gpu_index: 1, bytes: MIB },
                "GPU 1 is the container's as a whole, without a quota to change",
            ),
            (
                Change::Weight(0),
                "a weight of 0 is not possible; it is 1 to 20 (admission.max_inst)",
            ),
            (
                Change::Weight(21),
                "a weight of 21 is not possible; it is 1 to 20 (admission.max_inst)",
            ),
        ] {
            assert_eq!(before.after(change, 20).unwrap_err().to_string(), error);
        }
        for mib in [0, u64::MAX] {
            let error = Change::memory(&before, Some(0), mib).unwrap_err();
            assert_eq!(error, ChangeError::BadSize { mib });
        }
    }

    #[test]
    fn in_between_the_larger_of_both_is_held() {
        let (small, large) = (plan(&[Some(10), Some(40)]), plan(&[Some(30), Some(20)]));
        let between = small.covering(&Plan { weight: 1, ..large });
        assert_eq!(between, plan(&[Some(30), Some(40)]));
    }
}
