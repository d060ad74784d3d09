//! The GPUs of this host: index, UUID, minor number, bus id, memory, MIG.
//!
//! Knows GPUs and where to learn of them (a cache, `/proc/driver/nvidia`, NVML, a
//! file). Must not know containers. What it learns are the plain values of [`gpu`](cgpu_core::gpu).
//!
//! Three ways lead to one. [`cached`] reads files only and is what runs when a
//! container is created. [`probe`] and [`refresh()`] load NVML, which takes long and may
//! hang, so only `cgpu` calls them. [`refreshed`] is how the first gets to the last:
//! `cgpu` as a child with a time limit.

pub mod file;

mod source;

pub mod bus_id;

mod fingerprint;

pub mod cache;

mod child;

#[cfg(test)]
mod fixture;

use std::path::Path;

pub use cache::CacheError;
pub use child::{ChildError, listed, refreshed};
pub use file::FileError;
pub use fingerprint::{Fingerprint, FingerprintError, KernelGpu};
pub use source::{LoadError, Settings, Source, cached};

/// The version of the driver that the kernel has, by its `driver/nvidia/version` below `proc_root`; `None` where
/// there is none.
#[must_use]
pub fn driver_version(proc_root: &Path) -> Option<String> {
    let banner = std::fs::read_to_string(proc_root.join("driver/nvidia/version")).ok()?;
    nvrm::Version::in_banner(&banner).map(|version| version.to_string())
}
