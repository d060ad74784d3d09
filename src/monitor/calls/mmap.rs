//! Calls that map `nvidia-uvm`, and what the container is charged for them as long as the mapping exists.
//!
//! The driver gives managed memory without an ioctl: the kernel maps a file of nvidia-uvm, and the driver moves pages
//! that are touched in the mapping to a GPU. Every mapping of nvidia-uvm is managed memory, except for ranges that the
//! file had the driver make. After the call continues, another thread can still replace the file:
//! [`crate::monitor::audit::Mappings`] checks what was mapped.

use nix::errno::Errno;

use crate::gate::settings::{Managed, NodeKind};
use crate::ledger::{Client, Entry, Handle, Hold, LedgerError, Process};
use crate::monitor::caller::Reply;
use crate::monitor::calls::case::{Case, EarlyReply, continue_other_call, tell_over_quota};
use crate::monitor::calls::identify::{identify, note_caller};
use crate::monitor::calls::policy::Continued;
use crate::monitor::journal::Count;
use crate::monitor::state::{BOUNDS, Space};
use crate::monitor::uvm::{PAGE_BYTES, Ranges};
use crate::rm::uvm::Range;

/// Serves a mapping call: a shared mapping with an offset. Only a mapping of nvidia-uvm can be managed memory.
pub(crate) fn serve_map(
    case: &mut Case<'_>,
    descriptor: i32,
    length: u64,
    shared: bool,
    offset: u64,
) -> Result<Reply, EarlyReply> {
    // The filter traps more mappings than the monitor decides on. The flags lie in a register, so they can't change.
    if !shared {
        return Ok(continue_other_call(case));
    }
    let is_uvm = match identify(case, descriptor) {
        Ok(()) => case.device()?.kind == NodeKind::Uvm,
        Err(Reply::Errno(errno)) if errno == Errno::ENOTTY as i32 => false,
        Err(over) => return Err(over),
    };
    let target = case.target()?;
    let (process, tid) = (target.process, target.tid);
    // The address space is watched before anything is charged, so that the charge isn't released in between.
    let watched = case.parts.mappings.spaces.watch(process, tid);
    // Where the caller is gone, the address space may be another process's.
    case.still_waits()?;
    if watched.is_err() {
        case.log("a mapping of a process that can't be watched");
        return Err(Errno::ENOMEM.into());
    }
    note_caller(case)?;
    if is_uvm {
        charge_map(case, process, offset, length)?;
    }
    Ok(case.continued(Continued::Mapping))
}

/// Charges a mapping of nvidia-uvm as managed memory on each GPU, unless it is of a range that the file has. `Err`
/// where the mapping is refused.
fn charge_map(
    case: &mut Case<'_>,
    process: Process,
    base: u64,
    length: u64,
) -> Result<(), EarlyReply> {
    let bytes = length.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
    if !base.is_multiple_of(PAGE_BYTES) || length == 0 {
        // The kernel would give the same error later.
        return Err(Errno::EINVAL.into());
    }
    let place = case.device()?.place;
    let refused = Err(Errno::ENOMEM.into());
    if !case.books().note_node(place) {
        return refused;
    }
    if is_file_range(case, Range { base, length: bytes })? {
        return Ok(());
    }
    if case.parts.state.settings.managed == Managed::Refuse {
        case.log("managed memory: managed_memory = \"refuse\" is configured");
        // CUDA reports EPERM as CUDA_ERROR_NOT_PERMITTED. No errno makes it report CUDA_ERROR_OUT_OF_MEMORY: ENOMEM is
        // an unknown error to CUDA.
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
    // A hold keeps the memory of an object: each hold gets an object of a client that nobody has, which is freed at
    // once. The GPU's number is in the base's lowest bits, which are 0 in a page's address.
    for gpu in 0..gpus {
        let (client, parent, handle) = (Client(u32::MAX), Handle(u32::MAX), Handle(0));
        let hold = Hold::Mapping { space: space.number(), base: base | gpu as u64 };
        books.enter(Entry::Commit { gpu, bytes, client, parent, handle });
        books.enter(Entry::Hold { hold, client, handle });
        books.enter(Entry::Free { client, handle });
    }
    Ok(())
}

/// Whether the call's file has exactly this range, and has it still. The driver maps no part of a range.
fn is_file_range(case: &Case<'_>, range: Range) -> Result<bool, EarlyReply> {
    let device = case.device()?;
    let Some(file) = case.parts.uvm.files.find(device) else { return Ok(false) };
    let known = case.books().ranges.range(Space::File(file.number), range.base);
    Ok(known == Some((range.base, range.length))
        && Ranges::of(&case.parts.state.release, device).is_whole(range) == Some(true))
}
