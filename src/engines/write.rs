//! Reads an engine's file to edit it, and writes it: a backup beside it, then the new text
//! in its place in one step.
//!
//! A link is not followed: what it leads to may be another program's, or shared. It is named,
//! so that somebody can decide. A file that changed since it was read is not written.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, chown, fchown};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::change::{Backup, Change};
use crate::replace::{replace, replace_after};

/// Most bytes of a file that is edited.
const BYTES_MAX: u64 = 1 << 20;

/// A file as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Original {
    /// Its text.
    pub text: String,
    mode: u32,
    uid: u32,
    gid: u32,
    links: u64,
    is_link: bool,
}

/// Why a file can't be edited.
#[derive(Debug, Error)]
pub enum ReadError {
    /// It can't be read.
    #[error("{} can't be read: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is a directory, a pipe, or the like.
    #[error("{} is no regular file; remove it, or name the engine's file with --file", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// It is larger than any configuration.
    #[error("{} is larger than {} bytes; is it the engine's configuration?", path.display(), BYTES_MAX)]
    Large {
        /// The file.
        path: PathBuf,
    },
    /// It is not UTF-8.
    #[error("{} is no text in UTF-8; correct it first", path.display())]
    NoText {
        /// The file.
        path: PathBuf,
    },
    /// It is a link.
    #[error("{} is a link to {}; links aren't followed: name that file with --file, if it is to be edited", path.display(), target.display())]
    Link {
        /// The link.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// It has several names.
    #[error("{} is one of {links} names of its file; replace it with a copy of its own first", path.display())]
    Shared {
        /// The file.
        path: PathBuf,
        /// How many it has.
        links: u64,
    },
    /// Its mode says that nobody writes it.
    #[error("{} is read-only (mode {mode:04o}); `chmod u+w` it if it may be edited", path.display())]
    ReadOnly {
        /// The file.
        path: PathBuf,
        /// Its permissions.
        mode: u32,
    },
}

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

/// Where the backup of the file at `path` is.
#[must_use]
pub fn backup_of(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".cgpu-backup");
    path.with_file_name(name)
}

/// The file at `at`, which the host calls `path`, through links; `None` where there is none.
pub(super) fn read(at: &Path, path: &Path) -> Result<Option<Original>, ReadError> {
    let path = path.to_owned();
    let link = match fs::symlink_metadata(at) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(ReadError::Unreadable { path, source }),
        Ok(meta) => meta.is_symlink(),
    };
    let meta = match fs::metadata(at) {
        Ok(meta) => meta,
        Err(_) if link => return Err(linked(at, path)),
        Err(source) => return Err(ReadError::Unreadable { path, source }),
    };
    if !meta.is_file() {
        return Err(ReadError::NotAFile { path });
    }
    if meta.len() > BYTES_MAX {
        return Err(ReadError::Large { path });
    }
    let mut bytes = Vec::new();
    let file = File::open(at).and_then(|file| file.take(BYTES_MAX).read_to_end(&mut bytes));
    match file.map(|_| String::from_utf8(bytes)) {
        Err(source) => Err(ReadError::Unreadable { path, source }),
        Ok(Err(_)) => Err(ReadError::NoText { path }),
        Ok(Ok(text)) => Ok(Some(Original {
            text,
            mode: meta.mode() & 0o7777,
            uid: meta.uid(),
            gid: meta.gid(),
            links: meta.nlink(),
            is_link: link,
        })),
    }
}

fn linked(at: &Path, path: PathBuf) -> ReadError {
    ReadError::Link { path, target: fs::read_link(at).unwrap_or_default() }
}

/// The text of the backup beside the file at `at`, where it is a plain file of ours.
pub(super) fn read_backup(at: &Path) -> Option<String> {
    let backup = backup_of(at);
    let original = read(&backup, &backup).ok().flatten()?;
    (!original.is_link).then_some(original.text)
}

/// Whether a file may be edited.
pub(super) fn check(at: &Path, path: &Path, before: Option<&Original>) -> Result<(), ReadError> {
    let Some(before) = before else { return Ok(()) };
    let path = path.to_owned();
    match before {
        Original { is_link: true, .. } => Err(linked(at, path)),
        Original { links, .. } if *links > 1 => Err(ReadError::Shared { path, links: *links }),
        // Root could write it all the same; who took the permission away meant it.
        Original { mode, .. } if mode & 0o200 == 0 => {
            Err(ReadError::ReadOnly { path, mode: *mode })
        }
        Original { .. } => Ok(()),
    }
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
