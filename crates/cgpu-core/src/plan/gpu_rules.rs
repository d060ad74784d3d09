//! What can be set of a GPU, and when: [`GpuChange`].

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};

use thiserror::Error;

use super::{Holding, Kind};

/// The policy that leaves computing time to the driver.
pub const POLICY_NATIVE: u32 = 5;

/// The policy under which each container has one of `max_inst` parts.
const POLICY_FAIR: u32 = 0;

/// The policy under which a container has its weight's part of `max_inst`, no more and no less.
pub const POLICY_FIXED: u32 = 3;

/// The policies under which weights count: weighted, and fixed.
pub const WEIGHTED: [u32; 2] = [2, POLICY_FIXED];

/// The policy under which containers share by time, whatever their weight.
pub const POLICY_PREEMPTIVE: u32 = 1;

/// The policy under which they share by weight.
const POLICY_WEIGHTED: u32 = 2;

/// The policy of a GPU: `set` if that was set, otherwise `usual`, the policy of other GPUs. Without a setting, a
/// container with a weight selects 2, as the vendor's module has it, and one with high priority 1 if nothing would
/// enforce that.
#[must_use]
pub fn policy_of(set: Option<u32>, usual: u32, has_weight: bool, has_priority: bool) -> u32 {
    match set {
        Some(policy) => policy,
        None if has_weight && !WEIGHTED.contains(&usual) => POLICY_WEIGHTED,
        None if has_priority && usual == POLICY_NATIVE => POLICY_PREEMPTIVE,
        None => usual,
    }
}

/// The settings of a GPU if nothing else was set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuRules {
    /// How computing time is shared: 0 fair share, 1 preemptive, 2 weighted, 3 fixed, 4 soft, 5 native
    /// (the driver's own).
    pub policy: u32,
    /// The most containers with a quota, and the sum of their weights: 1 to 25.
    pub max_inst: u32,
    /// Per cent of the GPU that containers of high priority may take: 20 to 99.
    pub prio_ratio: u32,
}

/// A change to a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuChange {
    /// How computing time is shared.
    Policy(u32),
    /// The most containers with a quota, and the sum of their weights.
    MaxInst(u32),
    /// Per cent that containers of high priority may take.
    PrioRatio(u32),
}

/// What is on a GPU while it is to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Occupancy {
    /// Containers with a quota.
    pub containers: u32,
    /// The sum of their weights, where their backend holds weights.
    pub weight: u32,
}

impl Occupancy {
    /// What `holdings` have on the GPU with that UUID.
    pub fn of<'a>(uuid: &str, holdings: impl Iterator<Item = &'a Holding>) -> Self {
        let is_on = |holding: &&Holding| {
            holding.gpus.iter().any(|(gpu, limit)| gpu == uuid && limit.is_some())
        };
        holdings.filter(is_on).fold(Occupancy { containers: 0, weight: 0 }, |sum, holding| {
            Occupancy {
                containers: sum.containers + 1,
                weight: sum.weight.saturating_add(holding.weight),
            }
        })
    }
}

/// Why a GPU can't be changed so.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum GpuChangeError {
    /// There is no such setting.
    #[error("a GPU has no setting {key}; it has policy, max_inst and prio_ratio")]
    NoSuchKey {
        /// What was to be set.
        key: String,
    },
    /// An invalid value.
    #[error("{key}={value} is not possible; {key} is a number from {least} to {most}")]
    BadValue {
        /// The setting.
        key: &'static str,
        /// The value.
        value: String,
        /// The least value.
        least: u32,
        /// The largest one.
        most: u32,
    },
    /// More is there than would be allowed.
    #[error(
        "GPU {index} has {containers} containers with a quota and weight {weight}, more than \
         max_inst={max_inst} allows; stop some first (`cgpu ps` lists them)"
    )]
    Occupied {
        /// Index of the GPU.
        index: u32,
        /// Containers with a quota.
        containers: u32,
        /// Their weight.
        weight: u32,
        /// The bound asked for.
        max_inst: u32,
    },
    /// Nothing would hold it.
    #[error(
        "{setting} can't be held on GPU {index}: the backend {backend} enforces nothing; leave it as it is"
    )]
    NotHeld {
        /// What was to be set, with its value.
        setting: String,
        /// Index of the GPU.
        index: u32,
        /// Whose.
        backend: Kind,
    },
}

