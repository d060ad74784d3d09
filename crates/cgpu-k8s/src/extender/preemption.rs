//! Which pods have to go for another one, GPU by GPU. Pure.
//!
//! Kubernetes' scheduler counts a node's units as one sum, and would end pods of several GPUs of which none has the
//! capacity afterwards. Of each node it asks with the pods that it would end; it is answered with those whose end
//! gives the pod its GPUs, and free of everything else at least as much as the scheduler's would.

use std::collections::{BTreeMap, BTreeSet};

/// What a pod of a node has, and what its end frees.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holder {
    pub uid: String,
    pub priority: i32,
    /// Units and percent of compute, by the GPU's index.
    pub gpus: BTreeMap<u32, (u32, u32)>,
    /// Thousandths of a processor.
    pub cpu_milli: u64,
    pub memory_bytes: u64,
}

/// A GPU, and what of it no pod has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Free {
    pub index: u32,
    /// Units in all; 0 if none can be given out.
    pub total: u32,
    /// Units that no pod has.
    pub units: u32,
    /// Percent of compute that no pod asked for.
    pub percent: u32,
    /// How many more pods it may have.
    pub pods: u32,
}

/// What a pod needs of each of so many GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// How many GPUs.
    pub gpus: usize,
    /// Units of each.
    pub units: u32,
    /// Percent of compute of each.
    pub percent: u32,
}

/// The pods of lower priority than `priority` that have to go so that `free` GPUs have what is needed; of several such
/// sets one whose highest priority is the lowest, and of those one with the fewest pods. `None` if the end of no such
/// pods suffices.
#[must_use]
pub fn victims(
    free: &[Free],
    holders: &[Holder],
    priority: i32,
    need: Need,
) -> Option<BTreeSet<String>> {
    let lower: Vec<&Holder> = holders.iter().filter(|holder| holder.priority < priority).collect();
    let mut gone: BTreeSet<String> = BTreeSet::new();
    let mut given: BTreeSet<u32> = BTreeSet::new();
    // One GPU after the other: a pod that ends for one frees something of the next, too.
    for _ in 0..need.gpus {
        let others =
            free.iter().filter(|gpu| gpu.total >= need.units && !given.contains(&gpu.index));
        let ways = others.filter_map(|gpu| Some((of_one(*gpu, &lower, &gone, need)?, gpu.index)));
        let cost = |more: &[&Holder]| (more.iter().map(|holder| holder.priority).max(), more.len());
        let (more, index) = ways.min_by_key(|(more, index)| (cost(more), *index))?;
        gone.extend(more.iter().map(|holder| holder.uid.clone()));
        given.insert(index);
    }
    Some(gone)
}

/// Which pods have to go in addition to those that are `gone` already so that one GPU has what is needed.
fn of_one<'a>(
    gpu: Free,
    lower: &[&'a Holder],
    gone: &BTreeSet<String>,
    need: Need,
) -> Option<Vec<&'a Holder>> {
    let of = |holder: &Holder| holder.gpus.get(&gpu.index).copied();
    let mut here: Vec<&Holder> =
        lower.iter().copied().filter(|holder| of(holder).is_some()).collect();
    // The least important first, and of these the largest, so that few go.
    here.sort_by_key(|holder| {
        let (units, percent) = of(holder).unwrap_or_default();
        (holder.priority, std::cmp::Reverse((units, percent)), holder.uid.clone())
    });
    let has_capacity = |without: &[&Holder]| {
        let freed = without.iter().filter_map(|holder| of(holder));
        let (units, percent) = freed.fold((gpu.units, gpu.percent), |sum, part| {
            (sum.0.saturating_add(part.0), sum.1.saturating_add(part.1))
        });
        let pods = u32::try_from(without.len()).unwrap_or(u32::MAX).saturating_add(gpu.pods);
        units >= need.units && percent >= need.percent && pods > 0
    };
    let (already, mut rest): (Vec<&Holder>, Vec<&Holder>) =
        here.into_iter().partition(|holder| gone.contains(&holder.uid));
    let mut without = already.clone();
    let mut more: Vec<&Holder> = Vec::new();
    rest.reverse();
    while !has_capacity(&without) {
        let next = rest.pop()?;
        without.push(next);
        more.push(next);
    }
    // A pod that was chosen first may be unnecessary after those that came later.
    let mut retained = 0;
    while retained < more.len() {
        // The most important of them first.
        let at = more.len() - 1 - retained;
        let reprieved: Vec<&Holder> = more
            .iter()
            .enumerate()
            .filter_map(|(index, holder)| (index != at).then_some(*holder))
            .collect();
        if has_capacity(&[already.clone(), reprieved.clone()].concat()) {
            more = reprieved;
        } else {
            retained += 1;
        }
    }
    Some(more)
}

