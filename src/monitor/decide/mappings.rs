//! Decides on what nvidia-uvm maps: memory that the resource manager gave, and managed memory, which it gives itself.

use std::collections::BTreeSet;

use crate::ledger::{ChargeId, Client, Entry, Handle, Hold, Ledger, Span, Tree};
use crate::monitor::decide::denial::Denial;
use crate::monitor::state::{BOUNDS, Space, SpaceRanges};

/// What is entered for a mapping of memory in `span` of several GPUs' trees.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MapPlan {
    /// Before the driver is asked: the new mapping beside the old ones. Where the driver fails midway, or this worker
    /// ends, either may be mapped.
    pub(crate) before: Vec<Entry>,
    /// Where the driver has mapped the memory: the new mapping alone.
    pub(crate) mapped: Vec<Entry>,
    /// Where the driver has not: what was there before.
    pub(crate) not_mapped: Vec<Entry>,
}

/// Plans a mapping of memory with this charge; memory without charged bytes has none.
///
/// # Errors
///
/// Where no more mappings can be known.
pub(crate) fn plan_map(
    ledger: &Ledger,
    trees: &BTreeSet<Tree>,
    span: Span,
    charge: Option<ChargeId>,
) -> Result<MapPlan, Denial> {
    let Some(charge) = charge else {
        let had = trees.iter().copied().filter(|tree| ledger.has_pieces_in(*tree, span));
        let mapped = had.map(|tree| Entry::Unmap { tree, span }).collect();
        return Ok(MapPlan { before: vec![], mapped, not_mapped: vec![] });
    };
    if ledger.size().holds + trees.len() > BOUNDS.holds {
        return Err(Denial::Full("mappings"));
    }
    let all = || trees.iter().copied();
    let new = all().filter(|tree| !ledger.is_mapped(*tree, span.first, charge));
    Ok(MapPlan {
        before: all().map(|tree| Entry::Map { tree, span, charge }).collect(),
        mapped: all().map(|tree| Entry::MapAlone { tree, span, charge }).collect(),
        not_mapped: new.map(|tree| Entry::UnmapPiece { tree, first: span.first, charge }).collect(),
    })
}

/// Decides whether memory may be mapped that counts `bytes`, where it is known and has this charge. Returns the charge
/// that the mapping keeps alive.
///
/// # Errors
///
/// Where the memory is a GPU's and not charged in full: as the driver says, it is larger (`is_larger`) than what is
/// charged, or is a GPU's (`is_of_gpu`) though nothing is charged for it.
pub(crate) fn mapped_memory(
    bytes: Option<u64>,
    charge: Option<ChargeId>,
    is_larger: impl FnOnce(u64) -> bool,
    is_of_gpu: impl FnOnce() -> bool,
) -> Result<Option<ChargeId>, Denial> {
    let charged_bytes = bytes.filter(|bytes| *bytes > 0).zip(charge);
    let is_past_monitor = match charged_bytes {
        Some((bytes, _)) => is_larger(bytes),
        None => is_of_gpu(),
    };
    match is_past_monitor {
        true => Err(Denial::PastMonitor("mapped")),
        false => Ok(charged_bytes.map(|(_, charge)| charge)),
    }
}

/// What is entered for managed memory of `bytes` at `base`, charged on each of the container's `gpus` GPUs.
///
/// A hold keeps the memory of an object: each hold gets an object of a client that nobody has, which is freed at once.
/// The GPU's number is in the base's lowest bits, which are 0 in a page's address.
///
/// # Errors
///
/// Where a GPU's quota has no room, or the books have none.
pub(crate) fn managed_entries(
    ledger: &Ledger,
    ranges: &SpaceRanges,
    (space, base, bytes): (Space, u64, u64),
    gpus: usize,
) -> Result<Vec<Entry>, Denial> {
    let full = Denial::Full("managed memory");
    let size = ledger.size();
    if size.holds + gpus > BOUNDS.holds || size.objects >= BOUNDS.objects {
        return Err(full);
    }
    for gpu in 0..gpus {
        match ledger.usage(gpu) {
            None => return Err(full),
            Some(usage) if bytes > usage.free_bytes() => {
                return Err(Denial::OverQuota { gpu, asked_bytes: bytes, usage });
            }
            Some(_) => {}
        }
    }
    if !ranges.has_room_for(space, base, bytes) {
        return Err(full);
    }
    let (client, parent, handle) = (Client(u32::MAX), Handle(u32::MAX), Handle(0));
    let entries = (0..gpus).flat_map(|gpu| {
        let hold = Hold::Mapping { space: space.number(), base: base | gpu as u64 };
        [
            Entry::Commit { gpu, bytes, client, parent, handle },
            Entry::Hold { hold, client, handle },
            Entry::Free { client, handle },
        ]
    });
    Ok(entries.collect())
}