impl GpuChange {
    /// The change that `key=value` means.
    ///
    /// # Errors
    ///
    /// Where it means none.
    pub fn read(key: &str, value: &str) -> Result<Self, GpuChangeError> {
        let number = |key, least, most| {
            let number = value.trim().parse().ok().filter(|n| (least..=most).contains(n));
            let value = value.to_owned();
            number.ok_or(GpuChangeError::BadValue { key, value, least, most })
        };
        match key {
            "policy" => Ok(GpuChange::Policy(number("policy", 0, 5)?)),
            "max_inst" => Ok(GpuChange::MaxInst(number("max_inst", 1, 25)?)),
            "prio_ratio" => Ok(GpuChange::PrioRatio(number("prio_ratio", 20, 99)?)),
            _ => Err(GpuChangeError::NoSuchKey { key: key.escape_debug().to_string() }),
        }
    }

    /// As people write it: `policy=2`.
    #[must_use]
    pub fn written(self) -> String {
        match self {
            GpuChange::Policy(policy) => format!("policy={policy}"),
            GpuChange::MaxInst(max_inst) => format!("max_inst={max_inst}"),
            GpuChange::PrioRatio(prio_ratio) => format!("prio_ratio={prio_ratio}"),
        }
    }

    /// Whether the GPU `index`, on which `there` is and which has `rules` now, can be changed so, where
    /// `backend` isolates. What it has already it can have.
    ///
    /// # Errors
    ///
    /// Why not.
    pub fn check(
        self,
        index: u32,
        rules: GpuRules,
        there: Occupancy,
        backend: Kind,
    ) -> Result<(), GpuChangeError> {
        let after = rules.after(self);
        match self {
            GpuChange::Policy(policy) if policy == rules.policy => return Ok(()),
            GpuChange::PrioRatio(prio_ratio) if prio_ratio == rules.prio_ratio => return Ok(()),
            GpuChange::Policy(_) | GpuChange::PrioRatio(_) if !backend.holds_shares() => {
                return Err(GpuChangeError::NotHeld { setting: self.written(), index, backend });
            }
            _ => {}
        }
        let bound_weight =
            if backend.bounds_weights(after.policy) { there.weight } else { there.containers };
        let is_bound = match self {
            GpuChange::MaxInst(_) => true,
            GpuChange::Policy(policy) => [POLICY_FAIR, POLICY_FIXED].contains(&policy),
            GpuChange::PrioRatio(_) => false,
        };
        if is_bound && there.containers.max(bound_weight) > after.max_inst {
            let Occupancy { containers, weight } = there;
            let max_inst = after.max_inst;
            return Err(GpuChangeError::Occupied { index, containers, weight, max_inst });
        }
        Ok(())
    }
}

