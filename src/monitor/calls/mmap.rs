//! Calls that map `nvidia-uvm`, and what they are charged for as long as it's mapped.
//!
//! The driver gives managed memory without being asked: the kernel maps a file of UVM's, and what
//! is touched there is moved to a GPU. All that is mapped of UVM is that, but for ranges that its
//! file had the driver make. Which file it will be in the end, another thread can still change when
//! the call goes on; see [`crate::monitor::audit::vma_audit`].

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;

use crate::gate::settings::{Managed, NodeKind};
use crate::ledger::{Client, Entry, Handle, Hold, LedgerError, Process};
use crate::monitor::audit::vma_audit::overlap;
use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::policy::{self, Passed, Verdict};
use crate::monitor::calls::serve::{Case, Over};
use crate::monitor::state::books::BOUNDS;
use crate::monitor::state::journal_map::Count;
use crate::monitor::state::space::Space;
use crate::monitor::uvm::address_spaces::{Mapped, ON_ITS_WAY};
use crate::monitor::uvm::files::UvmFile;
use crate::monitor::uvm::ranges::{PAGE_BYTES, Ranges};
use crate::monitor::worker::Shared;
use crate::rm::uvm::Range;

impl Case<'_> {
    /// A shared mapping with an offset. Only UVM's can be managed memory.
    pub(crate) fn map(
        &mut self,
        descriptor: i32,
        length: u64,
        shared: bool,
        offset: u64,
    ) -> Result<Reply, Over> {
        // The filter is coarser than we are, and flags lie in a register.
        if !shared {
            return Ok(self.passed());
        }
        let is_uvm = match self.open(descriptor) {
            Ok(()) => self.device()?.kind == NodeKind::Uvm,
            Err(Reply::Errno(errno)) if errno == Errno::ENOTTY as i32 => false,
            Err(over) => return Err(over),
        };
        let target = self.target()?;
        let (process, tid) = (target.process, target.tid);
        // Before anything is charged, so that nothing is released since.
        let watched = self.shared.address_spaces.watch(process, tid);
        // Or it was a stranger's.
        self.still_waits()?;
        if watched.is_err() {
            self.log("a mapping of a process that can't be watched");
            return Err(Reply::Errno(Errno::ENOMEM as i32));
        }
        self.see()?;
        if is_uvm {
            self.map_uvm(process, offset, length)?;
        }
        match policy::pass(Passed::Mapping) {
            Verdict::Continue(pass) => Ok(self.continued(pass)),
            Verdict::Execute | Verdict::Refuse(_) => Err(Reply::Errno(Errno::EINVAL as i32)),
        }
    }

    /// Whether a mapping of UVM's may be: of a range that its file has, or charged as managed.
    fn map_uvm(&mut self, process: Process, base: u64, length: u64) -> Result<(), Over> {
        let bytes = length.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
        if !base.is_multiple_of(PAGE_BYTES) || length == 0 {
            // As the kernel says, later.
            return Err(Reply::Errno(Errno::EINVAL as i32));
        }
        let place = self.device()?.place;
        let refused = Err(Reply::Errno(Errno::ENOMEM as i32));
        if !self.books().saw_node(place) {
            return refused;
        }
        if self.is_of_file(Range { base, length: bytes })? {
            return Ok(());
        }
        if self.shared.settings.managed == Managed::Refuse {
            self.log("managed memory: managed_memory = \"refuse\" is configured");
            // CUDA says CUDA_ERROR_NOT_PERMITTED to that. There is nothing that it says
            // CUDA_ERROR_OUT_OF_MEMORY to; ENOMEM is an unknown error to it.
            return Err(Reply::Errno(Errno::EPERM as i32));
        }
        if !self.shared.makes_room(process, (base, bytes)) {
            self.log("managed memory where the process, or one that has its memory, has some");
            return refused;
        }
        let mut books = self.books();
        let gpus = self.shared.settings.gpus.len();
        if books.ledger.size().holds + gpus > BOUNDS.holds {
            drop(books);
            self.log("more managed memory than can be kept account of");
            return refused;
        }
        let mut reservations = Vec::new();
        let mut over = None;
        for gpu in 0..gpus {
            match books.ledger.reserve(gpu, bytes) {
                Ok(reservation) => reservations.push(reservation),
                Err(LedgerError::OverQuota { usage, .. }) => {
                    over = Some((gpu, usage));
                    break;
                }
                Err(_) => break,
            }
        }
        let space = Space::Managed(process);
        let enough = reservations.len() == gpus && books.announce(space, base, bytes);
        reservations.into_iter().for_each(|reservation| books.ledger.cancel(reservation));
        if !enough {
            drop(books);
            if let Some((gpu, usage)) = over {
                self.tell_over_quota((gpu, bytes), usage);
            }
            self.counted = Count::OverQuota;
            return refused;
        }
        self.shared.address_spaces.charges(process, base);
        for gpu in 0..gpus {
            let (client, parent, handle) = (Client(u32::MAX), Handle(u32::MAX), Handle(0));
            let hold = Hold::Mapping { space: space.number(), base: base | gpu as u64 };
            books.enter(Entry::Commit { gpu, bytes, client, parent, handle });
            books.enter(Entry::Hold { hold, client, handle });
            books.enter(Entry::Free { client, handle });
        }
        Ok(())
    }

    /// Whether the call's file has that range, and has it still. The driver maps no part of one.
    fn is_of_file(&self, range: Range) -> Result<bool, Over> {
        let device = self.device()?;
        let Some(file) = self.shared.uvm_files.find(device) else { return Ok(false) };
        let known = self.books().range(Space::File(file.number), range.base);
        Ok(known == Some((range.base, range.length))
            && Ranges::of(self.shared, device).is_whole(range) == Some(true))
    }
}

