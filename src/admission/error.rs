//! Why a container can't have what it asks for: one of the modules' reasons, or one of these.

use std::path::PathBuf;

use thiserror::Error;

use crate::backend::BackendError;
use cgpu_core::plan::{ChangeError, GpuChangeError, Refusal, ResolveError};
use cgpu_core::request::RequestError;
use cgpu_host::events::Cause;
use cgpu_host::grants::GrantError;
use cgpu_host::inventory;
use cgpu_host::registry::RegistryError;
use cgpu_inject::bundle::BundleError;
use cgpu_inject::capabilities::CapabilityError;
use cgpu_inject::{InjectError, NodeError};

/// Why a container doesn't get what it asks for.
#[derive(Debug, Error)]
pub enum AdmissionError {
    /// What it asks for can't be meant.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// What it asks for isn't there.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// Others have it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// A change can't be meant.
    #[error(transparent)]
    Change(#[from] ChangeError),
    /// A GPU can't be changed so.
    #[error(transparent)]
    GpuChange(#[from] GpuChangeError),
    /// No GPU has that name.
    #[error("this host has no GPU {word}; `cgpu gpus` lists indices, UUIDs and PCI addresses")]
    NoSuchGpu {
        /// What was asked for.
        word: String,
    },
    /// The GPUs aren't known.
    #[error(transparent)]
    Gpus(#[from] inventory::LoadError),
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The host's GPUs.
    #[error(transparent)]
    Inventory(#[from] inventory::ChildError),
    /// The same, for a container without a quota: its image may have asked without its user.
    #[error("{setting}: {source}; or start it without GPUs, with NVIDIA_VISIBLE_DEVICES=void")]
    NoGpus {
        /// What asks for GPUs.
        setting: String,
        /// Why there are none.
        #[source]
        source: inventory::ChildError,
    },
    /// What Kubernetes gave it.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// What a claim gives is another container's.
    #[error(
        "the claim's share {share} is in use by the container {by}: Kubernetes divides nothing between the containers of \
         a claim; give each its own claim, by a ResourceClaimTemplate say, or its own request of the claim"
    )]
    ShareInUse {
        /// The share, as `claim's UID/request`.
        share: String,
        /// The container that has it, by its name if it has one.
        by: String,
    },
    /// Their device nodes.
    #[error(transparent)]
    Nodes(#[from] NodeError),
    /// The nodes of MIG.
    #[error(transparent)]
    Capabilities(#[from] CapabilityError),
    /// NVIDIA's runtime has brought more than the plan has.
    #[error(
        "NVIDIA's runtime has brought {node}, whose memory no quota sees, into a container with a quota; \
         set mode = \"legacy\" in its /etc/nvidia-container-runtime/config.toml, or inject = \"auto\" \
         under [driver]"
    )]
    MoreByNvidia {
        /// What it has brought.
        node: String,
    },
    /// The driver's files.
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The isolation.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The monitors' directory.
    #[error("cannot list {}: {source}; run this as root", path.display())]
    Monitors {
        /// The directory.
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// We are not the host's root.
    #[error(
        "the engine isn't run by the host's root, and only root's containers have quotas, or GPUs of a host \
         with exclusive = true; run the engine as root, or ask for whole GPUs: drop the quota (CGPU_MEMORY, \
         ALIYUN_COM_GPU_*, NVIDIA_GPU_MEMORY_LIMIT)"
    )]
    Rootless,
    /// One of our own programs can't be found.
    #[error("cannot find {program} beside {}; install cgpu's programs in one directory", own.display())]
    Incomplete {
        program: &'static str,
        /// The one that is running.
        own: PathBuf,
    },
}

impl AdmissionError {
    /// What kept a container from being made.
    #[must_use]
    pub fn why(&self) -> Cause {
        match self {
            AdmissionError::Refused(refusal) => match refusal {
                Refusal::Memory { .. }
                | Refusal::TooMuch { .. }
                | Refusal::NotEnoughMemory { .. } => Cause::Memory,
                Refusal::Containers { .. } => Cause::Containers,
                Refusal::Weight { .. } | Refusal::Share { .. } | Refusal::SmallShare { .. } => {
                    Cause::Weight
                }
                Refusal::Exclusive { .. } => Cause::Exclusive,
            },
            AdmissionError::Request(_)
            | AdmissionError::Resolve(_)
            | AdmissionError::Change(_)
            | AdmissionError::GpuChange(_)
            | AdmissionError::NoSuchGpu { .. }
            | AdmissionError::Grant(_)
            | AdmissionError::ShareInUse { .. } => Cause::Request,
            AdmissionError::Gpus(_)
            | AdmissionError::Inventory(_)
            | AdmissionError::NoGpus { .. }
            | AdmissionError::MoreByNvidia { .. }
            | AdmissionError::Nodes(_)
            | AdmissionError::Capabilities(_)
            | AdmissionError::Inject(_) => Cause::Driver,
            AdmissionError::Backend(_) => Cause::Isolation,
            AdmissionError::Bundle(_)
            | AdmissionError::Registry(_)
            | AdmissionError::Monitors { .. }
            | AdmissionError::Rootless
            | AdmissionError::Incomplete { .. } => Cause::Host,
        }
    }
}
