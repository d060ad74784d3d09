//! Calls that map `nvidia-uvm`, and what the container is charged for them as long as the mapping exists.
//!
//! The driver gives managed memory without an ioctl: the kernel maps a file of nvidia-uvm, and the driver moves pages
//! that are touched in the mapping to a GPU. Every mapping of nvidia-uvm is managed memory, except for ranges that the
//! file had the driver make. After the call is passed through, another thread can still replace the file:
//! [`mappings`](crate::uvm::mappings) checks what was mapped.

use nix::errno::Errno;

use crate::caller::Reply;
use crate::case::{Case, EarlyReply, continue_other_call, identify, note_caller};
use crate::decide::{Continued, RefusalReason, managed_records};
use crate::gate::settings::{Managed, NodeKind};
use crate::state::Space;
use crate::uvm::mappings::release_overlapping;
use crate::uvm::queries::{PAGE_BYTES, Ranges};
use cgpu_core::ledger::Process;
use nvrm::uvm::Range;

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
    let watched = case.monitor.spaces.watch(process, tid);
    // If the caller has exited, the address space may be another process's.
    case.still_waits()?;
    if watched.is_err() {
        return Err(case.deny(&RefusalReason::Unwatched));
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
    if !case.state().note_node(place) {
        return Err(Errno::ENOMEM.into());
    }
    if is_file_range(case, Range { base, length: bytes })? {
        return Ok(());
    }
    charge_managed(case, process, (base, bytes)).map_err(|refusal_reason| {
        case.deny(&refusal_reason);
        Reply::Errno(refusal_reason.errno_of_map())
    })
}

/// Charges managed memory of a process, which has none at these addresses any more.
fn charge_managed(
    case: &Case<'_>,
    process: Process,
    (base, bytes): (u64, u64),
) -> Result<(), RefusalReason> {
    let monitor = case.monitor;
    if monitor.settings.managed == Managed::Refuse {
        return Err(RefusalReason::Managed);
    }
    if !release_overlapping(monitor, process, (base, bytes)) {
        return Err(RefusalReason::ManagedTwice);
    }
    let mut state = case.state();
    let (space, gpus) = (Space::Managed(process), monitor.settings.gpus.len());
    let range = (space, base, bytes);
    let records = managed_records(&state.ledger, &state.ranges, range, gpus)?;
    monitor.spaces.note_asked(process, base);
    records.into_iter().for_each(|record| state.write(record));
    Ok(())
}

/// Whether the call's file has exactly this range, and has it still. The driver maps no part of a range.
fn is_file_range(case: &Case<'_>, range: Range) -> Result<bool, EarlyReply> {
    let device = case.device()?;
    let Some(file) = case.monitor.uvm_files.find(device) else { return Ok(false) };
    let known = case.state().ranges.range(Space::File(file.number), range.base);
    Ok(known == Some((range.base, range.length))
        && Ranges::of(&case.monitor.release, device).is_whole(range) == Some(true))
}
