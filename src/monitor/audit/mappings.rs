//! Checks what the container's processes have mapped of `nvidia-uvm`.
//!
//! When a mapping call continues, another thread can replace the descriptor, and the mapping is of another file than
//! the monitor looked at. So the mappings are read from the kernel ([`AddressSpace`]). Where the kernel does not list
//! an address space any more, all processes are searched for mappings.
//!
//! The kernel doesn't say which file a mapping is of. But memory is on a GPU only by files that have GPUs, and these
//! files are kept. Each kept file is asked whether it has managed memory at the addresses that are mapped and not
//! charged. A file that has such memory loses its GPUs, and with them the memory, whichever process has it mapped.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::events::Event;
use crate::gate::settings::{Managed, NodeKind};
use crate::ledger::Process;
use crate::monitor::audit::managed_ranges::ManagedRanges;
use crate::monitor::audit::mapped_memory::{MOST_MAPPINGS, MappedMemory, overlap};
use crate::monitor::caller::has_file;
use crate::monitor::processes::Processes;
use crate::monitor::state::{ContainerState, Lane, Mapped, Space};
use crate::monitor::uvm::{AddressSpace, MOST_QUESTIONS, Ranges, Uvm, UvmFile, current_maps};
use crate::process::told;
use crate::rm::uvm::Range;

/// How often the address spaces are looked at whose processes asked for nothing since. A thread that was kept from
/// running may map late, and the charges change.
const PAUSE: Duration = Duration::from_millis(500);

/// Looks at the container's mappings.
#[derive(Debug)]
pub(crate) struct Mappings {
    state: Arc<ContainerState>,
    processes: Arc<Processes>,
    lane: Arc<Lane>,
    uvm: Arc<Uvm>,
    mapped: Arc<MappedMemory>,
    pub(crate) managed: Arc<ManagedRanges>,
}

impl Mappings {
    pub(crate) fn new(processes: Arc<Processes>, lane: Arc<Lane>, uvm: Arc<Uvm>) -> Self {
        let state = Arc::clone(&processes.state);
        let mapped = Arc::new(MappedMemory::new(Arc::clone(&processes), Arc::clone(&uvm)));
        let (state_of, uvm_of) = (Arc::clone(&state), Arc::clone(&uvm));
        let managed = Arc::new(ManagedRanges::new(state_of, uvm_of, Arc::clone(&mapped)));
        Mappings { state, processes, lane, uvm, mapped, managed }
    }

    /// Looks at mappings whenever it is woken. This thread alone waits where the driver or the container holds up
    /// the look.
    pub(crate) fn audit_mappings_forever(&self) {
        // They were watched before an update.
        let processes: Vec<Process> = self.state.books().processes.iter().copied().collect();
        for process in processes {
            let watch = |tid| self.uvm.spaces.watch(process, tid).ok();
            let _ = told(process.pid().cast_signed(), watch);
        }
        loop {
            self.uvm.spaces.wait();
            let _at_work = self.state.work.begin();
            self.audit_mappings();
        }
    }