impl GpuRules {
    /// These after `change`.
    #[must_use]
    pub fn after(mut self, change: GpuChange) -> Self {
        match change {
            GpuChange::Policy(policy) => self.policy = policy,
            GpuChange::MaxInst(max_inst) => self.max_inst = max_inst,
            GpuChange::PrioRatio(prio_ratio) => self.prio_ratio = prio_ratio,
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: GpuRules = GpuRules { policy: 5, max_inst: 20, prio_ratio: 80 };
    const EMPTY: Occupancy = Occupancy { containers: 0, weight: 0 };

    /// A change of a GPU is a key and a number within its bounds.
    #[test]
    fn gpu_change_parses_key_and_bounded_number() {
        assert_eq!(GpuChange::read("policy", "0"), Ok(GpuChange::Policy(0)));
        assert_eq!(GpuChange::read("max_inst", " 25\n"), Ok(GpuChange::MaxInst(25)));
        assert_eq!(GpuChange::read("prio_ratio", "20"), Ok(GpuChange::PrioRatio(20)));
        for (key, value, sentence) in [
            ("policy", "6", "policy=6 is not possible; policy is a number from 0 to 5"),
            ("max_inst", "0", "max_inst=0 is not possible; max_inst is a number from 1 to 25"),
            ("max_inst", "26", "max_inst=26 is not possible; max_inst is a number from 1 to 25"),
            (
                "prio_ratio",
                "100",
                "prio_ratio=100 is not possible; prio_ratio is a number from 20 to 99",
            ),
            ("policy", "-1", "policy=-1 is not possible; policy is a number from 0 to 5"),
            ("policy", "", "policy= is not possible; policy is a number from 0 to 5"),
            ("x\n", "1", "a GPU has no setting x\\n; it has policy, max_inst and prio_ratio"),
        ] {
            assert_eq!(GpuChange::read(key, value).unwrap_err().to_string(), sentence);
        }
        assert_eq!(RULES.after(GpuChange::PrioRatio(30)).prio_ratio, 30);
        assert_eq!(RULES.after(GpuChange::Policy(2)).policy, 2);
        assert_eq!(RULES.after(GpuChange::MaxInst(3)).max_inst, 3);
    }

    /// A change that the backend can't enforce is refused with the reason.
    #[test]
    fn change_the_backend_cannot_enforce_is_refused() {
        let check = |change: GpuChange, backend| change.check(0, RULES, EMPTY, backend);
        let refused = check(GpuChange::Policy(3), Kind::None).unwrap_err().to_string();
        assert_eq!(
            refused,
            "policy=3 can't be held on GPU 0: the backend none enforces nothing; leave it as it is"
        );
        for policy in 0..=5 {
            assert_eq!(check(GpuChange::Policy(policy), Kind::Gate), Ok(()), "{policy}");
        }
        assert!(check(GpuChange::PrioRatio(30), Kind::None).is_err());
        assert_eq!(check(GpuChange::Policy(5), Kind::Gate), Ok(()), "it has that");
        assert_eq!(check(GpuChange::PrioRatio(80), Kind::Gate), Ok(()));
        assert_eq!(check(GpuChange::Policy(2), Kind::Km), Ok(()));
        assert_eq!(check(GpuChange::MaxInst(3), Kind::Gate), Ok(()));
    }

    #[test]
    fn a_weight_selects_weights_where_nothing_is_set() {
        assert_eq!(policy_of(None, 5, false, false), 5);
        assert_eq!(policy_of(None, 5, true, false), 2);
        assert_eq!(policy_of(None, 1, true, true), 2);
        assert_eq!(policy_of(None, 5, false, true), 1);
        assert_eq!(policy_of(None, 4, false, true), 4);
        for policy in 0..=5 {
            assert_eq!(policy_of(Some(policy), 1, true, true), policy);
        }
    }

    #[test]
    fn a_bound_below_what_is_there_is_refused() {
        let there = Occupancy { containers: 3, weight: 5 };
        let check = |max_inst| GpuChange::MaxInst(max_inst).check(1, RULES, there, Kind::Km);
        assert_eq!(check(5), Ok(()));
        assert!(check(4).unwrap_err().to_string().starts_with("GPU 1 has 3 containers"));
        let gate = |max_inst| GpuChange::MaxInst(max_inst).check(1, RULES, there, Kind::Gate);
        assert_eq!(gate(3), Ok(()), "weights under the gate are relative");
        assert!(gate(2).is_err());
        // But for fixed parts, which are no more than there are.
        let fixed = |there| GpuChange::Policy(3).check(1, RULES, there, Kind::Gate);
        assert_eq!(fixed(Occupancy { containers: 2, weight: 20 }), Ok(()));
        assert!(fixed(Occupancy { containers: 2, weight: 21 }).is_err());
        let rules = GpuRules { policy: 3, ..RULES };
        assert!(GpuChange::MaxInst(4).check(1, rules, there, Kind::Gate).is_err());
        assert_eq!(GpuChange::PrioRatio(30).check(1, rules, there, Kind::Gate), Ok(()));
        // More is there than the bound, since that was lowered: what promises no part stays possible.
        let rules = GpuRules { max_inst: 2, ..RULES };
        let policy = |policy| GpuChange::Policy(policy).check(1, rules, there, Kind::Gate);
        assert_eq!([1, 2, 4].map(policy), [Ok(()), Ok(()), Ok(())]);
        assert!(policy(0).is_err() && policy(3).is_err());
    }
}
