//! The inventory that was last read from the driver, kept in a file.
//!
//! `STATE_DIR/inventory.json`, 0600: `{"version":2,"fingerprint":{…},"gpus":[…]}`, the
//! GPUs as in an inventory file. Replaced as a whole by a rename. A cache is never worth
//! an error when it is read: missing, damaged, of another version or of another state of
//! the driver, it is simply not there, and the process that then writes it learns why it can't be.
//!
//! That a GPU is lost, or was reset and is well again, shows in NVML alone: the cache
//! learns it with the next `cgpu gpus --refresh`.

use std::fs::{DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Fingerprint;
use super::file::FILE_BYTES_MAX;
use crate::atomic_file::replace;
use cgpu_core::gpu::{Gpu, Inventory};

const FILE_NAME: &str = "inventory.json";
const VERSION: u32 = 2;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Cache {
    version: u32,
    fingerprint: Fingerprint,
    gpus: Vec<Gpu>,
}

/// Why the cache could not be written.
#[derive(Debug, Error)]
pub enum CacheError {
    /// Its directory can't be made.
    #[error(
        "can't make the state directory {}; run as root, or correct state_dir",
        path.display()
    )]
    Directory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The file can't be written.
    #[error("can't write {}; run as root, or correct state_dir", path.display())]
    Write {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// The cached inventory, where it holds in the state `now` of the driver.
pub(super) fn read(state_dir: &Path, now: &Fingerprint) -> Option<Inventory> {
    let mut text = Vec::new();
    let file = File::open(state_dir.join(FILE_NAME)).ok()?;
    file.take(FILE_BYTES_MAX).read_to_end(&mut text).ok()?;
    let cache: Cache = serde_json::from_slice(&text).ok()?;
    if cache.version != VERSION || !cache.fingerprint.holds_in(now) {
        return None;
    }
    Inventory::new(cache.gpus).ok()
}

/// Makes `inventory`, read in the state `fingerprint` of the driver, the cached one.
///
/// # Errors
///
/// Where it can't be written; then the cache is what it was.
pub fn write(
    state_dir: &Path,
    fingerprint: Fingerprint,
    inventory: &Inventory,
) -> Result<(), CacheError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(state_dir)
        .map_err(|source| CacheError::Directory { path: state_dir.to_owned(), source })?;
    let path = state_dir.join(FILE_NAME);
    let cache = Cache { version: VERSION, fingerprint, gpus: inventory.gpus().to_vec() };
    let text = serde_json::to_vec_pretty(&cache).map_err(io::Error::from);
    text.and_then(|text| replace(&path, &text, 0o600))
        .map_err(|source| CacheError::Write { path, source })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::inventory::fixture::{Proc, sentence};

    fn inventory() -> Inventory {
        let text = r#"[
            {"index":0,"uuid":"GPU-a","minor":1,"memory_mib":16130,"mig_enabled":true,
             "mig_devices":[{"index":0,"uuid":"MIG-1","memory_mib":4864}]},
            {"index":1,"uuid":"GPU-b","minor":0,"memory_mib":0,"state":"lost"}
        ]"#;
        Inventory::new(serde_json::from_str(text).unwrap()).unwrap()
    }

    fn state() -> (Proc, Fingerprint) {
        let proc = Proc::with_driver();
        proc.gpu("0000:00:07.0", "GPU-a", 1);
        let now = Fingerprint::read(proc.root()).unwrap();
        (proc, now)
    }

    #[test]
    fn gives_back_what_was_written() {
        let (proc, now) = state();
        assert_eq!(read(&proc.state_dir(), &now), None);
        write(&proc.state_dir(), now.clone(), &inventory()).unwrap();
        assert_eq!(read(&proc.state_dir(), &now), Some(inventory()));
    }

    /// The cache is for its owner alone, and leaves nothing next to it.
    #[test]
    fn cache_is_private_and_leaves_no_other_file() {
        let (proc, now) = state();
        write(&proc.state_dir(), now.clone(), &inventory()).unwrap();
        write(&proc.state_dir(), now, &inventory()).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&proc.state_dir()), 0o700);
        assert_eq!(mode(&proc.state_dir().join(FILE_NAME)), 0o600);
        assert_eq!(fs::read_dir(proc.state_dir()).unwrap().count(), 1);
    }

    #[test]
    fn a_damaged_cache_counts_as_missing() {
        let (proc, now) = state();
        write(&proc.state_dir(), now.clone(), &inventory()).unwrap();
        let path = proc.state_dir().join(FILE_NAME);
        let good = fs::read(&path).unwrap();
        for end in 0..good.len() {
            fs::write(&path, &good[..end]).unwrap();
            assert_eq!(read(&proc.state_dir(), &now), None, "cut at byte {end}");
        }
        let good = String::from_utf8(good).unwrap();
        for (from, to) in [
            ("\"version\": 2", "\"version\": 1"),
            ("\"memory_mib\": 16130", "\"memory_mib\": 0"),
            ("GPU-b", "GPU-a"),
            ("\"index\": 1", "\"index\": 0"),
            ("\"gpus\"", "\"cards\""),
            ("[", "\u{0}"),
        ] {
            let bad = good.replace(from, to);
            assert_ne!(bad, good);
            fs::write(&path, bad).unwrap();
            assert_eq!(read(&proc.state_dir(), &now), None, "{to}");
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert_eq!(read(&proc.state_dir(), &now), None, "a directory");
    }

    #[test]
    fn a_cache_of_another_state_counts_as_missing() {
        let (proc, now) = state();
        write(&proc.state_dir(), now, &inventory()).unwrap();
        proc.gpu("0000:00:08.0", "GPU-b", 0);
        let now = Fingerprint::read(proc.root()).unwrap();
        assert_eq!(read(&proc.state_dir(), &now), None);
    }

    /// The cache replaces what a killed process of the same process id left.
    #[test]
    fn cache_replaces_leftovers_of_a_killed_process() {
        let (proc, now) = state();
        fs::create_dir_all(proc.state_dir()).unwrap();
        let left = format!("{FILE_NAME}.{}", std::process::id());
        fs::write(proc.state_dir().join(left), "half").unwrap();
        write(&proc.state_dir(), now.clone(), &inventory()).unwrap();
        assert_eq!(read(&proc.state_dir(), &now), Some(inventory()));
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_named() {
        let (proc, now) = state();
        fs::write(proc.beside("file"), "").unwrap();
        let state_dir = proc.beside("file/cgpu");
        let error = write(&state_dir, now, &inventory()).unwrap_err();
        assert_eq!(
            sentence(&error),
            format!(
                "can't make the state directory {}; run as root, or correct state_dir: Not a \
                 directory (os error 20)",
                state_dir.display()
            )
        );
    }

    #[test]
    fn a_file_that_cannot_be_replaced_is_named() {
        let (proc, now) = state();
        let path = proc.state_dir().join(FILE_NAME);
        fs::create_dir_all(path.join("in the way")).unwrap();
        let error = write(&proc.state_dir(), now, &inventory()).unwrap_err();
        assert!(sentence(&error).starts_with(&format!("can't write {}; run", path.display())));
        assert_eq!(fs::read_dir(proc.state_dir()).unwrap().count(), 1, "nothing left beside it");
    }
}
