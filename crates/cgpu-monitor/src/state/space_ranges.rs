//! Address ranges that the driver made for a file of nvidia-uvm, or that are managed memory of a process, and whose
//! they are ([`Space`]). They tell what a mapping at an address is.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use crate::snapshot::Record;
use cgpu_core::ledger::Process;

/// These bits distinguish a process's managed ranges from the ranges of UVM's files. No process's number and no range's
/// address has them.
const MANAGED: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 62;

/// The owner of address ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    /// A process that mapped managed memory.
    Managed(Process),
    /// The id of a retained UVM file, through which the driver made the ranges. What this file maps there is no managed
    /// memory.
    File(u32),
}

impl Space {
    /// The space's number in records, and in [`Hold::Mapping`](cgpu_core::ledger::Hold::Mapping).
    pub(crate) fn number(self) -> u64 {
        match self {
            Self::Managed(process) => process.0 | MANAGED,
            Self::File(number) => u64::from(number) | OF_FILE,
        }
    }
}

/// A mapping: its first address, and the first address behind it.
pub(crate) type Mapped = (u64, u64);

/// The most ranges.
pub(crate) const MOST_RANGES: usize = 16384;

/// The most removed ranges that are remembered while mappings are checked. The oldest ones are forgotten first.
const MOST_REMOVED: usize = 4096;

/// The ranges of all spaces, and the ranges that were removed lately.
#[derive(Debug, Default)]
pub(crate) struct SpaceRanges {
    /// The length in bytes by [`Space::number`] and first address.
    all: BTreeMap<(u64, u64), u64>,
    /// Ranges that were removed or replaced lately: time, space, first address and first address behind.
    removed: VecDeque<(Instant, u64, Mapped)>,
}

impl SpaceRanges {
    /// Applies a record.
    pub(crate) fn replay(&mut self, record: Record) {
        match record {
            Record::AddRange { space, base, length } => {
                let before = self.all.insert((space, base), length);
                self.note_removed(space, base, before);
            }
            Record::RemoveRange { space, base } => {
                let before = self.all.remove(&(space, base));
                self.note_removed(space, base, before);
            }
            _ => {}
        }
    }

    /// The records that make these ranges from nothing.
    pub(crate) fn records(&self) -> impl Iterator<Item = Record> {
        self.all.iter().map(|((space, base), length)| Record::AddRange {
            space: *space,
            base: *base,
            length: *length,
        })
    }

    /// Whether a range of the space begins at `base`.
    pub(crate) fn has(&self, space: Space, base: u64) -> bool {
        self.all.contains_key(&(space.number(), base))
    }

    /// Whether the range can be remembered.
    pub(crate) fn has_capacity_for(&self, space: Space, base: u64, length: u64) -> bool {
        let capacity = self.all.len() < MOST_RANGES;
        let fits = base & MANAGED == 0 && length > 0;
        fits && (capacity || self.all.contains_key(&(space.number(), base)))
    }

    /// First address and length in bytes of the range that `base` lies in.
    pub(crate) fn range(&self, space: Space, base: u64) -> Option<(u64, u64)> {
        let space = space.number();
        let (key, length) = self.all.range((space, 0)..=(space, base)).next_back()?;
        (base - key.1 < *length).then_some((key.1, *length))
    }

    fn note_removed(&mut self, space: u64, base: u64, length: Option<u64>) {
        let Some(length) = length else { return };
        while self.removed.len() >= MOST_REMOVED {
            self.removed.pop_front();
        }
        self.removed.push_back((Instant::now(), space, (base, base.saturating_add(length))));
    }

    /// Forgets ranges that were removed before this time.
    pub(crate) fn forget_removed(&mut self, before: Instant) {
        let first = self.removed.partition_point(|(at, ..)| *at < before);
        self.removed.drain(..first);
    }

    /// Whether a mapping lies in a range, or in several adjacent ones: the kernel lists adjacent mappings of some files
    /// as one.
    pub(crate) fn covers(&self, space: Space, mapped: Mapped) -> bool {
        reaches(mapped, |at| self.end_at(space, at))
    }

    /// The end of the range that has the address `at`.
    fn end_at(&self, space: Space, at: u64) -> Option<u64> {
        self.range(space, at).map(|(base, length)| base.saturating_add(length))
    }

    /// Whether a mapping lies in ranges of the space, or did at some time after `since`: a list of mappings is older
    /// than the state.
    pub(crate) fn covered_since(&self, space: Space, mapped: Mapped, since: Instant) -> bool {
        reaches(mapped, |at| {
            let now = self.end_at(space, at);
            now.or_else(|| self.removed_end(at, since, |of| of == space.number()))
        })
    }

    /// Whether a mapping lay in ranges of any spaces that were removed after `since`.
    pub(crate) fn covered_by_removed(&self, mapped: Mapped, since: Instant) -> bool {
        reaches(mapped, |at| self.removed_end(at, since, |_| true))
    }

    /// The end of a range that had the address `at`, was in a space that fits `of`, and was removed after `since`.
    fn removed_end(&self, at: u64, since: Instant, of: impl Fn(u64) -> bool) -> Option<u64> {
        let late = self.removed.iter().rev().take_while(|(when, ..)| *when >= since);
        let had = late.filter(|(_, space, (from, to))| of(*space) && (*from..*to).contains(&at));
        had.map(|(.., (_, to))| *to).max()
    }

    /// First address and length in bytes of all ranges of a space.
    pub(crate) fn of(&self, space: Space) -> Vec<(u64, u64)> {
        let space = space.number();
        let all = self.all.range((space, 0)..=(space, u64::MAX));
        all.map(|((_, base), length)| (*base, *length)).collect()
    }

    /// How many ranges the UVM files have.
    pub(crate) fn of_files(&self) -> usize {
        self.all.range((OF_FILE, 0)..(MANAGED, 0)).count()
    }
}

/// Whether steps of `end_at` lead from a mapping's beginning to its end.
fn reaches((from, to): Mapped, end_at: impl Fn(u64) -> Option<u64>) -> bool {
    let mut at = from;
    while at < to {
        match end_at(at).filter(|end| *end > at) {
            Some(end) => at = end,
            None => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::container_state::tests::state_of;

    #[test]
    fn neighbours_that_are_listed_as_one_are_covered() {
        let mut state = state_of(vec![]);
        let space = Space::Managed(Process(1));
        for base in [0x1000, 0x2000, 0x5000] {
            assert!(state.add_range(space, base, 0x1000));
        }
        assert!(
            state.ranges.covers(space, (0x1000, 0x3000))
                && state.ranges.covers(space, (0x1800, 0x2800))
        );
        for no in [(0x1000, 0x3001), (0x800, 0x2000), (0x1000, 0x6000)] {
            assert!(!state.ranges.covers(space, no));
        }
        let since = Instant::now();
        state.remove_range(space, 0x2000);
        assert!(!state.ranges.covers(space, (0x1000, 0x3000)));
        // The removed range existed when the list began to be read.
        assert!(state.ranges.covered_since(space, (0x1000, 0x3000), since));
        assert!(!state.ranges.covered_since(space, (0x1000, 0x3000), Instant::now()));
        assert!(!state.ranges.covered_since(Space::Managed(Process(2)), (0x2000, 0x3000), since));
        assert!(state.ranges.covered_by_removed((0x2000, 0x3000), since));
        assert!(!state.ranges.covered_by_removed((0x1000, 0x3000), since));
    }
}