    fn audit_mappings(&self) {
        let is_due = self.uvm.spaces.take_due(PAUSE);
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
            // Managed memory of processes that have ended: under this setting the container may have none.
            files
                .iter()
                .for_each(|file| Ranges::of(&self.state.release, &file.device).end_zombies());
        }
        for space in self.uvm.spaces.all() {
            self.look_at(&space, &files);
            self.look_at_fresh(&files);
        }
        self.managed.release_unmapped();
        self.state.books().ranges.forget_removed(begun);
    }

    fn look_at_fresh(&self, files: &[Arc<UvmFile>]) {
        self.uvm.spaces.fresh().iter().for_each(|space| self.look_at(space, files));
    }

    /// Looks at the mappings of an address space, and forgets an address space that no process has any more.
    fn look_at(&self, space: &Arc<AddressSpace>, files: &[Arc<UvmFile>]) {
        space.mark_looked_at();
        let since = Instant::now();
        let (text, now) = (space.read_maps(), current_maps(space.process));
        let is_gone = match &text {
            Ok(text) => text.is_empty(),
            // Other processes may have the address space, and this process may have it by another thread.
            Err(_) => true,
        };
        // The kernel may still list this address space of a process that has ended, while other processes share another
        // address space that the process had.
        if text.is_err() || space.take_process_ended() {
            self.mapped.watch_uncharged_processes();
        }
        if is_gone {
            self.uvm.spaces.forget(space);
        }
        let text = text.unwrap_or_default();
        let now = now.filter(|now| *now != text).unwrap_or_default();
        if is_gone && !now.is_empty() {
            self.uvm.spaces.reopen(space.process);
        }
        // The process may have another address space since it asked, and have left this one to other processes.
        let mut mappings = self.mapped.mapped_in(space.process, &text);
        mappings.extend(self.mapped.mapped_in(space.process, &now));
        let uncharged = self.mapped.uncharged(space.process, &mappings, since);
        space.set_mappings(mappings);
        if uncharged.len() > MOST_MAPPINGS || !self.unexplained(&uncharged, since).is_empty() {
            self.end_unless_gone(space);
        }
        let addresses: BTreeSet<u64> = uncharged.iter().map(|(from, _)| *from).collect();
        if addresses.len() * files.len() > MOST_QUESTIONS {
            tracing::debug!("more mappings of nvidia-uvm than can be asked about");
            return self.processes.kill(space.process, Event::killed_past_the_monitor());
        }
        addresses.into_iter().for_each(|at| self.judge_address(at, files));
    }

    /// Those of `uncharged` that lie in no file's range, and that no other process is charged for: another process may
    /// share the address space.
    fn unexplained(&self, uncharged: &[Mapped], since: Instant) -> Vec<Mapped> {
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

    /// Kills the process of an address space with unexplained mappings, unless these are gone now: the process may have
    /// unmapped them during the look, and its range may have been freed.
    fn end_unless_gone(&self, space: &AddressSpace) {
        let since = Instant::now();
        let texts = [space.read_maps().ok(), current_maps(space.process)];
        let now: Vec<Mapped> = texts
            .iter()
            .flatten()
            .flat_map(|text| self.mapped.mapped_in(space.process, text))
            .collect();
        let uncharged = self.mapped.uncharged(space.process, &now, since);
        if uncharged.len() > MOST_MAPPINGS || !self.unexplained(&uncharged, since).is_empty() {
            tracing::debug!(mappings = now.len(), "managed memory past the monitor");
            self.processes.kill(space.process, Event::killed_past_the_monitor());
        }
    }

    /// Asks each file for managed memory at an address that is mapped and not charged. As many files may have some as
    /// processes are charged for the address: each has memory of its own at the same address.
    fn judge_address(&self, at: u64, files: &[Arc<UvmFile>]) {
        let has =
            |file: &&Arc<UvmFile>| Ranges::of(&self.state.release, &file.device).probe_managed(at);
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
        // A process can be charged for a range without having it mapped.
        let has_it = |of: &Process| self.mapped.has_mapped(*of, (at, at + 1));
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
                self.withdraw_gpus(file, at);
            }
        }
    }

    /// Takes the GPUs from a file that has managed memory past the monitor; it gets no GPU again. Kills each process
    /// that has the file and an uncharged mapping at the address `at`.
    fn withdraw_gpus(&self, file: &UvmFile, at: u64) {
        file.deny_gpus();
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
        for space in self.uvm.spaces.all() {
            let last = space.last_mappings().unwrap_or_default();
            let there: Vec<Mapped> =
                last.into_iter().filter(|mapped| overlap(*mapped, (at, at + 1))).collect();
            let open = self.processes.open_files_of(space.process.pid(), NodeKind::Uvm);
            let mut open = open.into_iter().flatten();
            if !self.mapped.uncharged(space.process, &there, Instant::now()).is_empty()
                && open.any(|place| has_file(place, &file.device) == Some(true))
            {
                self.processes.kill(space.process, Event::killed_past_the_monitor());
            }
        }
    }
}
