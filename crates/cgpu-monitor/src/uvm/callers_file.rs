//! The file of nvidia-uvm that a call is made by.

use std::sync::Arc;

use nix::errno::Errno;

use crate::case::{Case, EarlyReply, take_rm_lock};
use crate::decide::RefusalReason;
use crate::gate::settings::NodeKind;
use crate::log::Topic;
use crate::node::Device;
use crate::state::UnderRmLock;
use crate::uvm::files::UvmFile;
use crate::uvm::retained_files::keep_uvm_file;
use nvrm::low_word;

/// The `nvidiactl` file that one of the caller's descriptors is; `None` for another file. The caller of this function
/// does not hold the RM lock yet: the duplicate of another file may take long to close.
pub(crate) fn control_file(case: &Case<'_>, descriptor: i32) -> Result<Option<Device>, EarlyReply> {
    let file = case.target()?.duplicate(descriptor)?;
    let device = Device::of(&case.monitor.settings.nodes, file);
    case.still_waits()?;
    Ok(device.filter(|device| device.kind == NodeKind::Control))
}

/// Makes the call on the copied struct. Logs a struct that is larger than the known one.
pub(crate) fn call_uvm(case: &mut Case<'_>) -> Result<(), EarlyReply> {
    let [_, request, ..] = case.notice.data.args;
    let number = low_word(request);
    let Some(device) = &case.device else { return Err(Errno::EBADF.into()) };
    device.call_uvm(&case.monitor.release, number, &mut case.scratch.bytes)?;
    if case.scratch.bytes.was_exceeded()
        && case.monitor.log.limit.take_first_line(Topic::Uvm(number))
    {
        let driver = case.monitor.release.version();
        let container = case.monitor.settings.short_id.as_str();
        tracing::warn!(container, number, %driver, "UVM's struct is larger than the one known");
    }
    Ok(())
}

/// Retains the call's file from now on, and runs `change` under the RM lock. Begins again if the file was released
/// meanwhile.
pub(crate) fn change_under_rm_lock<T>(
    case: &mut Case<'_>,
    change: impl FnOnce(&mut Case<'_>, &UnderRmLock<'_>, &UvmFile) -> Result<T, EarlyReply>,
) -> Result<T, EarlyReply> {
    loop {
        let file = keep_file(case)?;
        let rm_lock = take_rm_lock(case)?;
        if !file.is_let_go() {
            refuse_denied(case, &file)?;
            return change(case, &rm_lock, &file);
        }
    }
}

/// Refuses a call on a file that gets no GPU any more.
pub(crate) fn refuse_denied(case: &mut Case<'_>, file: &UvmFile) -> Result<(), EarlyReply> {
    if file.is_denied_gpus() { Err(case.deny(&RefusalReason::UvmRefused)) } else { Ok(()) }
}

/// Retains the call's file from now on, and returns it. Refuses the call if too many files are retained.
pub(crate) fn keep_file(case: &mut Case<'_>) -> Result<Arc<UvmFile>, EarlyReply> {
    let seen = (case.target()?.tid.cast_unsigned(), case.descriptor());
    let retained = keep_uvm_file(case.monitor, case.device()?, seen);
    case.or_deny(retained.ok_or(RefusalReason::Full("files of nvidia-uvm")))
}

/// The number of the container's GPU with this UUID.
pub(crate) fn gpu_of(case: &Case<'_>, uuid: [u8; 16]) -> Option<u16> {
    u16::try_from(case.monitor.gpu_of(&uuid)?).ok()
}
