//! The gate: memory quotas held at the driver's ioctl boundary.
//!
//! Owns how a container's driver calls reach its monitor and what the monitor answers.
//! Must not know OCI beyond one section of it: [`seccomp`], which makes the calls come.

pub mod seccomp;
