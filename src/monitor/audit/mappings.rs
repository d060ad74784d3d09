//! What the container's processes have mapped of `nvidia-uvm`, and whether it may be.
//!
//! A descriptor can be replaced when a mapping was let continue, so that it is of another file than
//! was looked at. So what is mapped is read from the kernel ([`crate::monitor::uvm::address_spaces`]). Where it lists a
//! memory no more, all processes are looked through for who has mapped anything.
//!
//! The kernel doesn't say which file a mapping is of. But memory is on a GPU only by files that have
//! GPUs, which are kept: each is asked whether it has managed memory at the addresses that are mapped
//! and not charged. One that has loses its GPUs, and with them that memory, whoever has it mapped.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::events::Event;
use crate::gate::settings::{Managed, NodeKind};
use crate::ledger::Process;
use crate::monitor::caller::target::has_file;
use crate::monitor::journal::process_number::number;
use crate::monitor::journal::process_number::process_id;
use crate::monitor::node::device;
use crate::monitor::processes::container_processes::Processes;
use crate::monitor::state::container_state::ContainerState;
use crate::monitor::state::lane::Lane;
use crate::monitor::state::space::Space;
use crate::monitor::state::space_ranges::Mapped;
use crate::monitor::uvm::address_spaces::{AddressSpace, AddressSpaces, current};
use crate::monitor::uvm::files::{MOST_QUESTIONS, UvmFile};
use crate::monitor::uvm::kept_files::Uvm;
use crate::monitor::uvm::ranges::Ranges;
use crate::monitor::uvm::vma_list::{self, Listed};
use crate::process::{ProcessId, told};
use crate::rm::uvm::Range;

/// How often memories are looked at whose processes asked for nothing since: a thread that was kept
/// from running maps late what it asked for, and what is charged changes.
const PAUSE: Duration = Duration::from_millis(500);

/// Mappings of one memory at most that could be UVM's. No program has as many.
const MOST: usize = 4096;

/// What the container's processes have mapped of UVM's.
#[derive(Debug)]
pub(crate) struct Mappings {
    pub(crate) state: Arc<ContainerState>,
    processes: Arc<Processes>,
    lane: Arc<Lane>,
    pub(crate) uvm: Arc<Uvm>,
    pub(crate) spaces: AddressSpaces,
}

impl Mappings {
    pub(crate) fn new(processes: Arc<Processes>, lane: Arc<Lane>, uvm: Arc<Uvm>) -> Self {
        let state = Arc::clone(&processes.state);
        Mappings { state, processes, lane, uvm, spaces: AddressSpaces::default() }
    }

    /// Looks at mappings whenever it's told to. The driver, and the container, may keep it waiting:
    /// nobody else does.
    pub(crate) fn audit_mappings_forever(&self) {
        // Those that the worker before watched.
        let processes: Vec<Process> = self.state.books().processes.iter().copied().collect();
        for process in processes {
            let watch = |tid| self.spaces.watch(process, tid).ok();
            let _ = told(process_id(process).pid, watch);
        }
        loop {
            self.spaces.wait();
            self.audit_mappings();
        }
    }

    fn audit_mappings(&self) {
        let is_due = self.spaces.take_due(PAUSE);
        if is_due {
            self.uvm.end_orphaned_files();
        }
        let files = self.uvm.files.all();
        self.look_at_fresh(&files);
        if !is_due {
            return;
        }
        let begun = Instant::now();
        if self.state.settings.managed == Managed::Refuse {
            // Managed memory of processes that are gone, which none may have had.
            files
                .iter()
                .for_each(|file| Ranges::of(&self.state.release, &file.device).end_zombies());
        }
        for memory in self.spaces.all() {
            self.look_at(&memory, &files);
            self.look_at_fresh(&files);
        }
        self.release_unmapped();
        self.state.books().ranges.forget_removed(begun);
    }

    fn look_at_fresh(&self, files: &[Arc<UvmFile>]) {
        self.spaces.fresh().iter().for_each(|memory| self.look_at(memory, files));
    }

