//! Whether what is left of the GPUs is enough for a plan.

use alloc::borrow::ToOwned;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use thiserror::Error;

use super::{Plan, PlannedGpu};
use crate::units::bytes_to_mib;

/// What one registered container holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// The container's id, for messages.
    pub id: String,
    /// UUID and quota in bytes of each GPU; `None` if its use of the GPU is unlimited.
    pub gpus: Vec<(String, Option<u64>)>,
    /// Its compute weight; 0 where its backend holds none.
    pub weight: u32,
    /// Whether its backend holds a high priority that it has.
    pub high_priority: bool,
}

/// Between the id and the short id of a container that has ended and whose quota stays reserved. No engine's id has it.
pub const LEAKED_MARK: char = '~';

impl Holding {
    /// Whether the container has ended, and its memory stays reserved.
    fn is_ended(&self) -> bool {
        self.id.contains(LEAKED_MARK)
    }
}

/// How much may be reserved on each GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Reserved memory over physical memory.
    pub overcommit: f64,
    /// Most containers, and the sum of their weights, where nothing else is set of the GPU.
    pub max_inst: u32,
    /// The same of GPUs of which it is set, by UUID.
    pub max_inst_of: BTreeMap<String, u32>,
    /// How computing time is shared of a GPU of which no policy is set.
    pub policy: u32,
    /// The policies of GPUs of which one is set, by UUID.
    pub policy_of: BTreeMap<String, u32>,
    /// Whether weights on a GPU have a bound, where its backend and its policy say so.
    pub bounds_weights: bool,
    /// An unlimited GPU and a shared one exclude each other.
    pub exclusive: bool,
}

impl Limits {
    /// The policy of the GPU with that UUID.
    pub(super) fn policy(&self, uuid: &str) -> u32 {
        self.policy_of.get(uuid).copied().unwrap_or(self.policy)
    }

    /// The most containers on the GPU with that UUID, and the sum of their weights.
    pub(super) fn max_inst(&self, uuid: &str) -> u32 {
        self.max_inst_of.get(uuid).copied().unwrap_or(self.max_inst)
    }

    /// The same without a bound of the weights on a GPU.
    #[must_use]
    pub fn with_any_weight(self) -> Self {
        Limits { bounds_weights: false, ..self }
    }

    /// The largest weight that a container with `plan` can have on all its GPUs.
    #[must_use]
    pub fn max_weight(&self, plan: &Plan) -> u32 {
        let bounds = plan.gpus.iter().map(|gpu| self.max_inst(&gpu.uuid));
        bounds.min().unwrap_or(self.max_inst)
    }
}

/// Containers in an error message: the first few, by what they hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holders(Vec<ShownHolder>);

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ShownHolder {
    id: String,
    /// What people call it.
    name: Option<String>,
    /// Its quota in bytes; `None` if its use of the GPU is unlimited.
    limit: Option<u64>,
}

/// Containers that a message names; of more it has the number.
const SHOWN: usize = 8;

impl Holders {
    /// Gives those that a message shows the names that `name_of` has for their ids.
    fn name(&mut self, name_of: &mut dyn FnMut(&str) -> Option<String>) {
        for holder in self.0.iter_mut().take(SHOWN) {
            holder.name = name_of(&holder.id);
        }
    }
}

impl Refusal {
    /// The same with the names that people know, as far as `name_of` has one for an id.
    #[must_use]
    pub fn with_names(mut self, mut name_of: impl FnMut(&str) -> Option<String>) -> Self {
        match &mut self {
            Refusal::Memory { holders, .. }
            | Refusal::Containers { holders, .. }
            | Refusal::Weight { holders, .. }
            | Refusal::Exclusive { holders, .. } => holders.name(&mut name_of),
            Refusal::TooMuch { .. }
            | Refusal::NotEnoughMemory { .. }
            | Refusal::Share { .. }
            | Refusal::SmallShare { .. } => {}
        }
        self
    }

