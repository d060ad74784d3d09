//! Finds out which driver file a call is made by, and which process makes it; notes which clients the process uses.

use std::sync::atomic::Ordering;

use nix::errno::Errno;

use crate::ledger::Client;
use crate::monitor::caller::Reply;
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::decide::Denial;
use crate::monitor::node::Device;

/// Finds out which driver file a descriptor is, and notes the calling process. `ENOTTY` for any other file.
pub(crate) fn identify(case: &mut Case<'_>, descriptor: i32) -> Result<(), EarlyReply> {
    let probable = case.target.take();
    let duplicate = case.parts.callers.targets.duplicate(case.tid(), descriptor, probable);
    let (target, file) = duplicate.map_err(|errno| caller_error(case, errno))?;
    case.target = Some(target);
    spare_runtime(case)?;
    let device = Device::of(&case.parts.state.settings.nodes, file);
    // The call of a terminal or a disk is not the monitor's to make, and it may not continue: its descriptor could be
    // another file by then.
    let device = device.ok_or(Reply::Errno(Errno::ENOTTY as i32))?;
    case.parts.processes.origins.note_opened(&device);
    case.device = Some(device);
    note_caller(case)
}

/// The reply for a caller that is gone or can't be looked at. The log tells where it can't be looked at.
pub(crate) fn caller_error(case: &Case<'_>, errno: Errno) -> EarlyReply {
    if matches!(errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) {
        case.log(&format!("a call of a process that can't be looked at: {}", errno.desc()));
    }
    Reply::Errno(errno as i32)
}

/// Lets the call continue where the runtime or one of its hooks makes it on the host: it is none of the container's.
pub(crate) fn spare_runtime(case: &Case<'_>) -> Result<(), EarlyReply> {
    match &case.target {
        Some(target) if target.is_of_runtime => Err(Reply::Continue),
        _ => Ok(()),
    }
}

/// Notes the calling process in the books, where it isn't known yet.
pub(crate) fn note_caller(case: &mut Case<'_>) -> Result<(), EarlyReply> {
    let target = case.target()?;
    if target.is_noted.load(Ordering::Relaxed) {
        return Ok(());
    }
    if !case.books().processes.contains(&target.process) {
        // The calling thread may be gone, and its tid may belong to another process by now.
        case.still_waits()?;
        if !case.books().note_process(target.process) {
            return Err(case.deny(&Denial::ProcessesFull));
        }
        // The auditor is to wait for the process's death, whatever the process calls.
        case.parts.audit.wake();
    }
    target.is_noted.store(true, Ordering::Relaxed);
    Ok(())
}

/// Notes that the calling process uses a client.
pub(crate) fn note_user(case: &Case<'_>, client: u32) -> Result<(), EarlyReply> {
    let process = case.target()?.process;
    let mut books = case.books();
    // Usually the user is known already. Books that are borrowed to be changed compute the figures' mark anew when they
    // are dropped, which takes time.
    if !books.ledger.holds_client(Client(client), process) {
        books.note_user(client, process);
    }
    Ok(())
}
