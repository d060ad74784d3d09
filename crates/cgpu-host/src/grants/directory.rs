//! A directory of records that only root can have written: [`Directory`].

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::process::geteuid;
use serde::de::DeserializeOwned;

use super::GrantError;
use crate::atomic_file::replace;

/// Most bytes of a record that are read: the devices of a large GPU in MiB are a hundred thousand short names.
const MOST_BYTES: u64 = 4 << 20;

/// How long another one is waited for that changes the directory.
const TIMEOUT: Duration = Duration::from_secs(5);

const LOCK: &str = "lock";

/// A directory whose files are records in JSON. Owner and mode of it and of them are checked before anything is believed.
#[derive(Debug, Clone)]
pub(super) struct Directory(PathBuf);

impl Directory {
    /// The one at `path`, which may be missing: then it has no records.
    pub(super) fn at(path: &Path) -> Self {
        Directory(path.to_owned())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// The record at `path`, whose format is `format_of` it and has to be `format`.
    pub(super) fn read<T: DeserializeOwned>(
        &self,
        path: &Path,
        format_of: impl Fn(&T) -> u32,
        format: u32,
    ) -> Result<Option<T>, GrantError> {
        let failed = |source| GrantError::Io { path: path.to_owned(), source };
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(failed)?,
        };
        let meta = file.metadata().map_err(failed)?;
        let untrusted = |why| GrantError::Untrusted { path: path.to_owned(), why };
        if !meta.is_file() {
            return Err(untrusted("it is no file"));
        }
        trusted(&meta).map_err(untrusted)?;
        let mut text = Vec::new();
        file.take(MOST_BYTES).read_to_end(&mut text).map_err(failed)?;
        let unreadable = |why| GrantError::Unreadable { path: path.to_owned(), why };
        let record: T =
            serde_json::from_slice(&text).map_err(|error| unreadable(error.to_string()))?;
        match format_of(&record) {
            found if found == format => Ok(Some(record)),
            other => {
                Err(unreadable(format!("it is of format {other}, and this cgpu reads {format}")))
            }
        }
    }

    /// The files of its records.
    pub(super) fn files(&self) -> Result<Vec<PathBuf>, GrantError> {
        if !self.is_trusted()? {
            return Ok(Vec::new());
        }
        let failed = |source| GrantError::Io { path: self.0.clone(), source };
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.0).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let is_hidden =
                path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
            if !is_hidden && path.extension().is_some_and(|end| end == "json") {
                files.push(path);
            }
        }
        Ok(files)
    }

    pub(super) fn write(
        &self,
        path: PathBuf,
        record: &impl serde::Serialize,
    ) -> Result<(), GrantError> {
        let text = serde_json::to_vec(record).unwrap_or_default();
        replace(&path, &text, 0o600).map_err(|source| GrantError::Io { path, source })
    }

    /// Removes a record, which may be gone already.
    pub(super) fn remove(&self, path: PathBuf) -> Result<(), GrantError> {
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(GrantError::Io { path, source })
            }
            _ => Ok(()),
        }
    }

    /// Whether it is there.
    pub(super) fn is_trusted(&self) -> Result<bool, GrantError> {
        let meta = match fs::symlink_metadata(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            meta => meta.map_err(|source| GrantError::Io { path: self.0.clone(), source })?,
        };
        let untrusted = |why| GrantError::Untrusted { path: self.0.clone(), why };
        if !meta.is_dir() {
            return Err(untrusted("it is no directory"));
        }
        trusted(&meta).map_err(untrusted)?;
        Ok(true)
    }

    pub(super) fn make(&self) -> Result<(), GrantError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.0);
        made.map_err(|source| GrantError::Io { path: self.0.clone(), source })?;
        self.is_trusted().map(drop)
    }

    /// Keeps others from changing it until the lock is dropped.
    pub(super) fn lock(&self) -> Result<File, GrantError> {
        let path = self.0.join(LOCK);
        let failed = |source| GrantError::Io { path: path.clone(), source };
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
        let file = options.open(&path).map_err(failed)?;
        let since = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if since.elapsed() < TIMEOUT => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => return Err(failed(error.into())),
            }
        }
    }
}

/// Checks that no user but ours can have written it.
fn trusted(meta: &fs::Metadata) -> Result<(), &'static str> {
    if meta.uid() != geteuid().as_raw() {
        return Err("it belongs to somebody else");
    }
    if meta.mode() & 0o022 != 0 {
        return Err("others may write to it");
    }
    Ok(())
}
