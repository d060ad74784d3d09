//! A control is made on our copy of its parameters.

use crate::monitor::caller::scratch::Copy;
use crate::monitor::calls::case::retry::begin;
use crate::monitor::calls::case::{Case, Over};
use crate::rm::Meaning;
use crate::rm::number::NV_OK;

/// Bytes of parameters of which an answer is kept for a caller that was interrupted: what
/// is larger tells something, and can be asked again.
const ONCE_BYTES: usize = 4096;

/// All is read: whether the caller still waits, and was answered already.
pub(crate) fn settle(case: &mut Case<'_>) -> Result<(), Over> {
    if case.scratch.params.len() <= ONCE_BYTES {
        return begin(case);
    }
    case.scratch.input.clear();
    case.still_waits()
}

/// Makes it on the parameters that we have, and tells whether it was done.
pub(crate) fn make_control(case: &mut Case<'_>, params: u64) -> Result<bool, Over> {
    // Where the caller has none, the driver gets none.
    let ours = if params == 0 { 0 } else { case.scratch.params.address() };
    case.patch(Meaning::Params, ours);
    let called = case.call();
    case.patch(Meaning::Params, params);
    called?;
    Ok(case.status() == NV_OK)
}

/// The parameters go back. Of a control that failed too, where it says something in them;
/// where it doesn't, the driver writes nothing.
pub(crate) fn give_back(case: &mut Case<'_>, params: u64, done: bool) {
    if params != 0 && (done || *case.scratch.params_read() != *case.scratch.params) {
        case.write_back(1, params, Copy::Params);
    }
}
