//! Where the inventory comes from, and the way to it that costs nothing.
//!
//! Owns the choice between a file and the driver. Must not reach NVML: this is what
//! runs when a container is created.

use std::path::{Path, PathBuf};

use thiserror::Error;

use super::{FileError, Fingerprint, FingerprintError, cache, file};
use cgpu_core::gpu::Inventory;

/// Where to learn of the GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// What knows them.
    pub source: Source,
    /// Where the driver's user-space files are: `/`, or where a container put them.
    pub driver_root: PathBuf,
    /// Where the cache is kept.
    pub state_dir: PathBuf,
    /// `/proc`.
    pub proc_root: PathBuf,
    /// MiB of each GPU that are kept at least: NVML may say that the driver keeps more.
    pub reserve_mib: u64,
}

/// What knows the GPUs: `source` under `[inventory]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Source {
    /// The driver.
    #[default]
    Auto,
    File(PathBuf),
}

/// Why it can't be determined which GPUs this host has.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The inventory file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The driver.
    #[error(transparent)]
    Driver(#[from] FingerprintError),
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            source: Source::Auto,
            driver_root: PathBuf::from("/"),
            state_dir: PathBuf::from("/run/cgpu"),
            proc_root: PathBuf::from("/proc"),
            reserve_mib: 0,
        }
    }
}

impl Settings {
    /// The inventory file, where there is one.
    pub fn file(&self) -> Option<&Path> {
        match &self.source {
            Source::Auto => None,
            Source::File(path) => Some(path),
        }
    }
}

/// The GPUs as far as they are known without asking the driver: those of the file, or
/// of the cache while the driver is in the state it was written in.
///
/// # Errors
///
/// Where the file isn't an inventory, or there is no driver whose GPUs a cache could
/// hold. A cache that is missing, damaged or outdated is `None`.
pub fn cached(settings: &Settings) -> Result<Option<Inventory>, LoadError> {
    if let Some(path) = settings.file() {
        return Ok(Some(file::load(path)?.reserving(settings.reserve_mib)));
    }
    let now = Fingerprint::read(&settings.proc_root)?;
    let found = cache::read(&settings.state_dir, &now);
    Ok(found.map(|inventory| inventory.reserving(settings.reserve_mib)))
}
