//! The monitor's client of the driver, the objects that the client has, and the files that memory was exported to.

mod access;
mod export_files;
mod monitor_client;
mod pins;
mod probe;
mod unanswered_calls;

pub(crate) use access::{
    answered, client_if_open, close_client_if_unused, driver_usage_of, own_client, presence,
    resume_client,
};
pub(crate) use export_files::{Denied, Exported, Exports};
pub(crate) use monitor_client::{MonitorClient, Presence};
pub(crate) use pins::{
    free_pins, free_pins_soon, pin_behind, pin_behind_export, pin_export, pin_handle, pin_mappings,
};
pub use probe::{examine, try_slice};
pub(crate) use unanswered_calls::WarningTimes;
pub use unanswered_calls::{Amount, Unanswered};
