//! Which GPUs of a node a pod gets. Pure.

use std::cmp::Reverse;

use thiserror::Error;

use super::preemption::Need;
use crate::annotations::{ByContainer, ByGpu};
use crate::placement::Placement;
use crate::pod_request::{ContainerAsk, PodAsk};
use crate::pods::indivisible;
use crate::units::Unit;

/// A GPU's percent of compute.
pub const ALL_PERCENT: u32 = 100;

/// What is free of a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capacity {
    pub index: u32,
    /// Units of memory in all.
    pub total: u32,
    /// Units that no pod has and that aren't reserved; 0 if none can be given out.
    pub free: u32,
    /// Percent of compute that no pod asked for.
    pub free_percent: u32,
    /// How many pods are on it.
    pub pods: u32,
    /// How many of these are of the same workload: of the same StatefulSet, say.
    pub siblings: u32,
}

/// What a pod gets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice {
    /// Units of memory.
    pub memory: ByContainer,
    /// Percent of compute.
    pub percent: ByContainer,
    /// Units in addition to these that its init containers had, and that the kubelet retains for it.
    pub surplus: ByGpu,
}

/// Why a node's GPUs don't do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NotEnoughMemory {
    /// The pod asks for what can't be.
    #[error("{0}")]
    Impossible(String),
    /// The node reports no GPU.
    #[error("the node has no GPUs to share")]
    NoGpus,
    /// There are too few, or too small ones.
    #[error("{}", large_enough(.0))]
    TooSmall(Wanted),
    /// Too much is taken.
    #[error("{}{}", with_capacity_left(.wanted), though_sum(*.sum))]
    Taken {
        /// What there is not.
        wanted: Wanted,
        /// Units that are free of all GPUs together, if these would do.
        sum: Option<u32>,
    },
    /// There is the capacity, and there are as many pods as a GPU may have.
    #[error("{}, with fewer than {most_pods} pods", with_capacity_left(.wanted))]
    Crowded {
        /// What there is.
        wanted: Wanted,
        /// How many pods a GPU may have.
        most_pods: u32,
    },
}

/// What is needed of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
    /// How many GPUs.
    pub gpus: u32,
    /// Units of each.
    pub units: u32,
    /// Of which size.
    pub unit: Unit,
    /// Percent of compute of each.
    pub percent: u32,
}

impl NotEnoughMemory {
    /// Whether it stays so if all other pods go.
    #[must_use]
    pub fn is_for_ever(&self) -> bool {
        !matches!(self, NotEnoughMemory::Taken { .. } | NotEnoughMemory::Crowded { .. })
    }
}

fn large_enough(wanted: &Wanted) -> String {
    let Wanted { gpus, units, unit, percent } = wanted;
    let compute =
        if *percent > ALL_PERCENT { format!(" and {percent} % of compute") } else { String::new() };
    match gpus {
        1 => format!("no GPU has {units} {unit} of memory{compute}"),
        _ => format!("no {gpus} GPUs have {units} {unit} of memory{compute} each"),
    }
}

fn with_capacity_left(wanted: &Wanted) -> String {
    let Wanted { gpus, units, unit, percent } = wanted;
    let compute = if *percent > 0 { format!(" and {percent} % of compute") } else { String::new() };
    match gpus {
        1 => format!("no GPU has {units} {unit}{compute} free"),
        _ => format!("no {gpus} GPUs have {units} {unit}{compute} free each"),
    }
}

impl PodAsk {
    /// What it needs of each of its GPUs if all its containers are on the same; `None` if it can be on none.
    #[must_use]
    pub fn need(&self) -> Option<Need> {
        let count = *self.gpus.as_ref().ok()?;
        let beside = self.containers.iter().filter(|ask| !ask.is_init);
        let percent = beside.map(|ask| ask.percent.div_ceil(count)).fold(0, u32::saturating_add);
        let units = self.units() / count + self.surplus() / count;
        Some(Need { gpus: count as usize, units, percent })
    }
}

/// What Kubernetes' scheduler concludes if all GPUs together have the capacity: it counts sums.
fn though_sum(sum: Option<u32>) -> String {
    let reported =
        |free| format!(", though all together have {free}; the scheduler ends no pod for that");
    sum.map(reported).unwrap_or_default()
}

