//! The monitor's client of the driver, the objects that the client has, and the files that memory was exported to.

mod access;
mod export_files;
mod monitor_client;
mod probe;
mod stakes;
mod unanswered;

pub(crate) use access::DriverAccess;
pub(crate) use export_files::{Denied, Exported, Exports};
pub(crate) use monitor_client::{MonitorClient, Presence};
pub use probe::{examine, try_slice};
pub(crate) use stakes::Stakes;
pub use unanswered::{Amount, Unanswered};
