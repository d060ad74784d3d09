//! Whose turn it is to have a file of UVM's initialized.

use std::sync::atomic::{AtomicBool, AtomicI32};

/// Whose turn it is to initialize a file. What is underway is in the books, under whose lock this
/// changes.
#[derive(Debug, Default)]
pub(crate) struct Initializing {
    /// Whether somebody has the turn whose call isn't underway yet.
    pub(crate) is_taken: AtomicBool,
    /// The thread whose call is underway; 0 where nothing is.
    pub(crate) tid: AtomicI32,
}
