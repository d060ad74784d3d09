//! Decides on what nvidia-uvm maps: memory that the resource manager gave, and managed memory, which nvidia-uvm gives
//! itself.

use std::collections::BTreeSet;

use crate::decide::refusal_reason::RefusalReason;
use crate::snapshot::Record;
use crate::state::{BOUNDS, Space, SpaceRanges};
use cgpu_core::ledger::{ChargeId, Client, Entry, Handle, Hold, Ledger, Span, Tree};

/// Stands in the place of a GPU in a [`Tree`], for what the file alone retains.
pub(crate) const NO_GPU: u16 = u16::MAX;

/// What is entered for a mapping of memory in `span` of several GPUs' trees.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MapPlan {
    /// Before the driver is asked: the new mapping next to the old ones. If the driver fails midway, either may be
    /// mapped.
    pub(crate) before: Vec<Entry>,
    /// If the driver has mapped the memory: the new mapping alone.
    pub(crate) mapped: Vec<Entry>,
    /// If the driver has not: what was there before.
    pub(crate) not_mapped: Vec<Entry>,
}

/// Plans a mapping of memory with this charge; memory without charged bytes has none. The mapping is refused if no more
/// mappings can be known.
pub(crate) fn plan_map(
    ledger: &Ledger,
    trees: &BTreeSet<Tree>,
    span: Span,
    charge: Option<ChargeId>,
) -> Result<MapPlan, RefusalReason> {
    let Some(charge) = charge else {
        let had = trees.iter().copied().filter(|tree| ledger.has_ranges_in(*tree, span));
        let mapped = had.map(|tree| Entry::Unmap { tree, span }).collect();
        return Ok(MapPlan { before: vec![], mapped, not_mapped: vec![] });
    };
    if ledger.size().holds + trees.len() > BOUNDS.holds {
        return Err(RefusalReason::Full("mappings"));
    }
    let all = || trees.iter().copied();
    let new = all().filter(|tree| !ledger.is_mapped(*tree, span.first, charge));
    Ok(MapPlan {
        before: all().map(|tree| Entry::Map { tree, span, charge }).collect(),
        mapped: all().map(|tree| Entry::MapAlone { tree, span, charge }).collect(),
        not_mapped: new.map(|tree| Entry::UnmapRange { tree, first: span.first, charge }).collect(),
    })
}

/// Decides whether an object's memory may be mapped, and returns the charge that the mapping keeps alive. Memory of a
/// GPU that isn't charged in full is refused. `bytes` and `charge` are what the ledger has of the object. `is_larger`
/// asks the driver whether the memory has more bytes than these, and `is_of_gpu` whether it is a GPU's.
pub(crate) fn chargeable_mapping(
    bytes: Option<u64>,
    charge: Option<ChargeId>,
    is_larger: impl FnOnce(u64) -> bool,
    is_of_gpu: impl FnOnce() -> bool,
) -> Result<Option<ChargeId>, RefusalReason> {
    let charged_bytes = bytes.filter(|bytes| *bytes > 0).zip(charge);
    let is_past_monitor = match charged_bytes {
        Some((bytes, _)) => is_larger(bytes),
        None => is_of_gpu(),
    };
    match is_past_monitor {
        true => Err(RefusalReason::PastMonitor("mapped")),
        false => Ok(charged_bytes.map(|(_, charge)| charge)),
    }
}