    /// Looks at a memory, and forgets one that nobody has any more.
    fn look_at(&self, memory: &Arc<AddressSpace>, files: &[Arc<UvmFile>]) {
        memory.mark_looked_at();
        let since = Instant::now();
        let (text, now) = (memory.text(), current(memory.process));
        let is_gone = match &text {
            Ok(text) => text.is_empty(),
            // Others may have it, and the process by another thread.
            Err(_) => true,
        };
        // Of a process that is over the kernel may still list this memory, while other processes share another
        // one that it had.
        if text.is_err() || memory.take_orphaned() {
            self.look_for_heirs();
        }
        if is_gone {
            self.spaces.forget(memory);
        }
        let text = text.unwrap_or_default();
        let now = now.filter(|now| *now != text).unwrap_or_default();
        if is_gone && !now.is_empty() {
            self.spaces.reopen(memory.process);
        }
        // It may have another since it asked, and left the one to others.
        let mut mappings = self.mapped_in(memory.process, &text);
        mappings.extend(self.mapped_in(memory.process, &now));
        let uncharged = self.uncharged(memory.process, &mappings, since);
        memory.set_mappings(mappings);
        if uncharged.len() > MOST || !self.strangers(&uncharged, since).is_empty() {
            self.end_unless_gone(memory);
        }
        let addresses: BTreeSet<u64> = uncharged.iter().map(|(from, _)| *from).collect();
        if addresses.len() * files.len() > MOST_QUESTIONS {
            tracing::debug!("more mappings of nvidia-uvm than can be asked about");
            return self.processes.kill(memory.process, Event::killed_past_the_monitor());
        }
        addresses.into_iter().for_each(|at| self.judge_address(at, files));
    }

    /// Whoever has something mapped that he isn't charged for is watched.
    pub(crate) fn look_for_heirs(&self) {
        for pid in self.processes.container_pids().into_iter().map(u32::cast_signed) {
            let Some(process) = ProcessId::of(pid).map(number) else { continue };
            let since = Instant::now();
            let mappings = self.mapped_in(process, &current(process).unwrap_or_default());
            let is_known = !self.spaces.of(process).is_empty();
            if !is_known && !self.uncharged(process, &mappings, since).is_empty() {
                let _ = self.spaces.watch(process, pid);
            }
        }
    }

    /// The mappings of those that aren't managed memory which is charged, and wasn't since then, when
    /// their list began to be read.
    pub(crate) fn uncharged(
        &self,
        process: Process,
        mappings: &[Mapped],
        since: Instant,
    ) -> Vec<Mapped> {
        let books = self.state.books();
        let is_charged =
            |mapped: &Mapped| books.ranges.covered_since(Space::Managed(process), *mapped, since);
        mappings.iter().copied().filter(|mapped| !is_charged(mapped)).collect()
    }

    /// Of uncharged mappings those of no file's range, and that nobody else is charged for, who may
    /// share the memory.
    fn strangers(&self, uncharged: &[Mapped], since: Instant) -> Vec<Mapped> {
        let files = self.uvm.files.all();
        let books = self.state.books();
        let is_explained = |mapped: &Mapped| {
            let mut of_files = files.iter().map(|file| Space::File(file.number));
            let mut of_others = books.processes.iter().map(|process| Space::Managed(*process));
            of_files.any(|space| books.ranges.covers(space, *mapped))
                || of_others.any(|space| books.ranges.covers(space, *mapped))
                || books.ranges.covered_by_removed(*mapped, since)
        };
        uncharged.iter().copied().filter(|mapped| !is_explained(mapped)).collect()
    }

    /// Ends who has mapped what it may not, unless that is gone by now: it may have been unmapped
    /// while we looked, and its range freed.
    fn end_unless_gone(&self, memory: &AddressSpace) {
        let since = Instant::now();
        let texts = [memory.text().ok(), current(memory.process)];
        let now: Vec<Mapped> =
            texts.iter().flatten().flat_map(|text| self.mapped_in(memory.process, text)).collect();
        let uncharged = self.uncharged(memory.process, &now, since);
        if uncharged.len() > MOST || !self.strangers(&uncharged, since).is_empty() {
            tracing::debug!(mappings = now.len(), "managed memory past the monitor");
            self.processes.kill(memory.process, Event::killed_past_the_monitor());
        }
    }