    /// What a GPU lacks, in few words, where others could be chosen as well.
    pub(super) fn lack(&self) -> String {
        match self {
            Refusal::Memory { index, uuid, left_mib, total_mib, .. } => {
                format!("GPU {index} ({uuid}) has {left_mib} MiB of {total_mib} MiB left")
            }
            Refusal::TooMuch { index, uuid, total_mib, .. } => {
                format!("GPU {index} ({uuid}) can promise {total_mib} MiB in all")
            }
            Refusal::Containers { index, uuid, count, max_inst, .. } => {
                format!("GPU {index} ({uuid}) has {count} containers of {max_inst} (max_inst)")
            }
            Refusal::Weight { index, uuid, left, max_inst, .. } => {
                format!("GPU {index} ({uuid}) has weight {left} of {max_inst} left")
            }
            Refusal::Exclusive { index, uuid, found, .. } => {
                format!("GPU {index} ({uuid}) is {found}")
            }
            Refusal::Share { index, uuid, policy, .. } => {
                format!("GPU {index} ({uuid}) is divided by policy {policy}, and not by parts")
            }
            Refusal::SmallShare { index, uuid, parts, .. } => {
                format!("GPU {index} ({uuid}) is divided into {parts} parts")
            }
            Refusal::NotEnoughMemory { .. } => self.to_string(),
        }
    }
}

/// ` (SETTING)`, if there is one.
fn said(setting: &Option<String>) -> String {
    setting.as_ref().map_or_else(String::new, |setting| format!(" ({setting})"))
}

