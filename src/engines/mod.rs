//! Container engines: where their configurations are, what these say, and how they are
//! edited so that the engine knows the runtime `cgpu`.
//!
//! `dialect` reads and [`edit`] edits: pure, text in, text out. `places` knows the files of
//! each engine and `files` how a host's files are read; [`change`] plans the edits of one
//! engine and [`write`](mod@write) makes them. [`restart`] and [`dockerd`] bring them into force.
//! `cgpu doctor` reads through the same modules.
//! Must not know what a container is.

pub(crate) mod dialect;

pub mod edit;

pub(crate) mod files;

pub(crate) mod places;

pub mod change;

pub mod original;

pub mod write;

pub mod restart;

pub mod dockerd;

/// Which engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// dockerd.
    Docker,
    /// containerd, with its CRI for Kubernetes.
    Containerd,
    /// CRI-O.
    Crio,
    /// podman.
    Podman,
}

impl Kind {
    /// What people call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Docker => "docker",
            Kind::Containerd => "containerd",
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

/// What is wrong with a runtime's section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// It is for the other version of containerd's configuration.
    OtherVersion {
        /// The file's.
        file: i64,
        /// The section's.
        section: i64,
    },
    /// Its cgroups aren't made by whom the others' are.
    OtherCgroups {
        /// Whether systemd makes the others'.
        systemd: bool,
    },
    /// Our annotations aren't passed on.
    NoAnnotations,
}
