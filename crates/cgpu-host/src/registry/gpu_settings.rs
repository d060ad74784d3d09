//! What was set of the GPUs: the file `gpus` of the state directory, a JSON object by UUID.
//!
//! Owns the file. What isn't set isn't in it, so that the configuration applies to that. It lies
//! where the records lie: it outlasts every process, and ends with the boot if the state
//! directory is on a tmpfs. Must not know which values are possible.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::error::failed;
use super::{Locked, Registry, RegistryError};
use crate::atomic_file::replace;
use cgpu_core::plan::GpuChange;

const FILE: &str = "gpus";

/// What was set of a GPU; what wasn't is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuSettings {
    /// How computing time is shared, 0 to 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<u32>,
    /// The most containers with a quota, and the sum of their weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_inst: Option<u32>,
    /// Per cent that containers of high priority may take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prio_ratio: Option<u32>,
}

impl GpuSettings {
    /// These after `change`.
    #[must_use]
    pub fn after(mut self, change: GpuChange) -> Self {
        match change {
            GpuChange::Policy(policy) => self.policy = Some(policy),
            GpuChange::MaxInst(max_inst) => self.max_inst = Some(max_inst),
            GpuChange::PrioRatio(prio_ratio) => self.prio_ratio = Some(prio_ratio),
        }
        self
    }
}

impl Registry {
    /// What was set of the GPUs, by UUID.
    ///
    /// # Errors
    ///
    /// If the file can't be read: then it isn't known what may be reserved.
    pub fn gpu_settings(&self) -> Result<BTreeMap<String, GpuSettings>, RegistryError> {
        read_settings(&self.dir.join(FILE))
    }
}

impl Locked<'_> {
    /// Sets `change` of the GPU with that UUID.
    ///
    /// # Errors
    ///
    /// Where that can't be written; then it is as it was.
    pub fn put_gpu(&mut self, uuid: &str, change: GpuChange) -> Result<(), RegistryError> {
        let mut all = self.registry.gpu_settings()?;
        let settings = all.entry(uuid.to_owned()).or_default();
        *settings = settings.after(change);
        write_settings(&self.registry.dir.join(FILE), &all)
    }
}

/// What a file of settings says; nothing, if there is none.
pub(super) fn read_settings<T: DeserializeOwned + Default>(
    path: &Path,
) -> Result<T, RegistryError> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map_err(|source| RegistryError::DamagedSettings { path: path.to_owned(), source }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(T::default()),
        Err(source) => Err(failed("cannot read", path)(source)),
    }
}

/// Has a file of settings say that.
pub(super) fn write_settings(path: &Path, settings: &impl Serialize) -> Result<(), RegistryError> {
    let bytes = serde_json::to_vec(settings).map_err(io::Error::from);
    let written = bytes.and_then(|bytes| replace(path, &bytes, 0o600));
    written.map_err(failed("cannot write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is set of a GPU is retained, and its other settings stay as they were.
    #[test]
    fn gpu_setting_persists_and_leaves_the_others() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let registry = Registry::open(&state, "boot".into()).unwrap();
        assert!(registry.gpu_settings().unwrap().is_empty());
        let mut locked = registry.lock().unwrap();
        locked.put_gpu("GPU-a", GpuChange::MaxInst(3)).unwrap();
        locked.put_gpu("GPU-b", GpuChange::Policy(2)).unwrap();
        locked.put_gpu("GPU-a", GpuChange::PrioRatio(30)).unwrap();
        drop(locked);
        // Another program, later.
        let settings =
            Registry::open_read_only(&state, "boot".into()).unwrap().gpu_settings().unwrap();
        let a = GpuSettings { policy: None, max_inst: Some(3), prio_ratio: Some(30) };
        let b = GpuSettings { policy: Some(2), ..GpuSettings::default() };
        assert_eq!(settings, [("GPU-a".to_owned(), a), ("GPU-b".to_owned(), b)].into());
        fs::write(state.join(FILE), "{").unwrap();
        let error = registry.gpu_settings().unwrap_err().to_string();
        assert!(error.contains("/gpus"), "{error}");
    }
}
