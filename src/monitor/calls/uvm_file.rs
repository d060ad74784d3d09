//! The file of UVM's that a call is made by.

use std::sync::Arc;

use nix::errno::Errno;

use crate::gate::settings::NodeKind;
use crate::monitor::calls::case::retry::begin_on_lane_in_turn;
use crate::monitor::calls::case::{Case, Over};
use crate::monitor::journal::call_id::CallObject;
use crate::monitor::log::limit::Topic;
use crate::monitor::node::device::Device;
use crate::monitor::state::lane::OnLane;
use crate::monitor::uvm::files::UvmFile;
use crate::rm::number::{
    NV_ERR_INSUFFICIENT_RESOURCES, NV_ERR_INVALID_ARGUMENT, NV_ERR_INVALID_DEVICE,
};
use crate::rm::{Answer, uvm};

/// The driver's file that a descriptor of the caller's is, if it's one of `nvidiactl`: as it was before
/// the call came onto the lane, since what else it is may take its time to be closed.
pub(crate) fn control_file(case: &Case<'_>, descriptor: i32) -> Result<Option<Device>, Over> {
    let file = case.target()?.duplicate(descriptor)?;
    let device = Device::of(&case.parts.state.settings.nodes, file);
    case.still_waits()?;
    Ok(device.filter(|device| device.kind == NodeKind::Control))
}

/// Asks UVM what the caller asked.
pub(crate) fn ask(case: &mut Case<'_>) -> Result<(), Over> {
    let [_, request, ..] = case.notice.data.args;
    let number = uvm::number(request);
    let Some(device) = &case.device else { return Err(Errno::EBADF.into()) };
    device.call_uvm(&case.parts.state.release, number, &mut case.scratch.bytes)?;
    if case.scratch.bytes.was_exceeded()
        && case.parts.state.log.limit.take_first_line(Topic::Uvm(number))
    {
        let driver = case.parts.state.release.version();
        let container = case.parts.state.settings.short_id.as_str();
        tracing::warn!(container, number, %driver, "UVM's struct is larger than the one known");
    }
    Ok(())
}

/// A file that ends with a maker who is over is refused.
pub(crate) fn refuse_orphaned(case: &mut Case<'_>) -> Over {
    case.log("a file of nvidia-uvm whose maker is over, or unknown");
    case.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT))
}

/// The driver is asked from here on, for nothing that has a handle.
pub(crate) fn on_lane_for_uvm<'a>(case: &mut Case<'a>) -> Result<OnLane<'a>, Over> {
    let lane = begin_on_lane_in_turn(case)?;
    case.slot.set_executing(CallObject::one(0, 0, true));
    Ok(lane)
}

/// Does what changes the call's file, which is kept from now on.
pub(crate) fn on_lane_with_file<T>(
    case: &mut Case<'_>,
    change: impl FnOnce(&mut Case<'_>, &OnLane<'_>, &UvmFile) -> Result<T, Over>,
) -> Result<T, Over> {
    loop {
        let file = kept(case)?;
        let lane = on_lane_for_uvm(case)?;
        if !file.is_let_go() {
            refuse_condemned(case, &file)?;
            return change(case, &lane, &file);
        }
    }
}

/// A file that gets no GPU any more is refused.
pub(crate) fn refuse_condemned(case: &mut Case<'_>, file: &UvmFile) -> Result<(), Over> {
    if !file.is_condemned() {
        return Ok(());
    }
    case.log("a file of nvidia-uvm that had managed memory, or whose maker is over");
    Err(case.answer(Answer::Status(NV_ERR_INVALID_DEVICE)))
}

/// The call's file, kept from now on.
pub(crate) fn kept(case: &mut Case<'_>) -> Result<Arc<UvmFile>, Over> {
    let seen = (case.target()?.tid.cast_unsigned(), case.descriptor());
    if let Some(file) = case.parts.uvm.keep(case.device()?, seen) {
        return Ok(file);
    }
    case.log("more files of nvidia-uvm than can be kept account of");
    Err(case.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES)))
}

pub(crate) fn gpu_of(case: &Case<'_>, uuid: [u8; 16]) -> Option<u16> {
    u16::try_from(case.parts.state.gpu_of(&uuid)?).ok()
}
