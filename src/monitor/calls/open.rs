//! Which of the driver's files a call is made by, and who makes it.

use nix::errno::Errno;

use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::case::{Case, Over};
use crate::monitor::node::device::Device;

/// Finds out which of the driver's files a descriptor is.
pub(crate) fn open(case: &mut Case<'_>, descriptor: i32) -> Result<(), Over> {
    let duplicate = case.parts.callers.targets.duplicate(case.tid(), descriptor);
    let (target, file) = duplicate.map_err(|errno| out_of_reach(case, errno))?;
    case.target = Some(target);
    leave_the_runtime_alone(case)?;
    let device = Device::of(&case.parts.state.settings.nodes, file);
    // A terminal's, a disk's: not ours to make, and could be another by the time it
    // continues.
    let device = device.ok_or(Reply::Errno(Errno::ENOTTY as i32))?;
    case.parts.processes.note_opened(&device);
    case.device = Some(device);
    see(case)
}

/// A caller that is gone, or one that we can't look at, which the log says.
pub(crate) fn out_of_reach(case: &Case<'_>, errno: Errno) -> Over {
    if matches!(errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM) {
        case.log(&format!("a call of a process that can't be looked at: {}", errno.desc()));
    }
    Reply::Errno(errno as i32)
}

/// What the runtime and its hooks do on the host is none of the container's.
pub(crate) fn leave_the_runtime_alone(case: &Case<'_>) -> Result<(), Over> {
    match &case.target {
        Some(target) if target.is_of_runtime => Err(Reply::Continue),
        _ => Ok(()),
    }
}

/// Takes note of the process.
pub(crate) fn see(case: &Case<'_>) -> Result<(), Over> {
    let process = case.target()?.process;
    if case.books().processes.contains(&process) {
        return Ok(());
    }
    // Or it could be a stranger who has the number of a thread that is gone.
    case.still_waits()?;
    if case.books().note_process(process) {
        // Its death is to be waited for, whatever it calls.
        case.parts.audit.wake();
        return Ok(());
    }
    case.log("more processes than can be kept account of");
    Err(Errno::ENOMEM.into())
}
