//! On which GPUs a container is placed, if it says how many and not which: [`Proposal`].
//!
//! Knows what others hold and what fits next to it. Must not know names of GPUs or settings. What fits anywhere is
//! never refused: if several GPUs are wanted that differ, all ways of choosing them are tried.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::capacity::{self, Available, Holding, Limits, Refusal};
use super::gpu_rules::POLICY_FIXED;
use super::{Kind, Plan, PlannedGpu};

/// Which GPU is chosen of those with enough memory left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// The one with the least memory left: others stay free for large containers.
    Binpack,
    /// The one with the most memory left.
    Spread,
}

/// A GPU that a container may get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// The GPU, with the container's quota on it.
    pub gpu: PlannedGpu,
    /// The setting that the quota comes from.
    pub quota_by: Option<String>,
    /// Whether it has less than a size that is asked for, so that the quota was cut to it.
    pub is_cut: bool,
}

/// How much of the computing time a container asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightAsked {
    /// A weight, 1 ..= max_inst.
    pub number: Option<u32>,
    /// A part of a GPU, and the setting that says it.
    pub share: Option<ShareAsked>,
}

/// A part of a GPU's computing time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareAsked {
    /// Hundredths of a per cent, 1 ..= 10 000.
    pub hundredths: u64,
    /// What says so, for messages.
    pub setting: String,
}

/// A plan whose GPUs may still have to be chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proposal {
    /// The plan but for its GPUs and its weight; its quotas come from all settings that ask for one.
    rest: Plan,
    /// For each GPU that the container gets, those that it may be: one each, where the request says which.
    places: Vec<Vec<Candidate>>,
    weight: WeightAsked,
    /// The host's other GPUs, each with why it can't be chosen.
    unusable: Vec<String>,
}

impl Proposal {
    /// The proposal of `rest` with a GPU for each of `places`; `unusable` are the host's others, each with
    /// why it can't be chosen.
    #[must_use]
    pub fn new(
        rest: Plan,
        places: Vec<Vec<Candidate>>,
        weight: WeightAsked,
        unusable: Vec<String>,
    ) -> Self {
        Proposal { rest, places, weight, unusable }
    }

    /// The same, enforced by `backend`.
    #[must_use]
    pub fn by(mut self, backend: Kind) -> Self {
        self.rest.backend = backend;
        self
    }

    /// Who enforces it.
    #[must_use]
    pub fn backend(&self) -> Kind {
        self.rest.backend
    }

    /// The shares of claims that it uses.
    #[must_use]
    pub fn shares(&self) -> &[String] {
        &self.rest.caveats.shares
    }

