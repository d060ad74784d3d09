//! Which units a container gets: as many of each GPU that it is to have. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use crate::annotations::ByGpu;
use crate::units::{SharedGpu, gpu_of};

/// Which GPU is preferred of those that have enough free units.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Placement {
    /// The one with the fewest free units: others stay free for larger containers.
    #[default]
    Binpack,
    /// The one with the most free units: containers disturb each other least.
    Spread,
}

impl FromStr for Placement {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "binpack" => Ok(Placement::Binpack),
            "spread" => Ok(Placement::Spread),
            _ => Err("a placement is binpack or spread".to_owned()),
        }
    }
}

/// What a container is to get.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Demand {
    /// Units in all.
    pub units: usize,
    /// On how many GPUs, as many of each.
    pub gpus: usize,
    /// Which GPUs are preferred if none are decided on.
    pub placement: Placement,
    /// Units of each GPU that a scheduler has decided on; empty if none has.
    pub decided: ByGpu,
    /// Units of each GPU that are decided on for others, which haven't got them yet.
    pub reserved: ByGpu,
}

/// As many of the `available` ids as are demanded, of healthy GPUs, and with all of `must` among them; `None` if
/// so many GPUs don't have so many, or the units can't be as many of each. What is decided on comes first; if it
/// isn't free any more, what is reserved for others stays theirs. Equal GPUs are taken in the driver's order,
/// units in theirs.
#[must_use]
pub fn preferred(
    gpus: &[SharedGpu],
    available: &[String],
    must: &[String],
    demand: &Demand,
) -> Option<Vec<String>> {
    let Demand { units, gpus: count, placement, decided, reserved } = demand;
    if *count == 0 || !units.is_multiple_of(*count) {
        return None;
    }
    let each = units / count;
    let free = by_gpu(gpus, available);
    let must = by_gpu_all(gpus, must)?;
    let is_decided = decided.len() == *count && decided.values().all(|has| *has as usize == each);
    let as_decided = || {
        let of_decided: ByIndex<'_> =
            free.iter().filter(|(index, _)| decided.contains_key(index)).map(cloned).collect();
        choose(&of_decided, &must, each, *count, *placement)
    };
    let left = || {
        let of_gpu = |(index, ids): (&u32, &BTreeSet<UnitId<'_>>)| {
            let retained = reserved.get(index).map_or(0, |units| *units as usize);
            let needs = must.get(index).map_or(0, BTreeSet::len);
            ids.len() >= retained + each.max(needs)
        };
        let with_capacity_left: ByIndex<'_> =
            free.iter().filter(|(index, ids)| of_gpu((index, ids))).map(cloned).collect();
        choose(&with_capacity_left, &must, each, *count, *placement)
    };
    is_decided.then(as_decided).flatten().or_else(left)
}

fn cloned<'a>((index, ids): (&u32, &BTreeSet<UnitId<'a>>)) -> (u32, BTreeSet<UnitId<'a>>) {
    (*index, ids.clone())
}

/// `each` of these ids of each of `count` GPUs, with all of `must` among them.
fn choose(
    free: &ByIndex<'_>,
    must: &ByIndex<'_>,
    each: usize,
    count: usize,
    placement: Placement,
) -> Option<Vec<String>> {
    let needs = |index: &u32| must.get(index).map_or(0, BTreeSet::len);
    let fits = |(index, ids): &(&u32, &BTreeSet<UnitId<'_>>)| {
        ids.len() >= each
            && needs(index) <= each
            && must.get(*index).is_none_or(|must| must.is_subset(ids))
    };
    let mut fitting: Vec<(&u32, &BTreeSet<UnitId<'_>>)> = free.iter().filter(fits).collect();
    // Stable: equal ones stay in the driver's order.
    fitting.sort_by_key(|(index, ids)| {
        let capacity = match placement {
            Placement::Binpack => ids.len(),
            Placement::Spread => usize::MAX - ids.len(),
        };
        (needs(index) == 0, capacity)
    });
    let mut chosen = fitting.get(..count)?.to_vec();
    if must.keys().any(|index| chosen.iter().all(|(chosen, _)| *chosen != index)) {
        return None;
    }
    chosen.sort_by_key(|(index, _)| **index);
    let ids = chosen.into_iter().flat_map(|(index, ids)| {
        let first: Vec<&UnitId<'_>> = must.get(index).into_iter().flatten().collect();
        let rest: Vec<&UnitId<'_>> = ids.iter().filter(|id| !first.contains(id)).collect();
        first.into_iter().chain(rest).take(each).map(|(_, id)| (*id).to_owned()).collect::<Vec<_>>()
    });
    Some(ids.collect())
}

/// An id with its length before it: ids of one GPU differ in their numbers alone, and come in their order
/// so.
type UnitId<'a> = (usize, &'a str);

