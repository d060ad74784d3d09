//! Which units a container gets: those of one GPU. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use crate::units::{SharedGpu, gpu_of};

/// Which GPU is preferred of those that have room.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Placement {
    /// The one with the least room: others stay free for larger containers.
    #[default]
    Binpack,
    /// The one with the most room: containers disturb each other least.
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

/// `size` of the `available` ids, all of one healthy GPU and with all of `must` among them; `None`
/// where no GPU has so many. Equal GPUs are taken in the driver's order, units in theirs.
#[must_use]
pub fn preferred(
    gpus: &[SharedGpu],
    available: &[String],
    must: &[String],
    size: usize,
    placement: Placement,
) -> Option<Vec<String>> {
    let mut free: BTreeMap<u32, Vec<&String>> = BTreeMap::new();
    for id in available {
        if let Some(gpu) = gpu_of(gpus, id).filter(|gpu| gpu.healthy) {
            free.entry(gpu.index).or_default().push(id);
        }
    }
    let wanted: BTreeSet<&String> = must.iter().collect();
    let fits = |ids: &&Vec<&String>| {
        let has = |id: &&String| ids.contains(id);
        ids.len() >= size && wanted.len() <= size && wanted.iter().all(has)
    };
    let fitting = free.values().filter(fits);
    let chosen = match placement {
        Placement::Binpack => fitting.min_by_key(|ids| ids.len()),
        // The last of equal ones, else.
        Placement::Spread => fitting.rev().max_by_key(|ids| ids.len()),
    }?;
    let mut rest: Vec<&String> = chosen.iter().copied().filter(|id| !wanted.contains(id)).collect();
    // Ids of one GPU differ in their numbers alone.
    rest.sort_by_key(|id| (id.len(), *id));
    Some(wanted.into_iter().chain(rest).take(size).cloned().collect())
}

/// How many of these units are of which GPU, in the driver's order.
///
/// # Errors
///
/// The first id that is of none.
pub fn parts<'a>(
    gpus: &'a [SharedGpu],
    ids: &[String],
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

    /// All units but so many of each GPU.
    fn free(gpus: &[SharedGpu], taken: [usize; 3]) -> Vec<String> {
        gpus.iter().zip(taken).flat_map(|(gpu, taken)| gpu.ids().skip(taken)).collect()
    }

    #[test]
    fn all_units_are_of_one_gpu_the_fullest_or_the_emptiest() {
        let gpus = node();
        let choose = |taken, size, placement| {
            let ids = preferred(&gpus, &free(&gpus, taken), &[], size, placement)?;
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

    #[test]
    fn what_must_be_among_them_is_and_a_lost_gpu_gives_nothing() {
        let mut gpus = node();
        let available = free(&gpus, [0, 0, 0]);
        let must = ["ccc-5".to_owned()];
        let ids = preferred(&gpus, &available, &must, 3, Placement::Binpack).unwrap();
        assert_eq!(ids, ["ccc-5", "ccc-0", "ccc-1"]);
        let two = ["ccc-5".to_owned(), "aaa-5".to_owned()];
        assert_eq!(preferred(&gpus, &available, &two, 3, Placement::Binpack), None);
        gpus[1].healthy = false;
        assert_eq!(preferred(&gpus, &available, &[], 20, Placement::Binpack), None);
        assert_eq!(parts(&gpus, &["aaa-0".into(), "zzz-0".into()]), Err("zzz-0".to_owned()));
    }

    proptest! {
        #[test]
        fn whoever_has_room_is_found(taken in [0_usize..17, 0..25, 0..17], size in 1_usize..26) {
            let gpus = node();
            let room = gpus.iter().zip(taken).map(|(gpu, taken)| gpu.units as usize - taken);
            let fits = room.filter(|room| *room >= size).count() > 0;
            for placement in [Placement::Binpack, Placement::Spread] {
                let ids = preferred(&gpus, &free(&gpus, taken), &[], size, placement);
                prop_assert_eq!(ids.is_some(), fits);
                let Some(ids) = ids else { continue };
                prop_assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), size);
                prop_assert_eq!(parts(&gpus, &ids).unwrap().len(), 1);
            }
        }
    }
}