impl Shared {
    /// Managed ranges that are mapped no more are charged no more.
    pub(crate) fn release_unmapped(&self) {
        let processes: Vec<Process> = self.books().processes.iter().copied().collect();
        for process in processes {
            let ranges = self.books().ranges_of(Space::Managed(process));
            self.release_if_unmapped(process, &ranges);
        }
        self.address_spaces.charged().retain(|_, at| at.elapsed() < 2 * ON_ITS_WAY);
    }

    /// Releases managed ranges of a process that nobody has mapped, some time after they were asked
    /// for.
    fn release_if_unmapped(&self, process: Process, of: &[(u64, u64)]) {
        for (base, length) in of.iter().copied() {
            let at = self.address_spaces.charged_at(process, base);
            let is_on_its_way = at.is_some_and(|at| at.elapsed() < ON_ITS_WAY);
            if is_on_its_way || self.is_somewhere(process, (base, length)) {
                continue;
            }
            // Of a program that is no more the kernel lists nothing, and its files may not have ended.
            if self.has_orphans(process) {
                return;
            }
            let mut books = self.books();
            // It may have been asked for again meanwhile.
            if self.address_spaces.charged_at(process, base) != at {
                continue;
            }
            let space = Space::Managed(process);
            for (at, _) in books.ledger.mappings(space.number(), base, PAGE_BYTES) {
                books.enter(Entry::Release {
                    hold: Hold::Mapping { space: space.number(), base: at },
                });
            }
            books.withdraw(space, base);
        }
    }

    /// Whether managed ranges of a process that overlap that one are mapped no more, and released:
    /// it's about to have others there, which it has asked for already.
    fn makes_room(&self, process: Process, (base, length): (u64, u64)) -> bool {
        let wanted = (base, base.saturating_add(length));
        let overlapping = || {
            let mut ranges = self.books().ranges_of(Space::Managed(process));
            ranges.retain(|(at, bytes)| overlap(wanted, (*at, at.saturating_add(*bytes))));
            ranges
        };
        let others = overlapping();
        // What it had there it maps no more, or it wouldn't be asked for again.
        for (at, _) in &others {
            self.address_spaces.charged().remove(&(process, *at));
        }
        self.release_if_unmapped(process, &others);
        others.is_empty() || overlapping().is_empty()
    }

    /// Whether a process's managed range is mapped, by it or by others who share its memory or had it
    /// from it; as far as their last look tells where they aren't its own.
    fn is_somewhere(&self, process: Process, (base, length): (u64, u64)) -> bool {
        let range = (base, base.saturating_add(length));
        let others = self.address_spaces.all().into_iter().filter(|of| of.process != process);
        self.has_mapped(process, range)
            || others.into_iter().any(|memory| {
                let now = || self.mappings(memory.process, &memory.text().unwrap_or_default());
                let mut last = memory.last().unwrap_or_else(now);
                last.retain(|mapped| overlap(*mapped, range));
                let uncharged = self.uncharged(memory.process, &last, Instant::now());
                uncharged.iter().any(|mapped| self.may_be_managed(*mapped))
            })
    }

    /// Whether a mapping is of no file's range, or a file has managed memory there all the same.
    fn may_be_managed(&self, mapped: Mapped) -> bool {
        let files = self.uvm_files.all();
        let is_of_file = {
            let books = self.books();
            files.iter().any(|file| books.covers(Space::File(file.number), mapped))
        };
        let is_managed = |file: &Arc<UvmFile>| Ranges::of(self, &file.device).is_managed(mapped.0);
        !is_of_file || files.iter().any(is_managed)
    }

    /// Of processes that are gone, those whose managed memory others have.
    pub(crate) fn outlived(&self, dead: &[Process]) -> BTreeSet<Process> {
        let ranges_of = |process: &Process| self.books().ranges_of(Space::Managed(*process));
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