/// Ids by the index of their GPU.
type ByIndex<'a> = BTreeMap<u32, BTreeSet<UnitId<'a>>>;

/// The same of ids that all have to be of healthy GPUs; `None` if one isn't.
fn by_gpu_all<'a>(gpus: &[SharedGpu], ids: &'a [String]) -> Option<ByIndex<'a>> {
    let found = by_gpu(gpus, ids);
    let of_known: usize = found.values().map(BTreeSet::len).sum();
    (of_known == ids.iter().collect::<BTreeSet<_>>().len()).then_some(found)
}

/// The ids of healthy GPUs, by the GPU's index.
fn by_gpu<'a>(gpus: &[SharedGpu], ids: &'a [String]) -> ByIndex<'a> {
    let mut found = ByIndex::new();
    for id in ids {
        if let Some(gpu) = gpu_of(gpus, id).filter(|gpu| gpu.healthy) {
            found.entry(gpu.index).or_default().insert((id.len(), id));
        }
    }
    found
}

/// How many of these units are of which GPU, in the driver's order.
///
/// # Errors
///
/// The first id that is of none.
pub fn parts<'a, 'b>(
    gpus: &'a [SharedGpu],
    ids: impl IntoIterator<Item = &'b String>,
) -> Result<Vec<(&'a SharedGpu, u32)>, String> {
    let mut counts: BTreeMap<u32, (&SharedGpu, u32)> = BTreeMap::new();
    for id in ids {
        let gpu = gpu_of(gpus, id).ok_or_else(|| id.clone())?;
        counts.entry(gpu.index).or_insert((gpu, 0)).1 += 1;
    }
    Ok(counts.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::tests::gpu;
    use crate::units::{Unit, shared};
    use proptest::prelude::*;

    fn node() -> Vec<SharedGpu> {
        let gpus = [gpu(0, "aaa", 16 << 30), gpu(1, "bbb", 24 << 30), gpu(2, "ccc", 16 << 30)];
        shared(&gpus, Unit::GiB).unwrap()
    }

    fn demand(units: usize, gpus: usize, placement: Placement) -> Demand {
        Demand { units, gpus, placement, ..Demand::default() }
    }

    /// All units but so many of each GPU.
    fn free(gpus: &[SharedGpu], taken: [usize; 3]) -> Vec<String> {
        gpus.iter().zip(taken).flat_map(|(gpu, taken)| gpu.ids().skip(taken)).collect()
    }

    /// All units are of one GPU: the fullest that has enough under binpack, and the emptiest under
    /// spread.
    #[test]
    fn units_come_from_one_gpu_fullest_or_emptiest() {
        let gpus = node();
        let choose = |taken, size, placement| {
            let demand = demand(size, 1, placement);
            let ids = preferred(&gpus, &free(&gpus, taken), &[], &demand)?;
            assert_eq!(ids.len(), size);
            let parts = parts(&gpus, &ids).unwrap();
            assert_eq!(parts.len(), 1, "{ids:?}");
            Some(parts[0].0.index)
        };
        let (binpack, spread) = (Placement::Binpack, Placement::Spread);
        assert_eq!(choose([0, 0, 0], 4, binpack), Some(0), "of equal ones the first");
        assert_eq!(choose([0, 0, 3], 4, binpack), Some(2));
        assert_eq!(choose([0, 22, 3], 2, binpack), Some(1));
        assert_eq!(choose([0, 0, 0], 4, spread), Some(1));
        assert_eq!(choose([0, 20, 0], 4, spread), Some(0));
        assert_eq!(choose([0, 0, 0], 20, binpack), Some(1));
        // The sum would do, and no GPU has it.
        assert_eq!(choose([8, 14, 8], 12, binpack), None);
    }

    /// Units that must be included are, and a lost GPU gives none.
    #[test]
    fn required_units_are_included_lost_gpus_give_none() {
        let mut gpus = node();
        let available = free(&gpus, [0, 0, 0]);
        let must = ["ccc-5".to_owned()];
        let three = demand(3, 1, Placement::Binpack);
        let ids = preferred(&gpus, &available, &must, &three).unwrap();
        assert_eq!(ids, ["ccc-5", "ccc-0", "ccc-1"]);
        let two = ["ccc-5".to_owned(), "aaa-5".to_owned()];
        assert_eq!(preferred(&gpus, &available, &two, &three), None);
        gpus[1].healthy = false;
        let twenty = demand(20, 1, Placement::Binpack);
        assert_eq!(preferred(&gpus, &available, &[], &twenty), None);
        assert_eq!(
            parts(&gpus, &["aaa-0".to_owned(), "zzz-0".to_owned()]),
            Err("zzz-0".to_owned())
        );
    }

    #[test]
    fn several_gpus_give_as_much_each() {
        let gpus = node();
        let choose = |taken, must: &[&str], size, count| {
            let must: Vec<String> = must.iter().map(|id| (*id).to_owned()).collect();
            preferred(&gpus, &free(&gpus, taken), &must, &demand(size, count, Placement::Binpack))
        };
        let some = |ids: &[&str]| Some(ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>());
        assert_eq!(choose([0, 0, 9], &[], 4, 2), some(&["aaa-0", "aaa-1", "ccc-9", "ccc-a"]));
        assert_eq!(choose([15, 0, 15], &[], 4, 2), None, "two have one unit left");
        assert_eq!(choose([0, 0, 0], &[], 5, 2), None, "no whole units");
        assert_eq!(choose([0, 0, 0], &[], 4, 4), None, "there are three");
        // An init container's are used again.
        let ids = choose([0, 0, 9], &["bbb-3", "aaa-5"], 4, 2);
        assert_eq!(ids, some(&["aaa-5", "aaa-0", "bbb-3", "bbb-0"]));
        assert_eq!(choose([0, 0, 0], &["aaa-1", "aaa-2", "aaa-3"], 4, 2), None);
        assert_eq!(choose([0, 0, 0], &["aaa-1", "bbb-2", "ccc-3"], 4, 2), None);
    }

    /// A scheduler's decision for a pod comes first, and units that it decided for other pods stay
    /// reserved for them.
    #[test]
    fn scheduler_decisions_come_first_and_reserve_for_others() {
        let gpus = node();
        let choose = |taken, units, decided: &[(u32, u32)], reserved: &[(u32, u32)]| {
            let demand = Demand {
                decided: decided.iter().copied().collect(),
                reserved: reserved.iter().copied().collect(),
                ..demand(units, decided.len().max(1), Placement::Binpack)
            };
            let ids = preferred(&gpus, &free(&gpus, taken), &[], &demand)?;
            Some(parts(&gpus, &ids).unwrap().iter().map(|(gpu, _)| gpu.index).collect::<Vec<_>>())
        };
        // Binpack would take another.
        assert_eq!(choose([10, 0, 0], 4, &[(2, 4)], &[]), Some(vec![2]));
        assert_eq!(choose([10, 0, 0], 4, &[(1, 2), (2, 2)], &[]), Some(vec![1, 2]));
        // It is another container's, which got it by mistake; the fullest with enough free units next to what is
        // reserved.
        assert_eq!(choose([14, 20, 0], 4, &[(0, 4)], &[]), Some(vec![1]));
        assert_eq!(choose([14, 20, 0], 4, &[(0, 4)], &[(1, 1)]), Some(vec![2]));
        assert_eq!(choose([14, 20, 0], 4, &[(0, 4)], &[(1, 1), (2, 13)]), None);
        // What is no decision on this, or on no GPU of this node.
        assert_eq!(choose([0, 0, 3], 4, &[(1, 3)], &[]), Some(vec![2]));
        assert_eq!(choose([0, 0, 3], 4, &[(9, 4)], &[]), Some(vec![2]));
        assert_eq!(choose([0, 0, 3], 4, &[], &[(2, 9)]), Some(vec![2]));
        assert_eq!(choose([0, 0, 3], 4, &[], &[(2, 10)]), Some(vec![0]));
    }

    proptest! {
        /// GPUs are chosen if enough of them have the free units, and only then.
        #[test]
        fn gpus_with_enough_free_units_are_found(
            taken in [0_usize..17, 0..25, 0..17],
            each in 1_usize..26,
            count in 1_usize..4,
        ) {
            let (gpus, size) = (node(), each * count);
            let capacity = gpus.iter().zip(taken).map(|(gpu, taken)| gpu.units as usize - taken);
            let fits = capacity.filter(|capacity| *capacity >= each).count() >= count;
            for placement in [Placement::Binpack, Placement::Spread] {
                let demand = demand(size, count, placement);
                let ids = preferred(&gpus, &free(&gpus, taken), &[], &demand);
                prop_assert_eq!(ids.is_some(), fits);
                let Some(ids) = ids else { continue };
                prop_assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), size);
                let parts = parts(&gpus, &ids).unwrap();
                prop_assert_eq!(parts.len(), count);
                prop_assert!(parts.iter().all(|(_, units)| *units as usize == each));
            }
        }
    }
}