/// Why a plan is not admitted.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Refusal {
    /// Not enough memory is left.
    #[error(
        "GPU {index} ({uuid}) has {left_mib} MiB of {total_mib} MiB left, this container asks \
         for {asked_mib} MiB; {holders}; ask for less{}, or stop one of them",
        said(.quota_by)
    )]
    Memory {
        /// Index of the GPU.
        index: u32,
        /// Its UUID.
        uuid: String,
        /// Memory that can still be reserved, in MiB.
        left_mib: u64,
        /// Memory that can be reserved in all, in MiB.
        total_mib: u64,
        /// The quota asked for, in MiB.
        asked_mib: u64,
        /// What asks for it.
        quota_by: Option<String>,
        /// Who holds the rest.
        holders: Holders,
    },
    /// The quota is more than the GPU can ever give.
    #[error(
        "GPU {index} ({uuid}) can promise {total_mib} MiB in all, this container asks for \
         {asked_mib} MiB; ask for less{}, or raise admission.overcommit",
        said(.quota_by)
    )]
    TooMuch {
        /// Index of the GPU.
        index: u32,
        /// Its UUID.
        uuid: String,
        /// Memory that can be reserved in all, in MiB.
        total_mib: u64,
        /// The quota asked for, in MiB.
        asked_mib: u64,
        /// What asks for it.
        quota_by: Option<String>,
    },
    /// No GPU of those that could be chosen has enough memory left.
    #[error(
        "no {wanted} is left: {}; ask for less, or stop containers (`cgpu ps` shows them)",
        lacks.join("; ")
    )]
    NotEnoughMemory {
        /// What is asked for.
        wanted: String,
        /// What each GPU of the host lacks.
        lacks: Vec<String>,
    },
    /// A part of the computing time of a GPU that isn't divided by parts.
    #[error(
        "{setting} can't be held on GPU {index} ({uuid}), which shares computing time by policy {policy}: a \
         part can be held under policy 3 of the gate alone; write a weight as CGPU_WEIGHT=2, or set \
         `cgpu set gpu {index} policy=3`"
    )]
    Share {
        /// Index of the GPU.
        index: u32,
        /// Its UUID.
        uuid: String,
        /// What asks for the part.
        setting: String,
        /// Its policy.
        policy: u32,
    },
    /// A part of the computing time that is less than the GPU has parts.
    #[error(
        "{setting} is less than one of the {parts} parts of GPU {index} ({uuid}); ask for more, or raise its \
         max_inst: `cgpu set gpu {index} max_inst=N`"
    )]
    SmallShare {
        /// Index of the GPU.
        index: u32,
        /// Its UUID.
        uuid: String,
        /// What asks for the part.
        setting: String,
        /// How many parts it has.
        parts: u32,
    },
    /// Too many containers.
    #[error(
        "GPU {index} ({uuid}) has {count} containers, as many as max_inst = {max_inst} allows; \
         {holders}; stop one of them, or raise max_inst (at most 25): `cgpu set gpu {index} \
         max_inst=N`, or admission.max_inst in the configuration"
    )]
    Containers {
        /// Index of the GPU.
        index: u32,
        /// Its UUID.
        uuid: String,
        /// Containers on it.
        count: usize,
        /// The bound.
        max_inst: u32,
        /// Who they are.
        holders: Holders,
    },
    /// Too much weight.
    #[error(
        "GPU {index} ({uuid}) has weight {left} of {max_inst} left, this container asks for \
         {asked}; {holders}; lower CGPU_WEIGHT or ALIYUN_COM_GPU_SCHD_WEIGHT, or stop one of them"
    )]
    Weight {
        /// Index of the GPU.
        index: u32,
        /// Its UUID.
        uuid: String,
        /// Weight that is left.
        left: u32,
        /// Weight in all.
        max_inst: u32,
        /// The weight asked for.
        asked: u32,
        /// Who holds the rest.
        holders: Holders,
    },
    /// A container has the GPU exclusively, or asks for that.
    #[error(
        "GPU {index} ({uuid}) can't be {wanted}, it is {found}; {holders}; \
         choose another GPU, or stop them (admission.exclusive is on)"
    )]
    Exclusive {
        /// Index of the GPU.
        index: u32,
        /// Its UUID.
        uuid: String,
        /// What this container asks for.
        wanted: &'static str,
        /// What it is already.
        found: &'static str,
        /// Who holds it.
        holders: Holders,
    },
}

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("held by ")?;
        for (at, ShownHolder { id, name, limit }) in self.0.iter().take(SHOWN).enumerate() {
            let comma = if at > 0 { ", " } else { "" };
            match name {
                Some(name) => write!(f, "{comma}{name} ({})", short(id))?,
                None => write!(f, "{comma}{}", short(id))?,
            }
            match limit {
                Some(bytes) => write!(f, ": {} MiB", bytes_to_mib(*bytes))?,
                None => f.write_str(": the whole GPU")?,
            }
        }
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, ", and {more} more (`cgpu ps` shows all)"),
        }
    }
}

/// An id as `docker ps` shows it.
fn short(id: &str) -> &str {
    match id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        true => &id[..12],
        false => id,
    }
}

/// Whether `plan` fits next to `holdings`.
///
/// # Errors
///
/// For the first GPU on which it doesn't fit, with the containers that hold it and what each holds.
pub fn admit<'a>(
    plan: &Plan,
    holdings: impl IntoIterator<Item = &'a Holding, IntoIter: Clone>,
    limits: &Limits,
) -> Result<(), Refusal> {
    let holdings = holdings.into_iter();
    plan.gpus.iter().try_for_each(|gpu| available(plan, gpu, holdings.clone(), limits).map(drop))
}

/// A GPU's capacity for one of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Available {
    /// Memory that can still be reserved, in bytes, before this container has any.
    pub(super) left_bytes: u64,
    /// Containers that can't share the GPU with this one: those whose use of the GPU is unlimited, or, for one whose
    /// use would be unlimited, all.
    pub(super) unlike: usize,
}

/// The GPUs that `plan` has unlimited next to containers that have quotas there, or the other way round: nothing keeps
/// the one from taking what was reserved for the others.
pub fn unheld<'a>(
    plan: &Plan,
    holdings: impl IntoIterator<Item = &'a Holding, IntoIter: Clone>,
) -> impl Iterator<Item = u32> {
    let holdings = holdings.into_iter();
    let is_mixed = move |gpu: &&PlannedGpu| {
        let has_quota = gpu.memory_limit_bytes.is_some();
        let other = |(uuid, limit): &(String, Option<u64>)| {
            uuid == gpu.given_uuid() && limit.is_some() != has_quota
        };
        holdings.clone().any(|holding| holding.gpus.iter().any(other))
    };
    plan.gpus.iter().filter(is_mixed).map(|gpu| gpu.index)
}

