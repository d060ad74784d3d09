//! The container's processes, and what tells them and their files from others.

mod container_processes;
mod origin;
mod origins;

pub(crate) use container_processes::{Processes, all_pids, is_of_host};
pub(crate) use origin::{Origin, mounts};
pub(crate) use origins::{home_of, mount_namespace};
