//! One way of isolating each, behind one trait: [`Isolation`].
//!
//! Knows how a plan becomes isolation. Backends must not know each other, and nothing
//! above them asks which one it has.

pub mod km;

pub mod none;

use thiserror::Error;

use crate::plan::{Kind, Plan};

/// A container as a backend sees it.
#[derive(Debug, Clone, Copy)]
pub struct Tenant<'a> {
    /// The container's id, as its engine calls it.
    pub id: &'a str,
    /// 12 ASCII characters, unique among the registered containers.
    pub short_id: &'a str,
    /// What it was promised.
    pub plan: &'a Plan,
}

/// What a backend can hold a container to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Memory quotas hold.
    pub memory: bool,
    /// Compute weights and priorities hold.
    pub compute: bool,
    /// Quotas of a running container can be changed.
    pub live_resize: bool,
    /// Isolation comes with the bundle alone: a hook can't add it to a container
    /// whose bundle was written without us.
    pub needs_bundle: bool,
}

/// What a backend knows of one container on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// The 12-character id.
    pub short_id: String,
    /// Index of the GPU.
    pub gpu_index: u32,
    /// The quota in bytes.
    pub memory_limit_bytes: u64,
    /// Memory in use in bytes; `None` where unknown.
    pub memory_used_bytes: Option<u64>,
}

/// A change to a running container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// A new quota on one GPU.
    MemoryLimit {
        /// Index of the GPU.
        gpu_index: u32,
        /// The quota in bytes.
        bytes: u64,
    },
    /// A new compute weight on all its GPUs.
    Weight(u32),
    /// A new priority on all its GPUs.
    HighPriority(bool),
}

/// One way of isolating containers on a GPU.
pub trait Isolation: std::fmt::Debug {
    /// Which backend this is.
    fn kind(&self) -> Kind;

    /// What it holds a container to.
    fn capabilities(&self) -> Capabilities;

    /// Whether it works on this host.
    ///
    /// # Errors
    ///
    /// Why not, and what to do.
    fn usable(&self) -> Result<(), BackendError>;

    /// Turns isolation on for a container whose processes have not started yet.
    ///
    /// # Errors
    ///
    /// Where any part did not take; then nothing of it is left behind.
    fn activate(&self, tenant: Tenant<'_>) -> Result<(), BackendError>;

    /// Ends isolation of a container that is gone; succeeds where nothing is left.
    ///
    /// # Errors
    ///
    /// What could not be removed; the rest is.
    fn deactivate(&self, short_id: &str) -> Result<(), BackendError>;

    /// What it holds now.
    ///
    /// # Errors
    ///
    /// Where it can't be read.
    fn list(&self) -> Result<Vec<Instance>, BackendError>;

    /// Changes a running container.
    ///
    /// # Errors
    ///
    /// Where the change did not take, or this backend has no such thing.
    fn set(&self, tenant: Tenant<'_>, change: Change) -> Result<(), BackendError>;
}

/// Why a backend could not do its part.
#[derive(Debug, Error)]
pub enum BackendError {
    /// The vendor's module.
    #[error(transparent)]
    Km(#[from] km::KmError),
    /// No isolation.
    #[error(transparent)]
    None(#[from] none::NoneError),
}
