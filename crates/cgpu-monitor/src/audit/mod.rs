//! The audit: asks the driver and the kernel what the container has, compares the answers with the state, and acts.

mod clients;
mod escapes;
mod history;
mod judge;
mod reconciliation;
mod retained_exports;

pub(crate) use clients::has_left_clients;
pub(crate) use escapes::{end_escapes, search_after_end, since_search};
pub(crate) use history::{AuditHistory, EscapeFindings};
pub(crate) use reconciliation::{audit, reconcile};
pub(crate) use retained_exports::{
    clear_export, clear_exports, forget_export, forget_places, resume_export, scan_exports,
};
