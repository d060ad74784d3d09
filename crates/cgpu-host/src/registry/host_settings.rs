//! What was set of the host: the file `host` of the state directory, a JSON object.
//!
//! Owns the file. What isn't set isn't in it, so that the configuration applies to that. It outlasts every
//! process, as the records do. Must not know which values are possible.

use std::path::Path;
use std::{fs, io};

use serde::{Deserialize, Serialize};

use super::gpu_settings::{read_settings, write_settings};
use super::{Locked, Registry, RegistryError};

const FILE: &str = "host";

/// What was set of the host; what wasn't is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSettings {
    /// What a container gets of each GPU that names GPUs and asks for no quota, in MiB; 0 is the GPU without a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_memory_mib: Option<u64>,
}

impl Registry {
    /// What was set of the host.
    ///
    /// # Errors
    ///
    /// Where the file can't be read: then it isn't known what goes.
    pub fn host_settings(&self) -> Result<HostSettings, RegistryError> {
        read_settings(&self.dir.join(FILE))
    }

    /// Whether nothing was set of the host whose state directory that is: determined by one check, because every
    /// container creation asks.
    #[must_use]
    pub fn is_host_unset(state_dir: &Path) -> bool {
        let file = fs::symlink_metadata(state_dir.join(FILE));
        file.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
    }
}

impl Locked<'_> {
    /// Sets all of the host.
    ///
    /// # Errors
    ///
    /// Where that can't be written; then it is as it was.
    pub fn put_host(&mut self, settings: HostSettings) -> Result<(), RegistryError> {
        write_settings(&self.registry.dir.join(FILE), &settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is set of the host is retained, and a damaged file is reported.
    #[test]
    fn host_setting_persists_and_damage_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let registry = Registry::open(&state, "boot".into()).unwrap();
        assert_eq!(registry.host_settings().unwrap(), HostSettings::default());
        assert!(Registry::is_host_unset(&state));
        let settings = HostSettings { default_memory_mib: Some(4096) };
        registry.lock().unwrap().put_host(settings).unwrap();
        assert!(!Registry::is_host_unset(&state));
        let again = Registry::open_read_only(&state, "boot".into()).unwrap();
        assert_eq!(again.host_settings().unwrap(), settings);
        fs::write(state.join(FILE), "{").unwrap();
        assert!(registry.host_settings().unwrap_err().to_string().contains("/host"));
    }
}