/// Decides on a file that is to get a GPU and isn't for one process. `is_shared`: whether it was initialized for
/// several processes, without HMM. Then managed memory of a process that has ended is in no list, so managed memory has
/// to be refused anyway.
///
/// # Errors
///
/// Where the file has other flags, or is for several processes although managed memory is charged.
pub(crate) fn uvm_flags(is_shared: bool, refuses_managed: bool) -> Result<(), Denial> {
    match (is_shared, refuses_managed) {
        (true, true) => Ok(()),
        (true, false) => Err(Denial::UvmShared),
        (false, _) => Err(Denial::UvmWithHmm),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Process;

    const SPAN: Span = Span { first: 0x1000, last: 0x1fff };
    const OF: Client = Client(1);

    fn trees() -> BTreeSet<Tree> {
        [0, 1].map(|gpu| Tree { file: 5, gpu }).into()
    }

    /// A ledger of two GPUs with memory of 4 bytes as object 10, and the charge of this memory.
    fn ledger() -> (Ledger, ChargeId) {
        let mut ledger = Ledger::new(&[9000, 8000], BOUNDS);
        let (parent, handle) = (Handle(2), Handle(10));
        ledger.replay(Entry::Commit { gpu: 0, bytes: 4, client: OF, parent, handle });
        let charge = ledger.charge_of(OF, handle).unwrap();
        (ledger, charge)
    }

    fn enter(ledger: &mut Ledger, entries: &[Entry]) {
        entries.iter().for_each(|entry| ledger.replay(*entry));
    }

    fn used(ledger: &Ledger) -> [u64; 2] {
        [0, 1].map(|gpu| ledger.usage(gpu).unwrap().used_bytes)
    }

    #[test]
    fn memory_is_kept_by_its_mapping_and_by_none_that_the_driver_refused() {
        for is_mapped in [true, false] {
            let (mut ledger, charge) = ledger();
            let plan = plan_map(&ledger, &trees(), SPAN, Some(charge)).unwrap();
            enter(&mut ledger, &plan.before);
            enter(&mut ledger, if is_mapped { &plan.mapped } else { &plan.not_mapped });
            ledger.free(OF, Handle(10));
            assert_eq!(used(&ledger), [if is_mapped { 4 } else { 0 }, 0]);
        }
    }

    #[test]
    fn memory_that_was_mapped_stays_mapped_where_the_driver_refuses_it_again() {
        let (mut ledger, charge) = ledger();
        let first = plan_map(&ledger, &trees(), SPAN, Some(charge)).unwrap();
        enter(&mut ledger, &[first.before, first.mapped].concat());
        let again = plan_map(&ledger, &trees(), SPAN, Some(charge)).unwrap();
        assert_eq!(again.not_mapped, []);
        // Memory of the host takes its place.
        let host = plan_map(&ledger, &trees(), SPAN, None).unwrap();
        enter(&mut ledger, &[host.before, host.mapped].concat());
        ledger.free(OF, Handle(10));
        assert_eq!(used(&ledger), [0, 0]);
    }

    #[test]
    fn only_memory_that_is_charged_in_full_is_mapped() {
        let charge = Some(ChargeId(3));
        let decide = |bytes, charge, is_larger, is_of_gpu| {
            mapped_memory(bytes, charge, |_| is_larger, || is_of_gpu)
        };
        let past = Err(Denial::PastMonitor("mapped"));
        assert_eq!(decide(Some(4), charge, false, true), Ok(charge));
        assert_eq!(decide(Some(4), charge, true, true), past);
        for (bytes, charge) in [(None, None), (Some(0), charge), (Some(4), None)] {
            assert_eq!(decide(bytes, charge, true, false), Ok(None), "the host's");
            assert_eq!(decide(bytes, charge, false, true), past);
        }
    }

    #[test]
    fn managed_memory_is_charged_on_each_gpu_or_on_none() {
        let (mut ledger, _) = ledger();
        let ranges = SpaceRanges::default();
        let space = Space::Managed(Process(8));
        let over = managed_entries(&ledger, &ranges, (space, 0x1000, 8192), 2);
        assert!(matches!(over, Err(Denial::OverQuota { gpu: 1, asked_bytes: 8192, .. })));
        let entries = managed_entries(&ledger, &ranges, (space, 0x1000, 4096), 2).unwrap();
        enter(&mut ledger, &entries);
        assert_eq!(used(&ledger), [4100, 4096]);
        ledger.release_space(space.number());
        assert_eq!(used(&ledger), [4, 0]);
        let nowhere = managed_entries(&ledger, &ranges, (space, 0x1000, 0), 2);
        assert_eq!(nowhere, Err(Denial::Full("managed memory")));
        let no_gpu = managed_entries(&ledger, &ranges, (space, 0x1000, 1), 3);
        assert_eq!(no_gpu, Err(Denial::Full("managed memory")));
    }

    #[test]
    fn a_file_with_hmm_gets_no_gpu_and_one_for_several_processes_without_managed_memory_alone() {
        for refuses_managed in [true, false] {
            assert_eq!(uvm_flags(false, refuses_managed), Err(Denial::UvmWithHmm));
        }
        assert_eq!(uvm_flags(true, true), Ok(()));
        assert_eq!(uvm_flags(true, false), Err(Denial::UvmShared));
    }
}
