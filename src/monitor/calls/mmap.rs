//! Calls that map `nvidia-uvm`, and what they are charged for as long as it's mapped.
//!
//! The driver gives managed memory without being asked: the kernel maps a file of UVM's, and what
//! is touched there is moved to a GPU. All that is mapped of UVM is that, but for ranges that its
//! file had the driver make. Which file it will be in the end, another thread can still change when
//! the call goes on; see [`crate::monitor::audit::mappings`].

use nix::errno::Errno;

use crate::gate::settings::{Managed, NodeKind};
use crate::ledger::{Client, Entry, Handle, Hold, LedgerError, Process};
use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::case::{Case, Over, continue_other_call, tell_over_quota};
use crate::monitor::calls::open::{open, see};
use crate::monitor::calls::policy::Passed;
use crate::monitor::journal::map::Count;
use crate::monitor::state::books::BOUNDS;
use crate::monitor::state::space::Space;
use crate::monitor::uvm::ranges::{PAGE_BYTES, Ranges};
use crate::rm::uvm::Range;

/// A shared mapping with an offset. Only UVM's can be managed memory.
pub(crate) fn map(
    case: &mut Case<'_>,
    descriptor: i32,
    length: u64,
    shared: bool,
    offset: u64,
) -> Result<Reply, Over> {
    // The filter is coarser than we are, and flags lie in a register.
    if !shared {
        return Ok(continue_other_call(case));
    }
    let is_uvm = match open(case, descriptor) {
        Ok(()) => case.device()?.kind == NodeKind::Uvm,
        Err(Reply::Errno(errno)) if errno == Errno::ENOTTY as i32 => false,
        Err(over) => return Err(over),
    };
    let target = case.target()?;
    let (process, tid) = (target.process, target.tid);
    // Before anything is charged, so that nothing is released since.
    let watched = case.parts.mappings.spaces.watch(process, tid);
    // Or it was a stranger's.
    case.still_waits()?;
    if watched.is_err() {
        case.log("a mapping of a process that can't be watched");
        return Err(Errno::ENOMEM.into());
    }
    see(case)?;
    if is_uvm {
        map_uvm(case, process, offset, length)?;
    }
    Ok(case.continued(Passed::Mapping))
}

/// Whether a mapping of UVM's may be: of a range that its file has, or charged as managed.
fn map_uvm(case: &mut Case<'_>, process: Process, base: u64, length: u64) -> Result<(), Over> {
    let bytes = length.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
    if !base.is_multiple_of(PAGE_BYTES) || length == 0 {
        // As the kernel says, later.
        return Err(Errno::EINVAL.into());
    }
    let place = case.device()?.place;
    let refused = Err(Errno::ENOMEM.into());
    if !case.books().note_node(place) {
        return refused;
    }
    if is_of_file(case, Range { base, length: bytes })? {
        return Ok(());
    }
    if case.parts.state.settings.managed == Managed::Refuse {
        case.log("managed memory: managed_memory = \"refuse\" is configured");
        // CUDA says CUDA_ERROR_NOT_PERMITTED to that. There is nothing that it says
        // CUDA_ERROR_OUT_OF_MEMORY to; ENOMEM is an unknown error to it.
        return Err(Errno::EPERM.into());
    }
    if !case.parts.mappings.release_overlapping(process, (base, bytes)) {
        case.log("managed memory where the process, or one that has its memory, has some");
        return refused;
    }
    let mut books = case.books();
    let gpus = case.parts.state.settings.gpus.len();
    if books.ledger.size().holds + gpus > BOUNDS.holds {
        drop(books);
        case.log("more managed memory than can be kept account of");
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
    let enough = reservations.len() == gpus && books.add_range(space, base, bytes);
    reservations.into_iter().for_each(|reservation| books.ledger.cancel(reservation));
    if !enough {
        drop(books);
        match over {
            Some((gpu, usage)) => {
                tell_over_quota(case, (gpu, bytes), usage);
                case.effects.counted = Count::OverQuota;
            }
            None => case.log("more managed memory than can be kept account of"),
        }
        return refused;
    }
    case.parts.mappings.spaces.note_asked(process, base);
    // A hold keeps what an object names: one of nobody's client makes it, and is gone at once. The GPU's place is
    // in the base, whose lowest bits are 0.
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
fn is_of_file(case: &Case<'_>, range: Range) -> Result<bool, Over> {
    let device = case.device()?;
    let Some(file) = case.parts.uvm.files.find(device) else { return Ok(false) };
    let known = case.books().ranges.range(Space::File(file.number), range.base);
    Ok(known == Some((range.base, range.length))
        && Ranges::of(&case.parts.state.release, device).is_whole(range) == Some(true))
}
