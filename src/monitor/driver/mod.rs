//! The driver, asked by the monitor: calls on duplicates, and by a client of its own.

pub(crate) mod access;
pub(crate) mod export_files;
pub(crate) mod monitor_client;
pub(crate) mod stakes;
pub(crate) mod take_over;
pub(crate) mod unanswered;
