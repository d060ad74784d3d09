//! The container's processes, and outside processes that have its descriptors.

mod container_processes;
mod escaped_fds;
mod origin;

pub(crate) use container_processes::{Processes, all_pids, mount_namespace};
pub(crate) use escaped_fds::{Evidence, FirstProcess};
pub(crate) use origin::mounts;