/// The capacity for `gpu` of `plan` next to `holdings`.
pub(super) fn available<'a>(
    plan: &Plan,
    gpu: &PlannedGpu,
    holdings: impl Iterator<Item = &'a Holding> + Clone,
    limits: &Limits,
) -> Result<Available, Refusal> {
    let (index, uuid) = (gpu.index, gpu.given_uuid().to_owned());
    let (mut held_bytes, mut weight, mut sharing, mut whole) = (0u64, 0u32, 0usize, 0usize);
    let on_gpu = |holding: &Holding| {
        holding.gpus.iter().find(|(held, _)| held == gpu.given_uuid()).map(|(_, limit)| *limit)
    };
    for holding in holdings.clone() {
        match on_gpu(holding) {
            Some(Some(bytes)) => {
                // No container gets what the driver reserves, whatever the documents' ratio results in.
                held_bytes = held_bytes.saturating_add(bytes.min(gpu.divisible_bytes()));
                weight = weight.saturating_add(holding.weight);
                // One that has ended takes memory, and no place.
                sharing += usize::from(!holding.is_ended());
            }
            Some(None) => whole += 1,
            None => {}
        }
    }
    let holders = || {
        let held = holdings.clone();
        let holder =
            |h: &Holding| Some(ShownHolder { id: h.id.clone(), name: None, limit: on_gpu(h)? });
        Holders(held.filter_map(holder).collect())
    };
    let total = promisable(gpu.divisible_bytes(), limits.overcommit);
    let left = total.saturating_sub(held_bytes);
    let Some(asked) = gpu.memory_limit_bytes else {
        if limits.exclusive && (sharing > 0 || whole > 0) {
            let found = if whole > 0 { "held as a whole" } else { "shared" };
            let wanted = "held as a whole";
            return Err(Refusal::Exclusive { index, uuid, wanted, found, holders: holders() });
        }
        return Ok(Available { left_bytes: left, unlike: sharing + whole });
    };
    if limits.exclusive && whole > 0 {
        let (wanted, found) = ("shared", "held as a whole");
        return Err(Refusal::Exclusive { index, uuid, wanted, found, holders: holders() });
    }
    let quota_by = || plan.caveats.quota_by.clone();
    // All of a GPU by the documents' ratio is all that can be had of it.
    let asked = match asked > gpu.memory_total_bytes {
        true => asked,
        false => asked.min(gpu.divisible_bytes()),
    };
    let asked_mib = bytes_to_mib(asked);
    if asked > total {
        let total_mib = bytes_to_mib(total);
        return Err(Refusal::TooMuch { index, uuid, total_mib, asked_mib, quota_by: quota_by() });
    }
    if asked > left {
        return Err(Refusal::Memory {
            index,
            uuid,
            left_mib: bytes_to_mib(left),
            total_mib: bytes_to_mib(total),
            asked_mib,
            quota_by: quota_by(),
            holders: holders(),
        });
    }
    let max_inst = limits.max_inst(&gpu.uuid);
    if sharing >= max_inst as usize {
        let count = sharing;
        return Err(Refusal::Containers { index, uuid, count, max_inst, holders: holders() });
    }
    let weight_left = max_inst.saturating_sub(weight);
    let is_bound = limits.bounds_weights && plan.backend.bounds_weights(limits.policy(&gpu.uuid));
    if is_bound && plan.weight > weight_left {
        return Err(Refusal::Weight {
            index,
            uuid,
            left: weight_left,
            max_inst,
            asked: plan.weight,
            holders: holders(),
        });
    }
    Ok(Available { left_bytes: left, unlike: whole })
}

