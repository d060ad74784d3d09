//! Ranges of addresses that a file of nvidia-uvm had the driver make, or that are managed memory of a
//! process: what is mapped there is known for what it is.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use crate::monitor::journal::layout::Record;
use crate::monitor::state::space::{MANAGED, OF_FILE, Space};

/// A mapping: its first address, and the first behind it.
pub(crate) type Mapped = (u64, u64);

/// Ranges at most.
pub(crate) const MOST_RANGES: usize = 16384;

/// Ranges that were removed while mappings are looked at; of more, the oldest are forgotten.
const MOST_REMOVED: usize = 4096;

/// Ranges of spaces, and those that were removed lately.
#[derive(Debug, Default)]
pub(crate) struct SpaceRanges {
    /// By [`Space`](crate::monitor::state::space::Space) and first address: bytes.
    all: BTreeMap<(u64, u64), u64>,
    /// Ranges that were removed lately, or announced anew: when, space, first address and bytes.
    removed: VecDeque<(Instant, u64, Mapped)>,
}

impl SpaceRanges {
    /// Takes note of what the journal says of ranges.
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

    /// The records that make them from nothing.
    pub(crate) fn records(&self) -> impl Iterator<Item = Record> {
        self.all.iter().map(|((space, base), length)| Record::AddRange {
            space: *space,
            base: *base,
            length: *length,
        })
    }

    /// Whether a range of the space begins there.
    pub(crate) fn has(&self, space: Space, base: u64) -> bool {
        self.all.contains_key(&(space.number(), base))
    }

    /// Whether a range can be remembered.
    pub(crate) fn has_room_for(&self, space: Space, base: u64, length: u64) -> bool {
        let room = self.all.len() < MOST_RANGES;
        let fits = base & MANAGED == 0 && length > 0;
        fits && (room || self.all.contains_key(&(space.number(), base)))
    }

    /// The range that `base` lies in: its first address and bytes.
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

    /// Nobody asks any more for what was removed before.
    pub(crate) fn forget_removed(&mut self, before: Instant) {
        let first = self.removed.partition_point(|(at, ..)| *at < before);
        self.removed.drain(..first);
    }

    /// Whether a mapping lies in a range, or in several that lie one after the other: the kernel lists
    /// neighbours as one, of files that don't mind.
    pub(crate) fn covers(&self, space: Space, mapped: Mapped) -> bool {
        reaches(mapped, |at| self.end_at(space, at))
    }

    /// Where a range ends that has an address.
    fn end_at(&self, space: Space, at: u64) -> Option<u64> {
        self.range(space, at).map(|(base, length)| base.saturating_add(length))
    }

    /// Whether it does, or did at some time since then: a list of mappings is older than the books.
    pub(crate) fn covered_since(&self, space: Space, mapped: Mapped, since: Instant) -> bool {
        reaches(mapped, |at| {
            let now = self.end_at(space, at);
            now.or_else(|| self.removed_end(at, since, |of| of == space.number()))
        })
    }

    /// Whether it lay in one of whatever space, which was removed since.
    pub(crate) fn covered_by_removed(&self, mapped: Mapped, since: Instant) -> bool {
        reaches(mapped, |at| self.removed_end(at, since, |_| true))
    }

    /// Where a range of such a space ended that had an address, and was removed since then.
    fn removed_end(&self, at: u64, since: Instant, of: impl Fn(u64) -> bool) -> Option<u64> {
        let late = self.removed.iter().rev().take_while(|(when, ..)| *when >= since);
        let had = late.filter(|(_, space, (from, to))| of(*space) && (*from..*to).contains(&at));
        had.map(|(.., (_, to))| *to).max()
    }

    /// The ranges of a space: first addresses and bytes.
    pub(crate) fn of(&self, space: Space) -> Vec<(u64, u64)> {
        let space = space.number();
        let all = self.all.range((space, 0)..=(space, u64::MAX));
        all.map(|((_, base), length)| (*base, *length)).collect()
    }

    /// How many ranges files have.
    pub(crate) fn of_files(&self) -> usize {
        self.all.range((OF_FILE, 0)..(MANAGED, 0)).count()
    }
}

/// Whether one gets from a mapping's beginning to its end by steps of `end_at`.
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
    use crate::ledger::Process;
    use crate::monitor::journal::map::tests::journal;
    use crate::monitor::state::books::tests::open;

    #[test]
    fn neighbours_that_are_listed_as_one_are_covered() {
        let (mut books, _) = open(&journal());
        let space = Space::Managed(Process(1));
        for base in [0x1000, 0x2000, 0x5000] {
            assert!(books.add_range(space, base, 0x1000));
        }
        assert!(
            books.ranges.covers(space, (0x1000, 0x3000))
                && books.ranges.covers(space, (0x1800, 0x2800))
        );
        for no in [(0x1000, 0x3001), (0x800, 0x2000), (0x1000, 0x6000)] {
            assert!(!books.ranges.covers(space, no));
        }
        let since = Instant::now();
        books.remove_range(space, 0x2000);
        assert!(!books.ranges.covers(space, (0x1000, 0x3000)));
        // One was there still when the list began to be read.
        assert!(books.ranges.covered_since(space, (0x1000, 0x3000), since));
        assert!(!books.ranges.covered_since(space, (0x1000, 0x3000), Instant::now()));
        assert!(!books.ranges.covered_since(Space::Managed(Process(2)), (0x2000, 0x3000), since));
        assert!(books.ranges.covered_by_removed((0x2000, 0x3000), since));
        assert!(!books.ranges.covered_by_removed((0x1000, 0x3000), since));
    }
}
