//! Container engines: where their configurations are, what these say, and how they are
//! edited so that the engine knows the runtime `cgpu`.
//!
//! `dialect` and [`containerd`] read and [`config_text`] edits: pure, text in, text out. `places` has
//! the files of each engine and `host_tree` how a host's files are read; [`plan`](mod@plan) plans
//! the edits of one engine, [`config_file`] reads a file for them and [`file_change`] makes them.
//! [`dump`] has containerd's own reading of them; [`service`] and `docker::reload` apply them.
//! [`runtime_below`] is about the runtime below ours, and [`serving`] about the containerd that
//! Kubernetes uses.
//! `cgpu doctor` reads through the same modules.
//! Must not know what a container is.

pub mod containerd;

mod named_runtime;

pub(crate) mod dialect;

pub mod config_text;

mod runtime_syntax;

mod toml_tables;

mod toml_style;

pub(crate) mod toml_values;

pub(crate) mod crio;

pub(crate) mod podman;

pub mod distributions;

pub(crate) mod host_tree;

pub(crate) mod places;

pub mod plan;

pub mod config_file;

pub mod file_change;

pub mod service;

pub mod docker;

pub mod dump;

pub mod runtime_below;

pub mod runtime_name;

pub(crate) mod child_output;

pub mod serving;

pub use named_runtime::Flaw;
pub(crate) use named_runtime::Named;

/// Which engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// dockerd.
    Docker,
    /// containerd, with its CRI for Kubernetes.
    Containerd,
    /// The containerd that k3s brings.
    K3s,
    /// The containerd that RKE2 brings.
    Rke2,
    /// The containerd that MicroK8s brings.
    MicroK8s,
    /// The containerd that k0s brings.
    K0s,
    /// CRI-O.
    Crio,
    /// podman.
    Podman,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 8] = [
        Kind::Docker,
        Kind::Containerd,
        Kind::K3s,
        Kind::Rke2,
        Kind::MicroK8s,
        Kind::K0s,
        Kind::Crio,
        Kind::Podman,
    ];

    /// The distributions of Kubernetes that bring a containerd.
    pub const DISTRIBUTIONS: [Kind; 4] = [Kind::K3s, Kind::Rke2, Kind::MicroK8s, Kind::K0s];

    /// Whether its files are containerd's.
    #[must_use]
    pub fn is_containerd(self) -> bool {
        self == Kind::Containerd || Kind::DISTRIBUTIONS.contains(&self)
    }

    /// What people call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Docker => "docker",
            Kind::Containerd => "containerd",
            Kind::K3s => "k3s",
            Kind::Rke2 => "rke2",
            Kind::MicroK8s => "microk8s",
            Kind::K0s => "k0s",
            Kind::Crio => "cri-o",
            Kind::Podman => "podman",
        }
    }
}

/// Something that may be there or not, or not be readable, as a sentence says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen<T> {
    /// It isn't there.
    Absent,
    /// It can't be read, or not understood.
    Unreadable(String),
    /// This is it.
    Found(T),
}
