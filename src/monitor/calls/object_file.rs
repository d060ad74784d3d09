//! A control that puts objects into a file, or makes names of what is in one.

use crate::monitor::calls::case::{Case, Over};
use crate::monitor::driver::export_files::Denied;
use crate::rm::export::Does;
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;
use crate::rm::{Answer, Layout};

/// An export or an import that is to be made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Control {
    /// Of its parameters.
    pub(crate) layout: &'static Layout,
    pub(crate) does: Does,
    pub(crate) client: u32,
    /// Where the caller has the parameters.
    pub(crate) params: u64,
}

pub(crate) fn denied(case: &mut Case<'_>, denied: Denied) -> Over {
    let (what, status) = match denied {
        Denied::Unknown => {
            ("an import of what this container didn't export", NV_ERR_INVALID_PARAMETER)
        }
        Denied::Full => ("more exports than can be kept account of", NV_ERR_INSUFFICIENT_RESOURCES),
    };
    case.log(what);
    case.answer(Answer::Status(status))
}
