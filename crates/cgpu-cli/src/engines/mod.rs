//! Container engines: where their configurations are, what these say, and how they are
//! edited so that the engine knows the runtime `cgpu`.
//!
//! Each engine has its module: [`docker`], [`containerd`], [`distributions`], [`crio`], [`podman`].
//! What they share is below them. An [`installation`] has an engine's programs and files, and
//! [`host_tree`] reads a host's files. [`plan`](mod@plan) plans the edits of one engine:
//! [`config_file`] reads a file for them, [`config_text`] edits its text, by [`toml_tables`] if it
//! is TOML, and [`file_change`] writes it. [`service`] restarts the engine. [`runtime_below`] is
//! about the runtime below ours. `cgpu doctor` reads through the same modules.
//! Must not know what a container is.

pub mod docker;

pub mod containerd;

pub mod distributions;

pub(crate) mod crio;

pub(crate) mod podman;

pub(crate) mod hooks;

pub mod plan;

pub mod config_text;

mod runtime_syntax;

mod toml_tables;

mod toml_style;

pub(crate) mod toml_values;

pub mod config_file;

pub mod file_change;

pub mod service;

pub mod runtime_below;

pub(crate) mod installation;

mod named_runtime;

pub mod runtime_name;

pub(crate) mod host_tree;

pub(crate) mod child_output;

#[cfg(test)]
mod tests;

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
        self.installation().name
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
