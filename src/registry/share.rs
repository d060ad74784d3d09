//! What containers have of a GPU's computing time: a file a GPU in `STATE_DIR/shares`, by its UUID.
//!
//! Derived from the records and what was set of the GPUs, and written anew whenever these change;
//! monitors follow it. A GPU on which nobody has a quota has none. Owns the file's form.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::{Deserialize, Serialize};

use super::error::failed;
use super::notice::Notice;
use super::{Locked, RegistryError};
use crate::plan::GpuRules;
use crate::replace::replace;
use crate::sched::{Round, Tenant, rounds};

/// The directory's name in the state directory.
pub const DIR: &str = "shares";

/// What all containers have of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The policy that is held, 0 to 5.
    pub policy: u32,
    /// By short id.
    pub rounds: BTreeMap<String, Round>,
}

impl Share {
    /// What the container with that short id has.
    #[must_use]
    pub fn round(&self, short_id: &str) -> Option<Round> {
        self.rounds.get(short_id).copied()
    }

    /// The part of the GPU that the container with that short id has while all have work, from 0 to 1.
    #[must_use]
    pub fn part(&self, short_id: &str) -> Option<f64> {
        let all: u64 = self.rounds.values().map(|round| round.us).sum();
        let own = self.round(short_id)?.us;
        #[allow(clippy::cast_precision_loss, reason = "microseconds of a fraction of a second")]
        Some(own as f64 / all.max(1) as f64)
    }
}

/// Where the files are.
#[must_use]
pub fn dir(state_dir: &Path) -> PathBuf {
    state_dir.join(DIR)
}

/// What the containers have of the GPU with that UUID; `None` where there is no file.
///
/// # Errors
///
/// Where it can't be read.
pub fn read(state_dir: &Path, uuid: &str) -> io::Result<Option<Share>> {
    match fs::read(dir(state_dir).join(uuid)) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes it, where it says something else by now, and tells monitors; `None` removes it. The directory
/// is there.
///
/// # Errors
///
/// Where it can't be written.
pub fn write(state_dir: &Path, uuid: &str, share: Option<&Share>) -> io::Result<()> {
    let dir = dir(state_dir);
    let path = dir.join(uuid);
    match share {
        None => match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            done => done?,
        },
        Some(share) => {
            let bytes = serde_json::to_vec(share)?;
            if fs::read(&path).is_ok_and(|there| there == bytes) {
                return Ok(());
            }
            replace(&path, &bytes, 0o600)?;
        }
    }
    Notice::open(&dir)?.tell();
    Ok(())
}

impl Locked<'_> {
    /// Tells the monitors of the containers on the GPU with that UUID what each has of its computing
    /// time; `rules_of` these containers says what goes for it.
    ///
    /// # Errors
    ///
    /// Where it can't be written; then they have what they had.
    pub fn share_out(
        &self,
        uuid: &str,
        rules_of: impl FnOnce(&[Tenant]) -> GpuRules,
    ) -> Result<(), RegistryError> {
        let is_on = |entry: &&super::index::Entry| {
            let mut gpus = entry.holding.gpus.iter();
            entry.holding.weight > 0 && gpus.any(|(gpu, limit)| gpu == uuid && limit.is_some())
        };
        let (names, tenants): (Vec<&str>, Vec<Tenant>) = self
            .entries
            .iter()
            .filter(is_on)
            .map(|entry| {
                let holding = &entry.holding;
                let (weight, high_priority) = (holding.weight, holding.high_priority);
                (entry.short_id.as_str(), Tenant { weight, high_priority })
            })
            .unzip();
        let rules = rules_of(&tenants);
        let share = rounds(rules, &tenants).unwrap_or_default();
        let rounds = names.into_iter().map(str::to_owned).zip(share).collect();
        let share = (!tenants.is_empty()).then_some(Share { policy: rules.policy, rounds });
        let dir = &self.registry.dir;
        write(dir, uuid, share.as_ref()).map_err(failed("cannot write", &dir.join(DIR).join(uuid)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_what_is_torn_is_an_error() {
        let state = tempfile::tempdir().unwrap();
        fs::create_dir(dir(state.path())).unwrap();
        assert_eq!(read(state.path(), "GPU-a").unwrap(), None);
        let round = |us| Round { us, each: false };
        let rounds = [("a".to_owned(), round(4096)), ("b".to_owned(), round(12288))];
        let share = Share { policy: 2, rounds: rounds.into() };
        write(state.path(), "GPU-a", Some(&share)).unwrap();
        assert_eq!(read(state.path(), "GPU-a").unwrap().as_ref(), Some(&share));
        assert_eq!((share.part("b"), share.round("c")), (Some(0.75), None));
        fs::write(dir(state.path()).join("GPU-a"), "{").unwrap();
        assert!(read(state.path(), "GPU-a").is_err());
        write(state.path(), "GPU-a", None).unwrap();
        write(state.path(), "GPU-a", None).unwrap();
        assert_eq!(read(state.path(), "GPU-a").unwrap(), None);
    }
}
