//! A control on the monitor's copy of its parameters.

use crate::caller::Copy;
use crate::case::{Case, EarlyReply, begin};
use nvrm::Meaning;
use nvrm::number::NV_OK;

/// The most bytes of parameters with which an answer is retained for an interrupted caller. A control with more only
/// reports something, and can be made again.
const MOST_RETAINED_BYTES: usize = 4096;

/// Begins a control whose parameters are all read. The call is finished if its caller does not wait any more, or if an
/// answer is retained for that caller.
pub(crate) fn begin_control(case: &mut Case<'_>) -> Result<(), EarlyReply> {
    if case.scratch.params.len() <= MOST_RETAINED_BYTES {
        return begin(case);
    }
    case.scratch.input.clear();
    case.still_waits()
}

/// Makes the control on the copied parameters. `true` if its status is success.
pub(crate) fn make_control(case: &mut Case<'_>, params: u64) -> Result<bool, EarlyReply> {
    // If the caller gave no parameters, the driver gets none.
    let copy = if params == 0 { 0 } else { case.scratch.params.address() };
    case.patch(Meaning::Params, copy);
    let called = case.call();
    case.patch(Meaning::Params, params);
    called?;
    Ok(case.status() == NV_OK)
}

/// Has the parameters written back to the caller: those of a control that succeeded, and those of a failed control if
/// the driver changed them.
pub(crate) fn write_params_back(case: &mut Case<'_>, params: u64, done: bool) {
    if params != 0 && (done || *case.scratch.params_read() != *case.scratch.params) {
        case.write_back(1, params, Copy::Params);
    }
}