/// The bytes that may be reserved of `total`, rounded down; never more than `u64` holds.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // float to int saturates
fn promisable(total_bytes: u64, overcommit: f64) -> u64 {
    // Parts per million keep 1.1 × 1000 MiB from becoming 1100.0000000000001 MiB or less.
    let ppm = (overcommit * 1e6).round() as u64;
    let bytes = u128::from(total_bytes) * u128::from(ppm) / 1_000_000;
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Kind;
    use crate::units::MIB;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits {
        overcommit: 1.0,
        max_inst: 20,
        max_inst_of: BTreeMap::new(),
        policy: 1,
        policy_of: BTreeMap::new(),
        bounds_weights: true,
        exclusive: false,
    };

    fn plan(gpus: &[(u32, Option<u64>)], weight: u32) -> Plan {
        let gpus = gpus
            .iter()
            .map(|&(index, limit)| PlannedGpu {
                index,
                uuid: format!("GPU-{index}"),
                minor: index,
                memory_total_bytes: 16130 * MIB,
                memory_reserved_bytes: 0,
                memory_limit_bytes: limit.map(|mib| mib * MIB),
                mig: None,
            })
            .collect();
        Plan {
            backend: Kind::Km,
            gpus,
            weight,
            high_priority: false,
            caveats: crate::plan::Caveats::default(),
        }
    }

    fn holding(id: &str, gpu: u32, limit: Option<u64>, weight: u32) -> Holding {
        let gpus = vec![(format!("GPU-{gpu}"), limit.map(|mib| mib * MIB))];
        Holding { id: id.into(), gpus, weight, high_priority: false }
    }

    fn refused(plan: &Plan, holdings: &[Holding], limits: &Limits) -> String {
        admit(plan, holdings, limits).unwrap_err().to_string()
    }

    /// Weights have a bound under policy 3 of the gate, and always under the vendor's module.
    #[test]
    fn weights_are_bounded_under_policy_3_and_module() {
        let held = Holding {
            id: "held".to_owned(),
            gpus: vec![("GPU-0".to_owned(), Some(MIB))],
            weight: 15,
            high_priority: false,
        };
        let plan = |backend| Plan { backend, ..plan(&[(0, Some(1))], 6) };
        let admits =
            |backend, limits: &Limits| admit(&plan(backend), std::iter::once(&held), limits);
        let fixed = Limits { policy_of: [("GPU-0".to_owned(), 3)].into(), ..LIMITS };
        let refused = admits(Kind::Gate, &fixed).unwrap_err();
        assert!(
            matches!(refused, Refusal::Weight { left: 5, max_inst: 20, asked: 6, .. }),
            "{refused}"
        );
        assert_eq!(admits(Kind::Gate, &LIMITS), Ok(()));
        assert!(admits(Kind::Km, &LIMITS).is_err());
        assert_eq!(admits(Kind::Gate, &fixed.clone().with_any_weight()), Ok(()));
        assert!(admits(Kind::Gate, &Limits { policy: 3, ..LIMITS }).is_err());
    }

    /// The last byte of a GPU can be had, and not one MiB more.
    #[test]
    fn quota_fits_up_to_the_last_byte() {
        let held = [holding("a", 0, Some(8602), 1), holding("b", 0, Some(4456), 1)];
        assert_eq!(admit(&plan(&[(0, Some(3072))], 1), &held, &LIMITS), Ok(()));
        assert_eq!(
            refused(&plan(&[(0, Some(3073))], 1), &held, &LIMITS),
            "GPU 0 (GPU-0) has 3072 MiB of 16130 MiB left, this container asks for 3073 MiB; \
             held by a: 8602 MiB, b: 4456 MiB; ask for less, or stop one of them"
        );
    }

    #[test]
    fn what_the_driver_keeps_is_not_promised() {
        let reserving = |limit| {
            let mut plan = plan(&[(0, Some(limit))], 1);
            plan.gpus[0].memory_reserved_bytes = 530 * MIB;
            plan
        };
        let held = [holding("a", 0, Some(8_000), 1)];
        assert_eq!(admit(&reserving(7_600), &held, &LIMITS), Ok(()));
        assert_eq!(
            refused(&reserving(7_601), &held, &LIMITS),
            "GPU 0 (GPU-0) has 7600 MiB of 15600 MiB left, this container asks for 7601 MiB; held by a: \
             8000 MiB; ask for less, or stop one of them"
        );
        // All of it by the documents' ratio is what can be had, and leaves nothing.
        assert_eq!(admit(&reserving(16_130), &[], &LIMITS), Ok(()));
        let all = [holding("a", 0, Some(16_130), 1)];
        let none = refused(&reserving(1), &all, &LIMITS);
        assert!(none.starts_with("GPU 0 (GPU-0) has 0 MiB of 15600 MiB left"), "{none}");
    }

    #[test]
    fn other_gpus_do_not_count() {
        let held = [holding("a", 1, Some(16130), 20)];
        assert_eq!(admit(&plan(&[(0, Some(16130))], 20), &held, &LIMITS), Ok(()));
        let error = refused(&plan(&[(0, Some(1)), (1, Some(1))], 1), &held, &LIMITS);
        assert!(error.starts_with("GPU 1 (GPU-1) has 0 MiB of 16130 MiB left"), "{error}");
    }

    #[test]
    fn long_ids_are_shown_as_docker_shows_them() {
        let id = "3f2a".repeat(16);
        let error =
            refused(&plan(&[(0, Some(8000))], 1), &[holding(&id, 0, Some(16000), 1)], &LIMITS);
        assert!(error.contains("held by 3f2a3f2a3f2a: 16000 MiB;"), "{error}");
    }

    #[test]
    fn overcommit_promises_more_and_less() {
        let limits = |overcommit| Limits { overcommit, ..LIMITS };
        let held = [holding("a", 0, Some(16130), 1)];
        assert_eq!(admit(&plan(&[(0, Some(1613))], 1), &held, &limits(1.1)), Ok(()));
        assert!(admit(&plan(&[(0, Some(1614))], 1), &held, &limits(1.1)).is_err());
        assert_eq!(
            refused(&plan(&[(0, Some(8066))], 1), &[], &limits(0.5)),
            "GPU 0 (GPU-0) can promise 8065 MiB in all, this container asks for 8066 MiB; ask \
             for less, or raise admission.overcommit"
        );
    }

    /// A GPU's own bound has precedence over the one of all GPUs.
    #[test]
    fn gpu_specific_bound_precedes_the_general_one() {
        let max_inst_of = [("GPU-0".to_owned(), 1)].into();
        let limits = Limits { max_inst_of, ..LIMITS };
        let held = [holding("a", 0, Some(1), 1), holding("b", 1, Some(1), 1)];
        assert!(admit(&plan(&[(0, Some(1))], 1), &held, &limits).is_err());
        assert_eq!(admit(&plan(&[(1, Some(1))], 1), &held, &limits), Ok(()));
        assert_eq!(limits.max_weight(&plan(&[(0, Some(1)), (1, Some(1))], 1)), 1);
        assert_eq!(limits.max_weight(&plan(&[(1, Some(1))], 1)), 20);
    }

    #[test]
    fn containers_and_weights_are_bounded_by_max_inst() {
        let limits = Limits { max_inst: 2, ..LIMITS };
        let held = [holding("a", 0, Some(1), 1), holding("b", 0, Some(1), 1)];
        assert_eq!(
            refused(&plan(&[(0, Some(1))], 1), &held, &limits),
            "GPU 0 (GPU-0) has 2 containers, as many as max_inst = 2 allows; held by a: 1 MiB, \
             b: 1 MiB; stop one of them, or raise max_inst (at most 25): `cgpu set gpu 0 \
             max_inst=N`, or admission.max_inst in the configuration"
        );
        assert_eq!(
            refused(&plan(&[(0, Some(1))], 2), &held[..1], &limits),
            "GPU 0 (GPU-0) has weight 1 of 2 left, this container asks for 2; held by a: 1 MiB; \
             lower CGPU_WEIGHT or ALIYUN_COM_GPU_SCHD_WEIGHT, or stop one of them"
        );
    }

    #[test]
    fn what_has_ended_takes_memory_and_no_place() {
        let limits = Limits { max_inst: 1, ..LIMITS };
        let ended = holding("a~a___________", 0, Some(1), 0);
        assert_eq!(admit(&plan(&[(0, Some(1))], 1), [&ended].into_iter(), &limits), Ok(()));
        let all = holding("b~b___________", 0, Some(1 << 30), 0);
        let refused = refused(&plan(&[(0, Some(1))], 1), &[all], &limits);
        assert!(refused.contains("held by b~b___________"), "{refused}");
    }

    /// A weight excludes no container, except under the vendor's module.
    #[test]
    fn weight_refuses_containers_only_under_the_module() {
        let held = [holding("a", 0, Some(1), 15)];
        let asks = |backend| Plan { backend, ..plan(&[(0, Some(1))], 15) };
        for backend in [Kind::Gate, Kind::None] {
            assert_eq!(admit(&asks(backend), &held, &LIMITS), Ok(()), "{backend}");
        }
        assert!(refused(&asks(Kind::Km), &held, &LIMITS).contains("has weight 5 of 20 left"));
    }

    /// Unlimited and shared containers exclude each other on a GPU only if that is configured.
    #[test]
    fn unlimited_and_shared_exclude_each_other_if_configured() {
        let exclusive = Limits { exclusive: true, ..LIMITS };
        let (whole, shared) = (holding("w", 0, None, 1), holding("s", 0, Some(1), 1));
        for (asked, held, error) in [
            (Some(1), &whole, "can't be shared, it is held as a whole; held by w: the whole GPU"),
            (None, &whole, "can't be held as a whole, it is held as a whole"),
            (None, &shared, "can't be held as a whole, it is shared; held by s: 1 MiB"),
        ] {
            let plan = plan(&[(0, asked)], 1);
            let held = std::slice::from_ref(held);
            assert_eq!(admit(&plan, held, &LIMITS), Ok(()));
            let text = refused(&plan, held, &exclusive);
            assert!(text.contains(error), "{text}");
        }
    }

    #[test]
    fn a_crowd_of_holders_is_cut_short() {
        let held: Vec<_> = (0..12).map(|n| holding(&format!("c{n}"), 0, Some(1300), 1)).collect();
        let error = refused(&plan(&[(0, Some(1000))], 1), &held, &LIMITS);
        assert!(error.contains("c7: 1300 MiB, and 4 more (`cgpu ps` shows all)"), "{error}");
    }

    proptest! {
        #[test]
        fn promises_never_exceed_the_gpu(asks in proptest::collection::vec(1u64..9000, 1..30)) {
            let mut held: Vec<Holding> = Vec::new();
            for (n, mib) in asks.into_iter().enumerate() {
                if admit(&plan(&[(0, Some(mib))], 1), &held, &LIMITS).is_ok() {
                    held.push(holding(&n.to_string(), 0, Some(mib), 1));
                }
            }
            let sum: u64 = held.iter().filter_map(|h| h.gpus[0].1).sum();
            prop_assert!(sum <= 16130 * MIB && held.len() <= 20);
        }
    }

    /// A refusal names the containers that hold what was asked for, if their names are known.
    #[test]
    fn refusal_names_the_holders_if_known() {
        let holdings = [holding("a", 0, Some(9000), 1), holding("b", 0, Some(7000), 1)];
        let refusal = admit(&plan(&[(0, Some(9000))], 1), &holdings, &LIMITS).unwrap_err();
        let named = refusal.with_names(|id| (id == "b").then(|| "default/web/main".to_owned()));
        let text = named.to_string();
        assert!(text.contains("held by a: 9000 MiB, default/web/main (b): 7000 MiB;"), "{text}");
    }
}
