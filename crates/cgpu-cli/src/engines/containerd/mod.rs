//! containerd: the releases, the files that a configuration imports, and the runtimes of its
//! plugin for Kubernetes.
//!
//! `imports` finds the files; `merged_config` merges them as a [`release`] does; `runtimes` finds
//! ours there, and the one that ours is to be like; `cri_table` edits them. [`config_dump`] has
//! containerd's own reading.

pub mod config_dump;
pub(crate) mod cri_table;
pub(crate) mod imports;
pub(crate) mod merged_config;
pub mod release;
pub(crate) mod runtimes;

pub(crate) use merged_config::File;
pub use release::{Reading, Release};

use super::installation::Installation;

pub(super) const INSTALLATION: Installation = Installation {
    name: "containerd",
    programs: &["containerd"],
    containerd: Some("containerd"),
    main_file: "/etc/containerd/config.toml",
    units: &["containerd"],
    ..Installation::NONE
};