    /// Whether no GPU comes with it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether nothing of it is under a quota.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.rest.caveats.quota_by.is_none()
    }

    /// The plan that it results in next to `holdings`.
    ///
    /// # Errors
    ///
    /// If others hold too much: for the first GPU that lacks memory, or for each that could be chosen.
    pub fn place<'a>(
        &self,
        holdings: impl IntoIterator<Item = &'a Holding, IntoIter: Clone>,
        limits: &Limits,
        placement: Placement,
    ) -> Result<Plan, Refusal> {
        let holdings = holdings.into_iter();
        let is_said =
            self.places.iter().all(|candidates| candidates.len() == 1) && self.unusable.is_empty();
        if is_said {
            let plan = self.of(self.places.iter().flatten(), limits)?;
            capacity::admit(&plan, holdings, limits)?;
            return Ok(plan);
        }
        let mut refusals: Vec<Refusal> = Vec::new();
        let mut fitting: Vec<Vec<(&Candidate, Available)>> = Vec::new();
        for candidates in &self.places {
            let mut fits = Vec::new();
            for candidate in candidates {
                let available = self.of([candidate], limits).and_then(|plan| {
                    capacity::available(&plan, &candidate.gpu, holdings.clone(), limits)
                });
                match available {
                    Ok(available) => fits.push((candidate, available)),
                    Err(refusal) if !refusals.contains(&refusal) => refusals.push(refusal),
                    Err(_) => {}
                }
            }
            fits.sort_by_key(|(candidate, available)| {
                let left = match placement {
                    Placement::Binpack => available.left_bytes,
                    Placement::Spread => u64::MAX - available.left_bytes,
                };
                (candidate.is_cut, available.unlike, left, candidate.gpu.index)
            });
            fitting.push(fits);
        }
        match matched(&fitting) {
            Some(chosen) => {
                let chosen = chosen.iter().zip(&fitting).map(|(&at, fits)| fits[at].0);
                self.of(chosen, limits)
            }
            None => {
                let mut lacks: Vec<String> = refusals.iter().map(Refusal::lack).collect();
                lacks.extend(self.unusable.iter().cloned());
                Err(Refusal::NotEnoughMemory { wanted: self.wanted(), lacks })
            }
        }
    }

    /// The plan with these GPUs.
    fn of<'c>(
        &self,
        candidates: impl IntoIterator<Item = &'c Candidate>,
        limits: &Limits,
    ) -> Result<Plan, Refusal> {
        let mut plan = self.rest.clone();
        let mut by: Vec<&str> = Vec::new();
        for candidate in candidates {
            plan.gpus.push(candidate.gpu.clone());
            let quota_by = candidate.quota_by.as_deref();
            by.extend(quota_by.filter(|quota_by| !by.contains(quota_by)));
        }
        plan.caveats.quota_by = (!by.is_empty()).then(|| by.join(", "));
        plan.weight = self.weight(&plan, limits)?;
        Ok(plan)
    }

    /// The weight on the GPUs of `plan`: the smallest that is asked for.
    fn weight(&self, plan: &Plan, limits: &Limits) -> Result<u32, Refusal> {
        let mut smallest = self.weight.number;
        if let Some(share) = &self.weight.share {
            for gpu in &plan.gpus {
                let (index, uuid) = (gpu.index, gpu.uuid.clone());
                let (setting, policy) = (share.setting.clone(), limits.policy(&gpu.uuid));
                if policy != POLICY_FIXED || !plan.backend.bounds_weights(policy) {
                    return Err(Refusal::Share { index, uuid, setting, policy });
                }
                let parts = limits.max_inst(&gpu.uuid);
                let weight = u64::from(parts) * share.hundredths / 10_000;
                match u32::try_from(weight) {
                    Ok(weight) if weight > 0 => {
                        smallest = Some(smallest.map_or(weight, |other| other.min(weight)));
                    }
                    _ => return Err(Refusal::SmallShare { index, uuid, setting, parts }),
                }
            }
        }
        Ok(smallest.unwrap_or(1))
    }

    /// What is wanted, as a message has it: `2 GPUs with enough memory for CGPU_MEMORY=4GiB`.
    fn wanted(&self) -> String {
        let gpus = match self.places.len() {
            1 => "GPU".to_owned(),
            more => format!("{more} GPUs"),
        };
        match &self.rest.caveats.quota_by {
            Some(setting) => format!("{gpus} with enough memory for {setting}"),
            None => gpus,
        }
    }
}

/// For each place the position of the candidate that it gets, none for two; the first in each list that
/// can be. `None` if some place can't have any.
fn matched(fitting: &[Vec<(&Candidate, Available)>]) -> Option<Vec<usize>> {
    let mut chosen: Vec<Option<usize>> = vec![None; fitting.len()];
    for place in 0..fitting.len() {
        if !give(fitting, place, &mut chosen, &mut Vec::new()) {
            return None;
        }
    }
    chosen.into_iter().collect()
}

