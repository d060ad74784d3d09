//! The container's processes, and outside processes that have its descriptors.

pub(crate) mod container_processes;
pub(crate) mod escaped_fds;
pub(crate) mod origin;
