//! The container's processes, and how they and their files are distinguished from others.

mod closed_container;
mod container_processes;
mod holder;
mod provenance;
mod provenance_index;

pub use closed_container::end_if_taken;
pub(crate) use container_processes::{
    all_pids, caller_pids, container_pids, is_container_or_monitor, is_of_host, kill_all_processes,
    kill_process, open_files, open_files_of,
};
pub(crate) use holder::{Consequence, Evidence, HolderFacts};
pub(crate) use provenance::Provenance;
pub(crate) use provenance_index::{
    ProvenanceIndex, descriptors_of, home_of, mount_namespace, mounts_of,
};
