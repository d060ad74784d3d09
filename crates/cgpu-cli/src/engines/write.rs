//! Writes an engine's file: a backup beside it, then the new text in its place in one step.
//!
//! A file that changed since it was read is not written.

use std::fs;
use std::io;
use std::os::unix::fs::{chown, fchown};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::change::{Backup, Change};
use super::original::{backup_of, read};
use cgpu_host::atomic_file::{replace, replace_after};

/// Why a file isn't written.
#[derive(Debug, Error)]
pub enum WriteError {
    /// Somebody changed it since it was read.
    #[error("{} was changed by somebody else meanwhile; it is left as it is now: run this again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// Its directory can't be made.
    #[error("{} can't be made: {source}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Its backup can't be written.
    #[error("{} can't be written: {source}; nothing is changed", path.display())]
    Backup {
        /// The backup.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It can't be written.
    #[error("{} can't be written: {source}; it is as it was", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Makes a change: the backup first, then the file.
///
/// # Errors
///
/// Where it can't be written, or isn't what was read any more; then it is as it was.
pub fn write(change: &Change) -> Result<(), WriteError> {
    let (at, path) = (&change.at, change.path.clone());
    let (uid, gid) = change.before.as_ref().map_or((0, 0), |before| (before.uid, before.gid));
    let mode = change.before.as_ref().map_or(0o644, |before| before.mode);
    if let Some(directory) = at.parent() {
        let named = path.parent().unwrap_or(Path::new("/")).to_owned();
        fs::create_dir_all(directory)
            .map_err(|source| WriteError::Directory { path: named, source })?;
    }
    let unchanged = || read(at, &path).is_ok_and(|now| now == change.before);
    if !unchanged() {
        return Err(WriteError::Changed { path });
    }
    if let (Backup::Make, Some(before)) = (change.backup, &change.before) {
        let backup = backup_of(at);
        replace(&backup, before.text.as_bytes(), mode)
            .and_then(|()| chown(&backup, Some(uid), Some(gid)))
            .map_err(|source| WriteError::Backup { path: backup_of(&path), source })?;
    }
    let file_error = |source| WriteError::File { path: path.clone(), source };
    let Some(after) = &change.after else {
        fs::remove_file(at).map_err(file_error)?;
        // One of a file that was ours alone tells nobody anything.
        let _ = fs::remove_file(backup_of(at));
        return Ok(());
    };
    let mut changed = false;
    let written = replace_after(at, after.as_bytes(), mode, |file| {
        fchown(file, Some(uid), Some(gid))?;
        file.sync_all()?;
        changed = !unchanged();
        if changed { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    });
    match written {
        Err(_) if changed => Err(WriteError::Changed { path }),
        Err(source) => Err(file_error(source)),
        Ok(()) => {
            if change.backup == Backup::Drop {
                // It says what the file says; one that stays misleads nobody.
                let _ = fs::remove_file(backup_of(at));
            }
            Ok(())
        }
    }
}
