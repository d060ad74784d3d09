//! The driver, asked by the monitor: calls on duplicates, and by a client of its own.

pub(crate) mod access;
pub(crate) mod buffer;
pub(crate) mod client_handover;
pub(crate) mod device;
pub(crate) mod monitor_client;
pub(crate) mod self_ranges;
pub(crate) mod stakes;
pub(crate) mod take_over;
