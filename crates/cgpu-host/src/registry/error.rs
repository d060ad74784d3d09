//! Why the registry can't be used.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::LOCK_TIMEOUT;

/// Why the registry can't be used.
#[derive(Debug, Error)]
pub enum RegistryError {
    /// A file operation failed.
    #[error(
        "state directory: {action} {}: {source}; make state_dir writable for root and give it space",
        path.display()
    )]
    File {
        /// What was tried.
        action: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The directory can't be trusted.
    #[error(
        "state directory {}: {reason}; set state_dir to a directory that root alone can write, or \
         see who made this one",
        path.display()
    )]
    Untrusted { path: PathBuf, reason: &'static str },
    /// The caller isn't root, whose directory it is.
    #[error("state directory {}: it is root's; run this as root (sudo)", path.display())]
    NotRoot { path: PathBuf },
    /// The directory is everybody's: to close it would take it from them.
    #[error(
        "state directory {}: others may enter it, and it holds {found}, which is not cgpu's; \
         set state_dir to a directory of its own",
        path.display()
    )]
    Shared {
        path: PathBuf,
        /// Something else that is in it.
        found: String,
    },
    /// Another process holds the lock.
    #[error("state directory: {} is locked for more than {} s; see who holds it with `fuser {}`", path.display(), LOCK_TIMEOUT.as_secs(), path.display())]
    Locked {
        /// The lock's file.
        path: PathBuf,
    },
    /// What was set of the GPUs can't be read.
    #[error("settings {}: {source}; remove the file to go by the configuration again", path.display())]
    DamagedSettings {
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// A record can't be read.
    #[error("record {}: {source}; remove it if its container is gone", path.display())]
    Damaged {
        /// Its file.
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    /// No container has that id or name.
    #[error("no registered container is {id:?}; `cgpu ps` lists them")]
    Unknown {
        /// The id, its beginning, or the name.
        id: String,
    },
    /// Several have it.
    #[error("{count} registered containers are {id:?}; give more of the id or of the name")]
    Ambiguous {
        /// The id, its beginning, or the name.
        id: String,
        count: usize,
    },
    /// The container is registered already, and lives.
    #[error(
        "container {id} of {root} is registered already and {by}; use another id, or delete that one"
    )]
    InUse {
        id: String,
        /// Its runtime's root.
        root: String,
        /// What holds it: `has process 12`.
        by: String,
    },
}

pub(super) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RegistryError {
    let path = path.to_owned();
    move |source| RegistryError::File { action, path, source }
}
