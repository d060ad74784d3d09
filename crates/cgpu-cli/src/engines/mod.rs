//! Container engines: their programs and configurations, and the edits that add the runtime
//! `cgpu` to a configuration or remove it.
//!
//! Each engine has its module, which reads, edits and reloads it: [`docker`], [`containerd`],
//! [`distributions`] (k3s, RKE2, MicroK8s, k0s), `crio`, `podman`. What they share is below them.
//! An `installation` has an engine's programs and files, and `host_tree` reads a host's files.
//! [`plan`](mod@plan) plans the edits of one engine: [`config_file`] reads a file for them,
//! [`config_text`] edits its text, by `toml_tables` if it is TOML, and [`file_change`] writes it.
//! [`service`] restarts the engine. [`runtime_below`] is about the runtime below ours. `cgpu doctor`
//! reads through the same modules.
//!
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
pub(crate) use named_runtime::NamedRuntime;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Docker,
    Containerd,
    K3s,
    Rke2,
    MicroK8s,
    K0s,
    Crio,
    Podman,
}

impl Kind {
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

    /// The name in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.installation().name
    }
}

/// The result of reading what may not exist or not be readable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed<T> {
    Absent,
    /// The reason is a sentence.
    Unreadable(String),
    Present(T),
}
