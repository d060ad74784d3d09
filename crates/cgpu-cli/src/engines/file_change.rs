//! The change of one engine's file: its difference, its backup, and the write.
//!
//! The backup is written first, then the new text replaces the old one in one step. A file that
//! changed since it was read is not written.

use std::fs;
use std::io;
use std::os::unix::fs::{chown, fchown};
use std::path::{Path, PathBuf};

use similar::TextDiff;
use thiserror::Error;

use super::config_file::{self, Original, ReadError, read};
use cgpu_host::atomic_file::{replace, replace_after};

/// A file's text before and after.
#[derive(Debug)]
pub struct Change {
    /// The file, as the host names it.
    pub path: PathBuf,
    /// The path by which this process reaches it.
    pub(super) at: PathBuf,
    /// The file as it was read; `None` if there is none.
    pub(super) before: Option<Original>,
    /// Its new text; `None` if the file is removed.
    pub after: Option<String>,
    pub backup: Backup,
}

/// What becomes of a file's backup: the text before setup first edited it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backup {
    /// The text before is written there.
    Make,
    /// The existing one stays.
    Keep,
    /// It is removed: the file has its text again.
    Drop,
}

impl Change {
    /// The change that reverts this one after it was made.
    ///
    /// # Errors
    ///
    /// If the file can't be read.
    pub fn reverse(&self) -> Result<Change, ReadError> {
        Ok(Change {
            path: self.path.clone(),
            at: self.at.clone(),
            before: config_file::read(&self.at, &self.path)?,
            after: self.before.as_ref().map(|before| before.text.clone()),
            backup: match self.backup {
                Backup::Keep => Backup::Keep,
                Backup::Make | Backup::Drop => Backup::Drop,
            },
        })
    }

    /// The difference, as `diff -u` shows it.
    #[must_use]
    pub fn diff(&self) -> String {
        let path = self.path.display().to_string();
        let before = self.before.as_ref().map_or("", |before| before.text.as_str());
        let after = self.after.as_deref().unwrap_or_default();
        let name = |there: bool| if there { path.as_str() } else { "/dev/null" };
        let names = (name(self.before.is_some()), name(self.after.is_some()));
        TextDiff::from_lines(before, after)
            .unified_diff()
            .context_radius(3)
            .header(names.0, names.1)
            .to_string()
    }

    /// The path of the backup, if there is one after the change.
    #[must_use]
    pub fn backup(&self) -> Option<PathBuf> {
        let there = match self.backup {
            Backup::Make => self.before.is_some(),
            Backup::Keep => backup_of(&self.at).exists(),
            Backup::Drop => false,
        };
        there.then(|| backup_of(&self.path))
    }
}

/// Why a file isn't written.
#[derive(Debug, Error)]
pub enum WriteError {
    #[error("{} was changed by somebody else meanwhile; it is left as it is now: run this again", path.display())]
    Changed { path: PathBuf },
    #[error("{} can't be made: {source}", path.display())]
    Directory {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} can't be written: {source}; nothing is changed", path.display())]
    Backup {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} can't be written: {source}; it is as it was", path.display())]
    File {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// Makes a change: the backup first, then the file.
///
/// # Errors
///
/// If it can't be written, or was changed since it was read; then it is left alone.
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
        // The backup of a file that was ours alone has no use.
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
                // The backup equals the file; if its removal fails, it does no harm.
                let _ = fs::remove_file(backup_of(at));
            }
            Ok(())
        }
    }
}

/// The path of the backup of the file at `path`.
#[must_use]
pub fn backup_of(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".cgpu-backup");
    path.with_file_name(name)
}

/// The text of the backup of the file at `at`, if it is a regular file.
pub(super) fn read_backup(at: &Path) -> Option<String> {
    let backup = backup_of(at);
    let original = read(&backup, &backup).ok().flatten()?;
    (!original.is_link).then_some(original.text)
}
