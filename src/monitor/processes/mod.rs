//! The container's processes, and what tells them and their files from others.

mod container_processes;
mod holder;
mod lost_container;
mod origin;
mod origins;

pub(crate) use container_processes::{Processes, all_pids, is_of_host};
pub(crate) use holder::{Consequence, Evidence, HolderFacts};
pub use lost_container::end_if_taken;
pub(crate) use origin::Origin;
pub(crate) use origins::{descriptors_of, home_of, mount_namespace, mounts_of};
