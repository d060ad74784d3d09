//! Releases the charges of managed memory that no process has mapped any more.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use crate::ledger::{Entry, Hold, Process};
use crate::monitor::audit::mapped_memory::{MappedMemory, overlap};
use crate::monitor::state::{ContainerState, Mapped, Space};
use crate::monitor::uvm::{MAPPING_DELAY, PAGE_BYTES, Ranges, Uvm, UvmFile};

/// The charged ranges of managed memory, and whether they are mapped.
#[derive(Debug)]
pub(crate) struct ManagedRanges {
    state: Arc<ContainerState>,
    uvm: Arc<Uvm>,
    mapped: Arc<MappedMemory>,
}

impl ManagedRanges {
    pub(crate) fn new(
        state: Arc<ContainerState>,
        uvm: Arc<Uvm>,
        mapped: Arc<MappedMemory>,
    ) -> Self {
        ManagedRanges { state, uvm, mapped }
    }

    /// Releases the managed ranges that no process has mapped any more.
    pub(crate) fn release_unmapped(&self) {
        let processes: Vec<Process> = self.state.books().processes.iter().copied().collect();
        for process in processes {
            let ranges = self.state.books().ranges.of(Space::Managed(process));
            self.release_if_unmapped(process, &ranges);
        }
        self.uvm.spaces.asked_ranges.lock().retain(|_, at| at.elapsed() < 2 * MAPPING_DELAY);
    }

    /// Releases those of a process's managed ranges `ranges` that no process has mapped, unless they were asked for
    /// less than [`MAPPING_DELAY`] ago.
    fn release_if_unmapped(&self, process: Process, ranges: &[(u64, u64)]) {
        for (base, length) in ranges.iter().copied() {
            let at = self.uvm.spaces.asked_for_at(process, base);
            let is_on_its_way = at.is_some_and(|at| at.elapsed() < MAPPING_DELAY);
            if is_on_its_way || self.is_mapped_by_any(process, (base, length)) {
                continue;
            }
            // The kernel lists no mappings of a program that is over, and the program's files may not have ended yet.
            if self.uvm.makers.has_orphaned_files(process) {
                return;
            }
            let mut books = self.state.books();
            // The range may have been asked for again meanwhile.
            if self.uvm.spaces.asked_for_at(process, base) != at {
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

    /// Releases a process's earlier managed ranges that overlap the range `base`, `length`, and are not mapped any
    /// more. `true` where no range overlaps it then.
    pub(crate) fn release_overlapping(&self, process: Process, (base, length): (u64, u64)) -> bool {
        let wanted = (base, base.saturating_add(length));
        let overlapping = || {
            let mut ranges = self.state.books().ranges.of(Space::Managed(process));
            ranges.retain(|(at, bytes)| overlap(wanted, (*at, at.saturating_add(*bytes))));
            ranges
        };
        let others = overlapping();
        // The process has unmapped these ranges, or it would not ask for their addresses again.
        for (at, _) in &others {
            self.uvm.spaces.asked_ranges.lock().remove(&(process, *at));
        }
        self.release_if_unmapped(process, &others);
        others.is_empty() || overlapping().is_empty()
    }

    /// Whether a process's managed range is mapped: by the process, or by another process that shares its address
    /// space or inherited the mapping. The address spaces of other processes count as they were at the last look.
    fn is_mapped_by_any(&self, process: Process, (base, length): (u64, u64)) -> bool {
        let range = (base, base.saturating_add(length));
        let others = self.uvm.spaces.all().into_iter().filter(|of| of.process != process);
        self.mapped.has_mapped(process, range)
            || others.into_iter().any(|space| {
                let now =
                    || self.mapped.mapped_in(space.process, &space.read_maps().unwrap_or_default());
                let mut last = space.last_mappings().unwrap_or_else(now);
                last.retain(|mapped| overlap(*mapped, range));
                let uncharged = self.mapped.uncharged(space.process, &last, Instant::now());
                uncharged.iter().any(|mapped| self.may_be_managed(*mapped))
            })
    }

    /// Whether a mapping lies in no file's range, or a file has managed memory at its address all the same.
    fn may_be_managed(&self, mapped: Mapped) -> bool {
        let files = self.uvm.files.all();
        let is_of_file = {
            let books = self.state.books();
            files.iter().any(|file| books.ranges.covers(Space::File(file.number), mapped))
        };
        let is_managed = |file: &Arc<UvmFile>| {
            Ranges::of(&self.state.release, &file.device).probe_managed(mapped.0)
        };
        !is_of_file || files.iter().any(is_managed)
    }

    /// The processes in `dead` whose managed memory is still mapped. Where any of them has managed ranges, first
    /// watches the processes of the container that have uncharged mappings.
    pub(crate) fn dead_with_mapped_memory(&self, dead: &[Process]) -> BTreeSet<Process> {
        let ranges_of = |process: &Process| self.state.books().ranges.of(Space::Managed(*process));
        let with_ranges: Vec<Process> =
            dead.iter().filter(|of| !ranges_of(of).is_empty()).copied().collect();
        if with_ranges.is_empty() {
            return BTreeSet::new();
        }
        // The kernel may not list a dead process's own mappings any more.
        self.mapped.watch_uncharged_processes();
        let is_mapped = |process: &Process| {
            ranges_of(process).into_iter().any(|range| self.is_mapped_by_any(*process, range))
        };
        with_ranges.into_iter().filter(is_mapped).collect()
    }
}
