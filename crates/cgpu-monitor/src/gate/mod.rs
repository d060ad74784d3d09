//! The gate: seccomp user notification brings a container's driver ioctls to a monitor.
//!
//! Owns a call's way to the monitor, and how other programs speak with a monitor. The [monitor](crate::daemon) decides
//! what becomes of a call. Of OCI the gate knows a bundle's seccomp profile alone.

pub mod entry;

pub(crate) mod bpf;

pub mod filter;

pub mod profile;

pub mod settings;

pub mod wire;

pub(crate) mod fd_passing;

pub(crate) mod inherited;

pub mod own_cgroup;

pub mod launch;

pub mod client;

pub mod upgrade;

pub(crate) mod traps;

pub mod syscall;

pub mod status_file;

pub use traps::{is_decided_by_monitor, may_have_grown};
