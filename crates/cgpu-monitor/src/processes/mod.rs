//! The container's processes, and what tells them and their files from others.

mod container_processes;
mod holder;
mod lost_container;
mod provenance;
mod provenance_index;

pub(crate) use container_processes::{
    all_pids, caller_pids, container_pids, is_container_or_monitor, is_of_host, kill_all_processes,
    kill_process, open_files, open_files_of,
};
pub(crate) use holder::{Consequence, Evidence, HolderFacts};
pub use lost_container::end_if_taken;
pub(crate) use provenance::Provenance;
pub(crate) use provenance_index::{
    ProvenanceIndex, descriptors_of, home_of, mount_namespace, mounts_of,
};