/// Which of these GPUs a pod gets: all its containers the same ones if that can be, and else each container its
/// own. `most_pods` is how many pods a GPU may have.
///
/// # Errors
///
/// Why none do.
pub fn choose(
    capacities: &[Capacity],
    ask: &PodAsk,
    unit: Unit,
    placement: Placement,
    most_pods: u32,
) -> Result<Choice, NotEnoughMemory> {
    let count = ask.gpus.clone().map_err(NotEnoughMemory::Impossible)?;
    if capacities.is_empty() {
        return Err(NotEnoughMemory::NoGpus);
    }
    for container in &ask.containers {
        if !container.units.is_multiple_of(count) {
            return Err(NotEnoughMemory::Impossible(indivisible(container.units, count, unit)));
        }
    }
    let beside: Vec<&ContainerAsk> = ask.containers.iter().filter(|ask| !ask.is_init).collect();
    let has_init = beside.len() < ask.containers.len();
    let surplus = ask.surplus() / count;
    let wanted = |units, percent| Wanted { gpus: count, units, unit, percent };
    let whole = ask.need().map_or(wanted(0, 0), |need| wanted(need.units, need.percent));
    let why_not = |need: Wanted, capacities: &[Capacity]| {
        let can =
            |capacity: &&Capacity| capacity.total >= need.units && need.percent <= ALL_PERCENT;
        if capacities.iter().filter(can).count() < count as usize {
            NotEnoughMemory::TooSmall(need)
        } else if best(capacities, need, placement, u32::MAX).is_some() {
            NotEnoughMemory::Crowded { wanted: need, most_pods }
        } else {
            let has_units = |capacity: &&Capacity| capacity.free >= need.units;
            let is_for_units = capacities.iter().filter(has_units).count() < count as usize;
            let free = capacities.iter().map(|capacity| capacity.free).fold(0, u32::saturating_add);
            let suffices = free >= need.units.saturating_mul(count);
            NotEnoughMemory::Taken { wanted: need, sum: (is_for_units && suffices).then_some(free) }
        }
    };
    let mut choice = Choice::default();
    let mut give = |container: &ContainerAsk, indices: &[u32]| {
        let each = |of_all: u32| indices.iter().map(|index| (*index, of_all)).collect::<ByGpu>();
        choice.memory.insert(container.name.clone(), each(container.units / count));
        if container.percent > 0 {
            let percent = each(container.percent.div_ceil(count));
            choice.percent.insert(container.name.clone(), percent);
        }
    };
    if let Some(indices) = best(capacities, whole, placement, most_pods) {
        beside.iter().for_each(|container| give(container, &indices));
        if surplus > 0 {
            choice.surplus = indices.iter().map(|index| (*index, surplus)).collect();
        }
        return Ok(choice);
    }
    // An init container's units become the others', which have to be on its GPUs therefore.
    if has_init || beside.len() < 2 {
        return Err(why_not(whole, capacities));
    }
    let mut left = capacities.to_vec();
    let mut largest_first = beside;
    largest_first.sort_by_key(|ask| Reverse(ask.units));
    for container in largest_first {
        let need = wanted(container.units / count, container.percent.div_ceil(count));
        let indices =
            best(&left, need, placement, most_pods).ok_or_else(|| why_not(need, &left))?;
        for capacity in left.iter_mut().filter(|capacity| indices.contains(&capacity.index)) {
            capacity.free -= need.units;
            capacity.free_percent -= need.percent;
        }
        give(container, &indices);
    }
    Ok(choice)
}