/// `gone` and of the pods that the scheduler `proposed` as many as together free as much processor and memory as the
/// proposed would: it has counted these.
#[must_use]
pub fn completed(
    mut gone: BTreeSet<String>,
    proposed: &[String],
    holders: &[Holder],
) -> BTreeSet<String> {
    let of = |uid: &String| holders.iter().find(|holder| holder.uid == *uid);
    let freed = |uids: &mut dyn Iterator<Item = &String>| {
        uids.filter_map(of).fold((0_u64, 0_u64), |sum, holder| {
            (sum.0.saturating_add(holder.cpu_milli), sum.1.saturating_add(holder.memory_bytes))
        })
    };
    // Of those that hold no GPU memory nothing is known but that the scheduler needs them gone.
    gone.extend(proposed.iter().filter(|uid| of(uid).is_none()).cloned());
    let needed = freed(&mut proposed.iter());
    for uid in proposed {
        let now = freed(&mut gone.iter());
        if now.0 >= needed.0 && now.1 >= needed.1 {
            break;
        }
        gone.insert(uid.clone());
    }
    gone
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn free(all: &[(u32, u32)]) -> Vec<Free> {
        let gpu = |(index, (total, units)): (usize, &(u32, u32))| Free {
            index: u32::try_from(index).unwrap(),
            total: *total,
            units: *units,
            percent: 100,
            pods: 20,
        };
        all.iter().enumerate().map(gpu).collect()
    }

    fn holder(uid: &str, priority: i32, gpus: &[(u32, u32)]) -> Holder {
        let gpus = gpus.iter().map(|(index, units)| (*index, (*units, 0))).collect();
        Holder { uid: uid.to_owned(), priority, gpus, cpu_milli: 100, memory_bytes: 1 }
    }

    fn need(gpus: usize, units: u32) -> Need {
        Need { gpus, units, percent: 0 }
    }

    fn names(gone: Option<BTreeSet<String>>) -> Option<Vec<String>> {
        gone.map(|gone| gone.into_iter().collect())
    }

    fn words(list: &[&str]) -> Option<Vec<String>> {
        Some(list.iter().map(|word| (*word).to_owned()).collect())
    }

    /// Preemption evicts pods of one GPU, and no more of them than it has to.
    #[test]
    fn preemption_evicts_only_needed_pods_of_one_gpu() {
        // GPUs of 12 and 16 GiB with nine pods of 3; 14 fit on the larger alone.
        let all: Vec<Holder> =
            (0..9).map(|at| holder(&format!("p{at}"), 0, &[(u32::from(at >= 4), 3)])).collect();
        let gpus = free(&[(12, 0), (16, 1)]);
        let gone = victims(&gpus, &all, 100, need(1, 14));
        assert_eq!(names(gone), words(&["p4", "p5", "p6", "p7", "p8"]));
        assert_eq!(names(victims(&gpus, &all, 100, need(1, 4))), words(&["p4"]));
        assert_eq!(victims(&gpus, &all, 0, need(1, 4)), None, "no pod is less important");
        assert_eq!(victims(&gpus, &all, 100, need(1, 17)), None);
        assert_eq!(names(victims(&gpus, &all, 100, need(1, 1))), words(&[]));
    }

    /// The least important pods are evicted, and the largest of these.
    #[test]
    fn least_important_and_largest_pods_are_evicted() {
        let all = [
            holder("high", 9, &[(0, 8)]),
            holder("low", 1, &[(0, 4)]),
            holder("small", 1, &[(0, 1)]),
            holder("both", 2, &[(0, 3), (1, 3)]),
            holder("other", 5, &[(1, 13)]),
        ];
        let gpus = free(&[(16, 0), (16, 0)]);
        assert_eq!(names(victims(&gpus, &all, 10, need(1, 4))), words(&["low"]));
        assert_eq!(
            names(victims(&gpus, &all, 10, need(1, 1))),
            words(&["low"]),
            "the fewest, not the smallest"
        );
        // One that is on both frees something of both.
        assert_eq!(names(victims(&gpus, &all, 10, need(2, 3))), words(&["both", "low"]));
        assert_eq!(victims(&gpus, &all, 5, need(2, 4)), None, "the other isn't less important");
    }

    #[test]
    fn what_else_the_scheduler_needs_is_freed_too() {
        let mut all = vec![holder("a", 0, &[(0, 4)]), holder("b", 0, &[(1, 4)])];
        all[1].cpu_milli = 900;
        let gone = || BTreeSet::from(["a".to_owned()]);
        let reported = |proposed: &[&str]| {
            let proposed: Vec<String> = proposed.iter().map(|uid| (*uid).to_owned()).collect();
            completed(gone(), &proposed, &all).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(reported(&["a"]), ["a"]);
        assert_eq!(reported(&["b"]), ["a", "b"], "its processor is needed");
        assert_eq!(reported(&["without-gpu"]), ["a", "without-gpu"]);
        all[1].cpu_milli = 100;
        let proposed = ["b".to_owned()];
        assert_eq!(completed(gone(), &proposed, &all), gone(), "one for another of the same size");
    }

    proptest! {
        /// After preemption the GPUs have the free memory that is needed, and no evicted pod could
        /// have stayed.
        #[test]
        fn evicted_pods_suffice_and_none_could_stay(
            totals in proptest::collection::vec(4..17_u32, 1..4),
            pods in proptest::collection::vec((0..4_usize, 1..6_u32, 0..4_i32), 0..12),
            count in 1..3_usize,
            units in 1..17_u32,
        ) {
            let mut left = totals.clone();
            let mut all = Vec::new();
            for (at, (gpu, units, priority)) in pods.into_iter().enumerate() {
                let index = gpu % totals.len();
                if left[index] >= units {
                    left[index] -= units;
                    all.push(holder(&format!("p{at}"), priority, &[(u32::try_from(index).unwrap(), units)]));
                }
            }
            let gpus: Vec<(u32, u32)> = totals.iter().copied().zip(left.iter().copied()).collect();
            let gpus = free(&gpus);
            let fits = |gone: &BTreeSet<String>| {
                let capacity = |gpu: &&Free| {
                    let freed = all.iter().filter(|holder| gone.contains(&holder.uid));
                    let freed: u32 = freed.filter_map(|holder| holder.gpus.get(&gpu.index)).map(|part| part.0).sum();
                    gpu.units + freed >= units
                };
                gpus.iter().filter(capacity).count() >= count
            };
            let lower: BTreeSet<String> =
                all.iter().filter(|holder| holder.priority < 2).map(|holder| holder.uid.clone()).collect();
            match victims(&gpus, &all, 2, need(count, units)) {
                None => prop_assert!(!fits(&lower), "all of them would have sufficed"),
                Some(gone) => {
                    prop_assert!(gone.is_subset(&lower));
                    prop_assert!(fits(&gone));
                    for uid in &gone {
                        let mut less = gone.clone();
                        less.remove(uid);
                        prop_assert!(!fits(&less), "{uid} could stay");
                    }
                }
            }
        }
    }
}