/// What is entered for managed memory of `bytes` at `base`: the range, and a charge on each of the container's `gpus`
/// GPUs. The memory is refused if it doesn't fit a GPU's quota, or the state has no space for it.
///
/// A hold keeps the memory of an object: each hold gets an object of a client that no process has, which is freed at
/// once. The GPU's number is in the base's lowest bits, which are 0 in a page's address.
pub(crate) fn managed_records(
    ledger: &Ledger,
    ranges: &SpaceRanges,
    (space, base, bytes): (Space, u64, u64),
    gpus: usize,
) -> Result<Vec<Record>, RefusalReason> {
    let full = RefusalReason::Full("managed memory");
    let size = ledger.size();
    if size.holds + gpus > BOUNDS.holds || size.objects >= BOUNDS.objects {
        return Err(full);
    }
    for gpu in 0..gpus {
        match ledger.usage(gpu) {
            None => return Err(full),
            Some(usage) if bytes > usage.free_bytes() => {
                return Err(RefusalReason::OverQuota { gpu, asked_bytes: bytes, usage });
            }
            Some(_) => {}
        }
    }
    if !ranges.has_capacity_for(space, base, bytes) {
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
    let range = Record::AddRange { space: space.number(), base, length: bytes };
    Ok(std::iter::once(range).chain(entries.map(Record::Ledger)).collect())
}

/// The mappings that end when the driver frees the range of a file that began at `base`. `pieces` are the file's mapped
/// ranges that end behind `base`. `length` is in bytes; `None` if it isn't known, and then `is_in_range` says whether
/// an address lies in a range still.
pub(crate) fn freed_spans(
    file: u32,
    pieces: &[(Tree, Span)],
    (base, length): (u64, Option<u64>),
    is_in_range: impl Fn(u64) -> Option<bool>,
) -> Vec<(Tree, Span)> {
    let own = Tree { file, gpu: NO_GPU };
    let of_range = pieces.iter().find(|(tree, span)| *tree == own && span.first == base);
    if let Some(of_range) = of_range {
        return vec![*of_range];
    }
    let on_gpus = || pieces.iter().filter(|(tree, _)| tree.gpu != NO_GPU);
    // The driver frees no range of another length.
    let known = length.map(|length| Span::of(base, length));
    let spans = || on_gpus().map(|(_, span)| *span).filter(|span| span.first >= base).collect();
    let Some(ended) = known.unwrap_or_else(|| ended_from(base, spans(), is_in_range)) else {
        return Vec::new();
    };
    let trees: BTreeSet<Tree> = on_gpus().map(|(tree, _)| *tree).collect();
    trees.into_iter().map(|tree| (tree, ended)).collect()
}

/// The addresses of a freed range that began at `base`, as far as mapped ranges of `spans` are in it. The first mapped
/// range that is still in a range lies behind the freed range.
fn ended_from(
    base: u64,
    mut spans: Vec<Span>,
    is_in_range: impl Fn(u64) -> Option<bool>,
) -> Option<Span> {
    spans.sort_unstable_by_key(|span| (span.first, span.last));
    let mut last: Option<u64> = None;
    let mut probed = None;
    for span in spans {
        // A mapped range may go beyond its range if the driver refused that mapping.
        if probed != Some(span.first) && is_in_range(span.first)? {
            last = last.map(|last| last.min(span.first - 1));
            break;
        }
        probed = Some(span.first);
        last = last.max(Some(span.last));
    }
    last.map(|last| Span { first: base, last })
}

/// Decides on a file that is to get a GPU, and that wasn't initialized for one process. `is_shared`: whether its flags
/// are those for several processes without HMM; `false` if the driver didn't say. No list shows managed memory of such
/// a process once it has exited. So the file gets a GPU only if managed memory is refused.
pub(crate) fn uvm_flags(is_shared: bool, refuses_managed: bool) -> Result<(), RefusalReason> {
    match (is_shared, refuses_managed) {
        (true, true) => Ok(()),
        (true, false) => Err(RefusalReason::UvmShared),
        (false, _) => Err(RefusalReason::UvmWithHmm),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::MOST_RANGES;
    use cgpu_core::ledger::Process;

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

    /// Memory is retained by its mapping, and by no mapping that the driver refused.
    #[test]
    fn memory_is_retained_by_successful_mappings_only() {
        for is_mapped in [true, false] {
            let (mut ledger, charge) = ledger();
            let plan = plan_map(&ledger, &trees(), SPAN, Some(charge)).unwrap();
            enter(&mut ledger, &plan.before);
            enter(&mut ledger, if is_mapped { &plan.mapped } else { &plan.not_mapped });
            ledger.free(OF, Handle(10));
            assert_eq!(used(&ledger), [if is_mapped { 4 } else { 0 }, 0]);
        }
    }

    /// Memory that was mapped stays mapped if the driver refuses to map it again.
    #[test]
    fn failed_remapping_leaves_memory_mapped() {
        let (mut ledger, charge) = ledger();
        let first = plan_map(&ledger, &trees(), SPAN, Some(charge)).unwrap();
        enter(&mut ledger, &[first.before, first.mapped].concat());
        let again = plan_map(&ledger, &trees(), SPAN, Some(charge)).unwrap();
        enter(&mut ledger, &[again.before, again.not_mapped].concat());
        assert!(trees().into_iter().all(|tree| ledger.is_mapped(tree, SPAN.first, charge)));
        // Memory of the host takes its place.
        let host = plan_map(&ledger, &trees(), SPAN, None).unwrap();
        enter(&mut ledger, &[host.before, host.mapped].concat());
        ledger.free(OF, Handle(10));
        assert_eq!(used(&ledger), [0, 0]);
    }

    /// Of a GPU's memory, only what is charged in full is mapped.
    #[test]
    fn only_fully_charged_memory_is_mapped() {
        let charge = Some(ChargeId(3));
        let decide = |bytes, charge, is_larger, is_of_gpu| {
            chargeable_mapping(bytes, charge, |_| is_larger, || is_of_gpu)
        };
        let past = Err(RefusalReason::PastMonitor("mapped"));
        assert_eq!(decide(Some(4), charge, false, true), Ok(charge));
        assert_eq!(decide(Some(4), charge, true, true), past);
        for (bytes, charge) in [(None, None), (Some(0), charge), (Some(4), None)] {
            assert_eq!(decide(bytes, charge, true, false), Ok(None), "the host's");
            assert_eq!(decide(bytes, charge, false, true), past);
        }
    }

    #[test]
    fn managed_memory_charges_every_gpu_or_none() {
        let (mut ledger, _) = ledger();
        let ranges = SpaceRanges::default();
        let space = Space::Managed(Process(8));
        let over = managed_records(&ledger, &ranges, (space, 0x1000, 8192), 2);
        assert!(matches!(over, Err(RefusalReason::OverQuota { gpu: 1, asked_bytes: 8192, .. })));
        let records = managed_records(&ledger, &ranges, (space, 0x1000, 4096), 2).unwrap();
        let (range, entries) = records.split_first().unwrap();
        let length = 4096;
        let wanted = Record::AddRange { space: space.number(), base: 0x1000, length };
        assert_eq!(*range, wanted);
        for record in entries {
            let Record::Ledger(entry) = *record else { panic!("{record:?}") };
            ledger.replay(entry);
        }
        assert_eq!(used(&ledger), [4100, 4096]);
        ledger.release_space(space.number());
        assert_eq!(used(&ledger), [4, 0]);
    }

    /// No mapping is made that the state has no space for: GPUs, ranges, holds and objects are
    /// bounded.
    #[test]
    fn mapping_beyond_the_state_bounds_is_refused() {
        let (mut ledger, charge) = ledger();
        let mut ranges = SpaceRanges::default();
        let (space, full) =
            (Space::Managed(Process(8)), Err(RefusalReason::Full("managed memory")));
        let ask = |ledger: &Ledger, ranges: &SpaceRanges, gpus| {
            managed_records(ledger, ranges, (space, 0x1000, 1), gpus).map(|records| records.len())
        };
        assert_eq!(ask(&ledger, &ranges, 2), Ok(7));
        assert_eq!(ask(&ledger, &ranges, 3), full, "the container has two GPUs");
        for number in 0..MOST_RANGES as u64 {
            let range = Record::AddRange { space: 1, base: number, length: 1 };
            ranges.replay(range);
        }
        assert_eq!(ask(&ledger, &ranges, 2), full, "no space for the range");
        let ranges = SpaceRanges::default();
        for base in 0..BOUNDS.holds as u64 - 1 {
            ledger.hold(Hold::Mapping { space: 1, base }, OF, Handle(10));
        }
        assert_eq!(ask(&ledger, &ranges, 1), Ok(4));
        assert_eq!(ask(&ledger, &ranges, 2), full, "no space for two holds");
        let plan = plan_map(&ledger, &trees(), SPAN, Some(charge));
        assert_eq!(plan, Err(RefusalReason::Full("mappings")));
        for handle in 0..u32::try_from(BOUNDS.objects).unwrap() {
            ledger.note(OF, Handle(2), Handle(100 + handle));
        }
        assert_eq!(ask(&ledger, &ranges, 1), full, "no space for an object");
    }

    #[test]
    fn mappings_end_with_their_range() {
        let span = |first, last| Span { first, last };
        let [one, other] = [0, 1].map(|gpu| Tree { file: 5, gpu });
        let pieces = [(one, span(10, 19)), (other, span(20, 29)), (one, span(40, 49))];
        let freed = |length, ranges: &[u64]| {
            freed_spans(5, &pieces, (10, length), |at| Some(ranges.contains(&at)))
        };
        assert_eq!(freed(Some(15), &[]), [(one, span(10, 24)), (other, span(10, 24))]);
        // Of unknown length: to the mapped range that is in a range still.
        assert_eq!(freed(None, &[40]), [(one, span(10, 29)), (other, span(10, 29))]);
        assert_eq!(freed(None, &[20, 40]), [(one, span(10, 19)), (other, span(10, 19))]);
        assert_eq!(freed(None, &[]), [(one, span(10, 49)), (other, span(10, 49))]);
        assert_eq!(freed(None, &[10]), [], "it is there");
        let unknown = freed_spans(5, &pieces, (10, None), |_| None);
        assert_eq!(unknown, [], "the driver doesn't tell");
        let own = (Tree { file: 5, gpu: NO_GPU }, span(10, 29));
        let pieces = [own, (one, span(10, 19))];
        assert_eq!(freed_spans(5, &pieces, (10, Some(9)), |_| None), [own], "it has its own");
    }

    /// A UVM file with HMM gets no GPU, and one for several processes gets one only if managed
    /// memory is refused.
    #[test]
    fn uvm_file_gets_a_gpu_only_without_hmm() {
        for refuses_managed in [true, false] {
            assert_eq!(uvm_flags(false, refuses_managed), Err(RefusalReason::UvmWithHmm));
        }
        assert_eq!(uvm_flags(true, true), Ok(()));
        assert_eq!(uvm_flags(true, false), Err(RefusalReason::UvmShared));
    }
}
