//! The gate: the driver's ioctl boundary, held by seccomp user notification.
//!
//! Owns how calls come to a monitor, and how others speak with it. What becomes of a call is the
//! [`monitor`](crate::monitor)'s. Must not know OCI beyond the section that is merged into a bundle.

pub mod enter;

pub mod filter;

pub mod seccomp;

pub mod settings;

pub mod wire;

pub(crate) mod passing;

pub(crate) mod inherited;

pub mod launch;

pub mod client;

pub mod upgrade;

pub(crate) mod traps;

pub mod syscall;

pub mod figures;

pub use traps::{TRAPS, is_driver_call, may_have_grown};