    /// Asks each file for managed memory at an address that is mapped and not charged. There may be
    /// as much as others are charged for, who have their own at the same address.
    fn judge_address(&self, at: u64, files: &[Arc<UvmFile>]) {
        let has =
            |file: &&Arc<UvmFile>| Ranges::of(&self.state.release, &file.device).is_managed(at);
        let found: Vec<&Arc<UvmFile>> =
            files.iter().filter(|file| !file.is_ended()).filter(has).collect();
        if found.is_empty() {
            return;
        }
        let charged: Vec<Process> = {
            let books = self.state.books();
            let is_charged = |of: &Process| books.ranges.covers(Space::Managed(*of), (at, at + 1));
            books.processes.iter().copied().filter(is_charged).collect()
        };
        // To ask for it is not to have it.
        let has_it = |of: &Process| self.has_mapped(*of, (at, at + 1));
        let charged: Vec<Process> = charged.into_iter().filter(has_it).collect();
        if found.len() <= charged.len() {
            return;
        }
        let paid: Vec<(u64, u64)> = {
            let books = self.state.books();
            charged.iter().filter_map(|of| books.ranges.range(Space::Managed(*of), at)).collect()
        };
        for file in found {
            let ranges = Ranges::of(&self.state.release, &file.device);
            let is_paid = paid.iter().any(|(base, length)| {
                ranges.is_whole(Range { base: *base, length: *length }) == Some(true)
            });
            if !is_paid {
                self.condemn(file, at);
            }
        }
    }

    /// Whether something is mapped there in the memory that a process has, or had when it asked for
    /// mappings.
    pub(crate) fn has_mapped(&self, process: Process, wanted: Mapped) -> bool {
        let then = self.spaces.of(process).into_iter().filter_map(|memory| memory.text().ok());
        then.chain(current(process)).any(|text| {
            self.mapped_in(process, &text).iter().any(|mapped| overlap(*mapped, wanted))
        })
    }

    /// A file that has managed memory it may not have gets no GPU any more. Who has it, and that
    /// address mapped, is ended.
    fn condemn(&self, file: &UvmFile, at: u64) {
        file.condemn();
        if let Some(_lane) = self.lane.enter_for_monitor()
            && self.uvm.unregister_gpus(&file.device)
        {
            file.set_ended();
        }
        if self.state.log.limit.take_line() {
            let container = self.state.settings.short_id.as_str();
            tracing::warn!(
                container,
                "a file of nvidia-uvm has managed memory past the monitor: it loses its GPUs"
            );
        }
        for memory in self.spaces.all() {
            let last = memory.last().unwrap_or_default();
            let there: Vec<Mapped> =
                last.into_iter().filter(|mapped| overlap(*mapped, (at, at + 1))).collect();
            let open = self
                .processes
                .open_files_of(process_id(memory.process).pid.cast_unsigned(), NodeKind::Uvm);
            let mut open = open.into_iter().flatten();
            if !self.uncharged(memory.process, &there, Instant::now()).is_empty()
                && open.any(|place| has_file(place, &file.device) == Some(true))
            {
                self.processes.kill(memory.process, Event::killed_past_the_monitor());
            }
        }
    }

    /// The ranges in a list of mappings that could be managed memory, of a node of UVM's.
    pub(crate) fn mapped_in(&self, process: Process, list: &str) -> Vec<Mapped> {
        // Of who has so many nobody asks what they are.
        let is_uvm =
            |(number, of): &(usize, Listed<'_>)| *number >= MOST || self.is_uvm(process, *of);
        let found = vma_list::possible(list).enumerate().filter(is_uvm);
        found.map(|(_, of)| of.mapped).collect()
    }

    /// Whether a mapping's file is a node of UVM's: by the numbers in the list, or by the file itself,
    /// whose file system may show others.
    fn is_uvm(&self, process: Process, of: Listed<'_>) -> bool {
        if of.place.is_some_and(|place| self.state.books().is_node(place)) {
            return true;
        }
        let of_file = |tid| {
            let path = PathBuf::from(format!("/proc/{tid}/map_files/{}", of.range));
            match device::kind_at(&self.state.settings.nodes, &path) {
                Some(kind) => Some(kind == NodeKind::Uvm),
                None => device::place_at(&path).map(|place| self.state.books().is_node(place)),
            }
        };
        told(process_id(process).pid, of_file).unwrap_or(false)
    }
}

/// Whether two have an address in common.
pub(crate) fn overlap((from, to): Mapped, (first, end): Mapped) -> bool {
    from < end && to > first
}
