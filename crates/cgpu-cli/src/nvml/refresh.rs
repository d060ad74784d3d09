//! Asking the driver, and keeping what it said.
//!
//! Reaches NVML, so only `cgpu` calls this; all other programs read what it left.

use thiserror::Error;

use crate::nvml::session::{ProbeError, Session};
use cgpu_core::gpu::Inventory;
use cgpu_host::inventory::{
    CacheError, Fingerprint, FingerprintError, LoadError, Settings, cache, file,
};

/// How often the GPUs may change while they are listed.
const TRIES: u32 = 3;

/// Why the driver could not be asked, or its answer not be kept.
#[derive(Debug, Error)]
pub enum RefreshError {
    /// The file, or the absence of a driver.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// NVML.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// The cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// GPUs come and go.
    #[error("the GPUs changed {TRIES} times while they were listed; try again when they don't")]
    Restless,
}

impl From<FingerprintError> for RefreshError {
    fn from(error: FingerprintError) -> Self {
        RefreshError::Load(LoadError::Driver(error))
    }
}

/// The GPUs as the driver, or the inventory file, reports them now.
///
/// # Errors
///
/// Where the file isn't an inventory; where there is no driver, or NVML fails.
pub fn probe(settings: &Settings) -> Result<Inventory, RefreshError> {
    match settings.file() {
        Some(path) => Ok(file::load(path).map_err(LoadError::File)?),
        None => Ok(ask(settings)?.1),
    }
}

/// [`probe`], and the cache written for [`cached`](cgpu_host::inventory::cached) to read. An inventory
/// file needs no cache and is only checked.
///
/// # Errors
///
/// Those of [`probe`], and where the cache can't be written.
pub fn refresh(settings: &Settings) -> Result<Inventory, RefreshError> {
    if settings.file().is_some() {
        return probe(settings);
    }
    let (fingerprint, inventory) = ask(settings)?;
    cache::write(&settings.state_dir, fingerprint, &inventory)?;
    Ok(inventory)
}

/// What NVML says, with the state of the driver that it was said in.
///
/// Opening a GPU may itself change the state (its UUID becomes known, its MIG instances
/// come back), so the session stays open until the state is the same before and after.
fn ask(settings: &Settings) -> Result<(Fingerprint, Inventory), RefreshError> {
    let mut before = Fingerprint::read(&settings.proc_root)?;
    let session = Session::open(&settings.driver_root)?;
    for _ in 0..TRIES {
        let inventory = session.list(before.gpus())?;
        let after = Fingerprint::read(&settings.proc_root)?;
        if before.holds_in(&after) {
            return Ok((after, inventory));
        }
        before = after;
    }
    Err(RefreshError::Restless)
}