/// The indices of so many GPUs with the capacity, in order.
fn best(
    capacities: &[Capacity],
    need: Wanted,
    placement: Placement,
    most_pods: u32,
) -> Option<Vec<u32>> {
    let has_capacity = |capacity: &&Capacity| {
        capacity.free >= need.units
            && capacity.free_percent >= need.percent
            && capacity.pods < most_pods
    };
    let mut fitting: Vec<&Capacity> = capacities.iter().filter(has_capacity).collect();
    match placement {
        Placement::Binpack => fitting.sort_by_key(|capacity| (capacity.free, capacity.index)),
        // Replicas of one workload fail together if they share a GPU.
        Placement::Spread => {
            fitting.sort_by_key(|capacity| {
                (capacity.siblings, Reverse(capacity.free), capacity.index)
            });
        }
    }
    let chosen = fitting.get(..need.gpus as usize)?;
    let mut indices: Vec<u32> = chosen.iter().map(|capacity| capacity.index).collect();
    indices.sort_unstable();
    Some(indices)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BINPACK: Placement = Placement::Binpack;

    fn capacities(free: &[u32]) -> Vec<Capacity> {
        let capacity = |(index, free): (usize, &u32)| Capacity {
            index: u32::try_from(index).unwrap(),
            total: 16,
            free: *free,
            free_percent: ALL_PERCENT,
            ..Capacity::default()
        };
        free.iter().enumerate().map(capacity).collect()
    }

    /// A pod of containers that ask for so much, of which those with a negative number are init containers.
    fn ask(units: &[i32], gpus: u32) -> PodAsk {
        let container = |(at, units): (usize, &i32)| ContainerAsk {
            name: format!("c{at}"),
            units: units.unsigned_abs(),
            percent: 0,
            is_init: *units < 0,
        };
        PodAsk { containers: units.iter().enumerate().map(container).collect(), gpus: Ok(gpus) }
    }

    fn chosen(
        capacities: &[Capacity],
        ask: &PodAsk,
        placement: Placement,
    ) -> Result<Vec<Vec<u32>>, String> {
        let choice =
            choose(capacities, ask, Unit::GiB, placement, 20).map_err(|why| why.to_string())?;
        Ok(choice.memory.into_values().map(|shares| shares.into_keys().collect()).collect())
    }

    /// Binpack chooses the GPU with the least free memory that suffices, and spread the emptiest
    /// GPU.
    #[test]
    fn binpack_takes_the_tightest_gpu_spread_the_emptiest() {
        let of = |units: &[i32], gpus, placement| {
            chosen(&capacities(&[16, 6, 4, 9]), &ask(units, gpus), placement)
        };
        assert_eq!(of(&[5], 1, BINPACK), Ok(vec![vec![1]]));
        assert_eq!(of(&[5], 1, Placement::Spread), Ok(vec![vec![0]]));
        assert_eq!(of(&[10], 2, BINPACK), Ok(vec![vec![1, 3]]), "5 of each");
        assert_eq!(of(&[3, 3], 1, BINPACK), Ok(vec![vec![1], vec![1]]), "both on one");
        assert_eq!(of(&[16, 9], 1, BINPACK), Ok(vec![vec![0], vec![3]]), "each by itself");
        assert_eq!(of(&[12], 3, Placement::Spread), Ok(vec![vec![0, 1, 3]]));
    }

    /// A pod that does not fit is refused with the reason, and with whether it ever can fit.
    #[test]
    fn refusal_says_whether_the_pod_could_ever_fit() {
        let why = |units: &[i32], gpus| {
            choose(&capacities(&[16, 6, 4]), &ask(units, gpus), Unit::GiB, BINPACK, 20).unwrap_err()
        };
        let reported = |units: &[i32], gpus| {
            let why = why(units, gpus);
            (why.to_string(), why.is_for_ever())
        };
        assert_eq!(reported(&[17], 1), ("no GPU has 17 GiB of memory".into(), true));
        assert_eq!(reported(&[14], 2), (
                "no 2 GPUs have 7 GiB free each, though all together have 26; the scheduler ends no pod for that".into(),
                false
            ));
        assert_eq!(reported(&[4], 4), ("no 4 GPUs have 1 GiB of memory each".into(), true));
        assert_eq!(reported(&[16, 7], 1), ("no GPU has 7 GiB free, though all together have 10; the scheduler ends no pod for that".into(), false));
        assert!(reported(&[7], 2).0.contains("ask for a multiple of 2"));
        let impossible = PodAsk { gpus: Err("is no number".into()), ..ask(&[1], 1) };
        let why = choose(&capacities(&[1]), &impossible, Unit::GiB, BINPACK, 20).unwrap_err();
        assert!(why.is_for_ever());
        let none = choose(&[], &ask(&[1], 1), Unit::GiB, BINPACK, 20).unwrap_err();
        assert_eq!(none, NotEnoughMemory::NoGpus);
    }

    /// An init container's units are on the GPU of the other containers, and stay there.
    #[test]
    fn init_container_units_stay_on_the_others_gpu() {
        let capacities = capacities(&[7, 9]);
        let choice = choose(&capacities, &ask(&[-8, 3, 2], 1), Unit::GiB, BINPACK, 20).unwrap();
        assert_eq!(choice.memory["c1"], [(1, 3)].into());
        assert_eq!((choice.memory.len(), choice.surplus), (2, [(1, 3)].into()));
        let error = chosen(&capacities, &ask(&[-1, 7, 8], 1), BINPACK).unwrap_err();
        assert!(error.contains("no GPU has 15 GiB free"), "{error}");
    }

    /// Spread places replicas on different GPUs, and a GPU has a bounded number of pods.
    #[test]
    fn replicas_spread_and_pods_per_gpu_are_bounded() {
        let mut capacities = capacities(&[16, 12, 10]);
        capacities[0].siblings = 1;
        assert_eq!(chosen(&capacities, &ask(&[4], 1), Placement::Spread), Ok(vec![vec![1]]));
        capacities[1].pods = 20;
        assert_eq!(chosen(&capacities, &ask(&[4], 1), Placement::Spread), Ok(vec![vec![2]]));
    }

    #[test]
    fn percent_of_compute_is_given_once() {
        let mut capacities = capacities(&[16, 16]);
        capacities[0].free_percent = 40;
        let mut asked = ask(&[2], 1);
        asked.containers[0].percent = 50;
        let choice = choose(&capacities, &asked, Unit::GiB, BINPACK, 20).unwrap();
        assert_eq!(choice.percent["c0"], [(1, 50)].into());
        let reported = |capacities: &[Capacity], asked: &PodAsk| {
            choose(capacities, asked, Unit::GiB, BINPACK, 20).unwrap_err().to_string()
        };
        capacities[1].free_percent = 40;
        assert_eq!(reported(&capacities, &asked), "no GPU has 2 GiB and 50 % of compute free");
        asked.containers[0].percent = 101;
        assert_eq!(
            reported(&capacities, &asked),
            "no GPU has 2 GiB of memory and 101 % of compute"
        );
    }
}
