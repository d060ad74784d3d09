//! Calls that map `nvidia-uvm`, and what they are charged for as long as it's mapped.
//!
//! The driver gives managed memory without being asked: the kernel maps a file of UVM's, and what
//! is touched there is moved to a GPU. All that is mapped of UVM is that, but for ranges that its
//! file had the driver make. Which file it will be in the end, another thread can still change when
//! the call goes on; see [`crate::monitor::audit::vma_audit`].

use nix::errno::Errno;

use crate::gate::settings::{Managed, NodeKind};
use crate::ledger::{Client, Entry, Handle, Hold, LedgerError, Process};
use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::policy::{self, Passed, Verdict};
use crate::monitor::calls::serve::{Case, Over};
use crate::monitor::state::books::BOUNDS;
use crate::monitor::state::journal_map::Count;
use crate::monitor::state::space::Space;
use crate::monitor::uvm::ranges::{PAGE_BYTES, Ranges};
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
        let watched = self.parts.mappings.spaces.watch(process, tid);
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
        if self.parts.state.settings.managed == Managed::Refuse {
            self.log("managed memory: managed_memory = \"refuse\" is configured");
            // CUDA says CUDA_ERROR_NOT_PERMITTED to that. There is nothing that it says
            // CUDA_ERROR_OUT_OF_MEMORY to; ENOMEM is an unknown error to it.
            return Err(Reply::Errno(Errno::EPERM as i32));
        }
        if !self.parts.mappings.makes_room(process, (base, bytes)) {
            self.log("managed memory where the process, or one that has its memory, has some");
            return refused;
        }
        let mut books = self.books();
        let gpus = self.parts.state.settings.gpus.len();
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
        self.parts.mappings.spaces.charges(process, base);
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
        let Some(file) = self.parts.uvm.files.find(device) else { return Ok(false) };
        let known = self.books().range(Space::File(file.number), range.base);
        Ok(known == Some((range.base, range.length))
            && Ranges::of(&self.parts.state.release, device).is_whole(range) == Some(true))
    }
}
