//! Managed memory is charged as long as somebody has it mapped.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use crate::ledger::{Entry, Hold, Process};
use crate::monitor::audit::mappings::{Mappings, overlap};
use crate::monitor::state::space::Space;
use crate::monitor::state::space_ranges::Mapped;
use crate::monitor::uvm::address_spaces::ON_ITS_WAY;
use crate::monitor::uvm::files::UvmFile;
use crate::monitor::uvm::ranges::{PAGE_BYTES, Ranges};

impl Mappings {
    /// Managed ranges that are mapped no more are charged no more.
    pub(crate) fn release_unmapped(&self) {
        let processes: Vec<Process> = self.state.books().processes.iter().copied().collect();
        for process in processes {
            let ranges = self.state.books().ranges.of(Space::Managed(process));
            self.release_if_unmapped(process, &ranges);
        }
        self.spaces.charged.lock().retain(|_, at| at.elapsed() < 2 * ON_ITS_WAY);
    }

    /// Releases managed ranges of a process that nobody has mapped, some time after they were asked
    /// for.
    fn release_if_unmapped(&self, process: Process, of: &[(u64, u64)]) {
        for (base, length) in of.iter().copied() {
            let at = self.spaces.asked_for_at(process, base);
            let is_on_its_way = at.is_some_and(|at| at.elapsed() < ON_ITS_WAY);
            if is_on_its_way || self.is_somewhere(process, (base, length)) {
                continue;
            }
            // Of a program that is no more the kernel lists nothing, and its files may not have ended.
            if self.uvm.has_orphans(process) {
                return;
            }
            let mut books = self.state.books();
            // It may have been asked for again meanwhile.
            if self.spaces.asked_for_at(process, base) != at {
                continue;
            }
            let space = Space::Managed(process);
            for (at, _) in books.ledger.mappings(space.number(), base, PAGE_BYTES) {
                books.enter(Entry::Release {
                    hold: Hold::Mapping { space: space.number(), base: at },
                });
            }
            books.remove_range(space, base);
        }
    }

    /// Releases managed ranges of a process that overlap that one, which it has asked for already, as far as
    /// they are mapped no more. Whether none is left.
    pub(crate) fn release_overlapping(&self, process: Process, (base, length): (u64, u64)) -> bool {
        let wanted = (base, base.saturating_add(length));
        let overlapping = || {
            let mut ranges = self.state.books().ranges.of(Space::Managed(process));
            ranges.retain(|(at, bytes)| overlap(wanted, (*at, at.saturating_add(*bytes))));
            ranges
        };
        let others = overlapping();
        // What it had there it maps no more, or it wouldn't be asked for again.
        for (at, _) in &others {
            self.spaces.charged.lock().remove(&(process, *at));
        }
        self.release_if_unmapped(process, &others);
        others.is_empty() || overlapping().is_empty()
    }

    /// Whether a process's managed range is mapped, by it or by others who share its memory or had it
    /// from it; as far as their last look tells where they aren't its own.
    fn is_somewhere(&self, process: Process, (base, length): (u64, u64)) -> bool {
        let range = (base, base.saturating_add(length));
        let others = self.spaces.all().into_iter().filter(|of| of.process != process);
        self.has_mapped(process, range)
            || others.into_iter().any(|memory| {
                let now = || self.mapped_in(memory.process, &memory.text().unwrap_or_default());
                let mut last = memory.last().unwrap_or_else(now);
                last.retain(|mapped| overlap(*mapped, range));
                let uncharged = self.uncharged(memory.process, &last, Instant::now());
                uncharged.iter().any(|mapped| self.may_be_managed(*mapped))
            })
    }

    /// Whether a mapping is of no file's range, or a file has managed memory there all the same.
    fn may_be_managed(&self, mapped: Mapped) -> bool {
        let files = self.uvm.files.all();
        let is_of_file = {
            let books = self.state.books();
            files.iter().any(|file| books.ranges.covers(Space::File(file.number), mapped))
        };
        let is_managed = |file: &Arc<UvmFile>| {
            Ranges::of(&self.state.release, &file.device).is_managed(mapped.0)
        };
        !is_of_file || files.iter().any(is_managed)
    }

    /// Of processes that are gone, those whose managed memory others have.
    pub(crate) fn outlived(&self, dead: &[Process]) -> BTreeSet<Process> {
        let ranges_of = |process: &Process| self.state.books().ranges.of(Space::Managed(*process));
        let with_ranges: Vec<Process> =
            dead.iter().filter(|of| !ranges_of(of).is_empty()).copied().collect();
        if with_ranges.is_empty() {
            return BTreeSet::new();
        }
        // Its own list the kernel may not show any more.
        self.look_for_heirs();
        let outlived = |process: &Process| {
            ranges_of(process).into_iter().any(|range| self.is_somewhere(*process, range))
        };
        with_ranges.into_iter().filter(outlived).collect()
    }
}