/// Gives `place` a GPU, if need be by giving others another one. `asked` are the GPUs that this was tried
/// with already.
fn give<'c>(
    fitting: &[Vec<(&'c Candidate, Available)>],
    place: usize,
    chosen: &mut [Option<usize>],
    asked: &mut Vec<&'c str>,
) -> bool {
    let uuid = |place: usize, at: usize| fitting[place][at].0.gpu.given_uuid();
    let owner = |chosen: &[Option<usize>], wanted: &str| {
        (0..chosen.len()).find(|&other| chosen[other].is_some_and(|at| uuid(other, at) == wanted))
    };
    if let Some(at) = (0..fitting[place].len()).find(|&at| owner(chosen, uuid(place, at)).is_none())
    {
        chosen[place] = Some(at);
        return true;
    }
    for at in 0..fitting[place].len() {
        let wanted = fitting[place][at].0.gpu.given_uuid();
        if asked.contains(&wanted) {
            continue;
        }
        asked.push(wanted);
        if let Some(other) = owner(chosen, wanted)
            && give(fitting, other, chosen, asked)
        {
            chosen[place] = Some(at);
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::plan::{Caveats, POLICY_PREEMPTIVE};
    use crate::units::{MIB, bytes_to_mib};

    fn limits() -> Limits {
        Limits {
            overcommit: 1.0,
            max_inst: 20,
            max_inst_of: BTreeMap::new(),
            policy: POLICY_PREEMPTIVE,
            policy_of: BTreeMap::new(),
            bounds_weights: true,
            exclusive: false,
        }
    }

    fn candidate(index: u32, total_mib: u64, limit_mib: Option<u64>) -> Candidate {
        Candidate {
            gpu: PlannedGpu {
                index,
                uuid: format!("GPU-{index}"),
                minor: index,
                memory_total_bytes: total_mib * MIB,
                memory_reserved_bytes: 0,
                memory_limit_bytes: limit_mib.map(|mib| mib * MIB),
                mig: None,
            },
            quota_by: limit_mib.map(|mib| format!("CGPU_MEMORY={mib}MiB")),
            is_cut: false,
        }
    }

    fn proposal(places: Vec<Vec<Candidate>>) -> Proposal {
        let quota_by = places.iter().flatten().find_map(|candidate| candidate.quota_by.clone());
        let rest = Plan {
            backend: Kind::Gate,
            gpus: Vec::new(),
            weight: 1,
            high_priority: false,
            caveats: Caveats { quota_by, ..Caveats::default() },
        };
        Proposal::new(rest, places, WeightAsked { number: None, share: None }, Vec::new())
    }

    /// A container with `limit_mib` on each of `count` GPUs of a host with GPUs of `totals_mib`.
    fn asking(count: usize, limit_mib: u64, totals_mib: &[u64]) -> Proposal {
        let all = (0..).zip(totals_mib).map(|(index, &mib)| candidate(index, mib, Some(limit_mib)));
        proposal(vec![all.collect(); count])
    }

    fn holding(id: &str, gpu: u32, mib: Option<u64>) -> Holding {
        let gpus = vec![(format!("GPU-{gpu}"), mib.map(|mib| mib * MIB))];
        Holding { id: id.to_owned(), gpus, weight: 1, high_priority: false }
    }

    fn indices(plan: &Plan) -> Vec<u32> {
        plan.gpus.iter().map(|gpu| gpu.index).collect()
    }

    const BIG_AND_SMALL: [u64; 4] = [16_000, 8_000, 24_000, 12_000];

    /// Binpack takes the fullest GPU with enough memory left, and spread takes the emptiest.
    #[test]
    fn binpack_takes_fullest_fitting_gpu_and_spread_emptiest() {
        let asks = asking(1, 4_000, &BIG_AND_SMALL);
        let chosen = |held: &[Holding], placement| {
            indices(&asks.place(held, &limits(), placement).unwrap())[0]
        };
        assert_eq!(chosen(&[], Placement::Binpack), 1);
        assert_eq!(chosen(&[], Placement::Spread), 2);
        let held = [holding("a", 1, Some(5_000)), holding("b", 2, Some(19_000))];
        // GPU 1 has 3,000 left, GPU 2 5,000.
        assert_eq!(chosen(&held, Placement::Binpack), 2);
        assert_eq!(chosen(&held, Placement::Spread), 0);
        // One whose use is unlimited for a container only if there is no other.
        let whole = [holding("w", 1, None)];
        assert_eq!(chosen(&whole, Placement::Binpack), 3);
    }

    #[test]
    fn several_gpus_are_different_ones() {
        let chosen = asking(3, 4_000, &BIG_AND_SMALL).place(&[], &limits(), Placement::Binpack);
        let plan = chosen.unwrap();
        assert_eq!(indices(&plan), [1, 3, 0]);
        assert_eq!(plan.caveats.quota_by.as_deref(), Some("CGPU_MEMORY=4000MiB"));
    }

    #[test]
    fn the_refusal_names_what_each_gpu_lacks() {
        let mut asks = asking(1, 4_000, &[16_000, 8_000]);
        asks.unusable.push("GPU 2 (GPU-2) is lost".to_owned());
        let held = [holding("a", 0, Some(13_000)), holding("b", 1, Some(8_000))];
        let refused = asks.place(&held, &limits(), Placement::Spread).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "no GPU with enough memory for CGPU_MEMORY=4000MiB is left: GPU 0 (GPU-0) has 3000 MiB of 16000 MiB \
             left; GPU 1 (GPU-1) has 0 MiB of 8000 MiB left; GPU 2 (GPU-2) is lost; ask for less, or \
             stop containers (`cgpu ps` shows them)"
        );
        // A GPU that fits is not enough for two.
        let held = [holding("b", 1, Some(8_000))];
        let refused = asking(2, 4_000, &[16_000, 8_000]).place(&held, &limits(), Placement::Spread);
        assert!(refused.unwrap_err().to_string().starts_with("no 2 GPUs with enough memory for"));
    }

    #[test]
    fn what_fits_some_way_is_not_refused() {
        // The first amount fits on both, the second on the larger alone.
        let both =
            |limit| vec![candidate(0, 8_000, Some(limit)), candidate(1, 16_000, Some(limit))];
        let small_first = proposal(vec![both(4_000), both(12_000)]);
        for placement in [Placement::Binpack, Placement::Spread] {
            let holdings: [Holding; 0] = [];
            let fits = |mut asks: Proposal| {
                for candidates in &mut asks.places {
                    candidates
                        .retain(|c| c.gpu.memory_limit_bytes <= Some(c.gpu.memory_total_bytes));
                }
                indices(&asks.place(&holdings, &limits(), placement).unwrap())
            };
            assert_eq!(fits(small_first.clone()), [0, 1]);
        }
    }

    /// A percentage of the computing time is so many parts of a GPU that is divided into parts.
    #[test]
    fn compute_percentage_becomes_weight_under_fixed_policy() {
        let mut asks = asking(1, 1_000, &[16_000, 16_000]);
        let share = |hundredths| {
            let setting = format!("CGPU_WEIGHT={}%", hundredths / 100);
            WeightAsked { number: None, share: Some(ShareAsked { hundredths, setting }) }
        };
        asks.weight = share(2_500);
        let refused = asks.place(&[], &limits(), Placement::Binpack).unwrap_err().to_string();
        assert!(refused.contains("policy 1"), "{refused}");
        // GPU 1 is divided by parts, and so the one that is chosen.
        let limits = Limits { policy_of: [("GPU-1".to_owned(), POLICY_FIXED)].into(), ..limits() };
        let plan = asks.place(&[], &limits, Placement::Binpack).unwrap();
        assert_eq!((indices(&plan), plan.weight), (vec![1], 5));
        asks.weight = share(100);
        assert!(asks.place(&[], &limits, Placement::Binpack).is_err());
        asks.weight.number = Some(2);
        asks.weight.share.as_mut().unwrap().hundredths = 5_000;
        assert_eq!(asks.place(&[], &limits, Placement::Binpack).unwrap().weight, 2);
    }

    proptest! {
        /// Whatever was placed before, one is refused only if it fits nowhere, and nothing is reserved twice.
        #[test]
        fn nothing_is_refused_that_fits(
            asks in proptest::collection::vec((1u64..9_000, 1usize..4), 1..40),
            binpack: bool,
        ) {
            let placement = if binpack { Placement::Binpack } else { Placement::Spread };
            let mut held: Vec<Holding> = Vec::new();
            let left = |held: &[Holding], gpu: usize| {
                let uuid = format!("GPU-{gpu}");
                let limits = held.iter().flat_map(|holding| &holding.gpus);
                let sum: u64 = limits.filter(|(other, _)| *other == uuid).filter_map(|l| l.1).sum();
                BIG_AND_SMALL[gpu] - bytes_to_mib(sum)
            };
            for (n, (mib, count)) in asks.into_iter().enumerate() {
                let fitting = (0..4).filter(|&gpu| left(&held, gpu) >= mib).count();
                let placed = asking(count, mib, &BIG_AND_SMALL).place(&held, &limits(), placement);
                prop_assert_eq!(placed.is_ok(), fitting >= count);
                if let Ok(plan) = placed {
                    let gpus = plan.gpus.iter().map(|g| (g.uuid.clone(), g.memory_limit_bytes));
                    held.push(Holding {
                        id: n.to_string(),
                        gpus: gpus.collect(),
                        weight: 0,
                        high_priority: false,
                    });
                }
            }
        }
    }
}
