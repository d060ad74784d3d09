//! The monitor's client of the driver, the objects that the client has, and the files that memory was exported to.

pub(crate) mod access;
pub(crate) mod export_files;
pub(crate) mod monitor_client;
pub(crate) mod stakes;
pub(crate) mod take_over;
pub(crate) mod unanswered;
