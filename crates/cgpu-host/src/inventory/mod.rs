//! The GPUs of this host: index, UUID, minor number, bus id, memory, MIG.
//!
//! Knows what files say of them (a cache, `/proc/driver/nvidia`, an inventory file), and that
//! `cgpu` can ask NVML. Must not know NVML itself, nor containers. What it learns are the plain
//! values of [`gpu`](cgpu_core::gpu).
//!
//! [`cached`] reads files only, and is what runs when a container is created. [`refreshed`] starts
//! `cgpu` as a child with a time limit, since NVML takes long to load and may hang.

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
