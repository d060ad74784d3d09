//! Reads an engine's file to edit it.
//!
//! A link is not followed: what it leads to may be another program's, or shared. The refusal
//! names it, so that the administrator can decide.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Most bytes of a file that is edited.
const BYTES_MAX: u64 = 1 << 20;

/// A file as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Original {
    pub text: String,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    links: u64,
    pub(super) is_link: bool,
}

/// Why a file can't be edited.
#[derive(Debug, Error)]
pub enum ReadError {
    #[error("{} can't be read: {source}", path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is no regular file; remove it, or name the engine's file with --file", path.display())]
    NotAFile { path: PathBuf },
    #[error("{} is larger than {} bytes; is it the engine's configuration?", path.display(), BYTES_MAX)]
    Large { path: PathBuf },
    #[error("{} is no text in UTF-8; correct it first", path.display())]
    NoText { path: PathBuf },
    #[error("{} is a link to {}; links aren't followed: name that file with --file, if it is to be edited", path.display(), target.display())]
    Link { path: PathBuf, target: PathBuf },
    #[error("{} is one of {links} names of its file; replace it with a copy of its own first", path.display())]
    Shared { path: PathBuf, links: u64 },
    #[error("{} is read-only (mode {mode:04o}); `chmod u+w` it if it may be edited", path.display())]
    ReadOnly { path: PathBuf, mode: u32 },
}

/// The file at `at`, which the host calls `path`, through links; `None` if there is none.
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

/// Whether a file may be edited.
pub(super) fn check(at: &Path, path: &Path, before: Option<&Original>) -> Result<(), ReadError> {
    let Some(before) = before else { return Ok(()) };
    let path = path.to_owned();
    match before {
        Original { is_link: true, .. } => Err(linked(at, path)),
        Original { links, .. } if *links > 1 => Err(ReadError::Shared { path, links: *links }),
        // Root could write it all the same; the administrator removed the permission.
        Original { mode, .. } if mode & 0o200 == 0 => {
            Err(ReadError::ReadOnly { path, mode: *mode })
        }
        Original { .. } => Ok(()),
    }
}
