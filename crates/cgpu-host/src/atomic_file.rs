//! Files that readers see as they were or as they will be, never in between.
//!
//! Owns writing next to a file and renaming. Must not know what is written.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

/// How long another one is waited for that writes the same file.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Makes `bytes` the content of the file at `path`, with the permissions `mode`.
///
/// They're written to a hidden file next to it first. A writer that is killed in between leaves that, and
/// the next one uses it, so there is never more than one.
///
/// # Errors
///
/// Where it can't be written; then it is what it was.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    replace_after(path, bytes, mode, |_| Ok(()))
}

/// Like [`replace()`], but `last` has the last word: it is called with the new file before that
/// takes the old one's place.
///
/// # Errors
///
/// Where it can't be written, or `last` fails; then the old file is what it was.
pub fn replace_after(
    path: &Path,
    bytes: &[u8],
    mode: u32,
    last: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = beside(path)?;
    let mut file = open_locked(&temporary)?;
    let written = (|| {
        file.set_len(0)?;
        file.write_all(bytes)?;
        file.set_permissions(Permissions::from_mode(mode))?;
        last(&file)?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn beside(path: &Path) -> io::Result<PathBuf> {
    let mut name = OsString::from(".");
    name.push(path.file_name().ok_or(io::ErrorKind::InvalidInput)?);
    name.push(".cgpu-tmp");
    Ok(path.with_file_name(name))
}

/// Opens the file at `path`, made if it is missing; no other process writes it while it is open.
fn open_locked(path: &Path) -> io::Result<File> {
    let since = Instant::now();
    loop {
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
            .open(path)?;
        let opened = file.metadata()?;
        // In a directory that others may write to, somebody may have been here first.
        let own = opened.uid() == rustix::process::geteuid().as_raw() && opened.nlink() <= 1;
        if !opened.is_file() || !own {
            let why = format!("{} is another's: remove it", path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) if since.elapsed() < TIMEOUT => {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            Err(TryLockError::WouldBlock) => {
                let why = format!("another process has been writing {} for long", path.display());
                return Err(io::Error::new(io::ErrorKind::TimedOut, why));
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // The process that had the lock has renamed or removed what we opened.
        match fs::symlink_metadata(path) {
            Ok(there) if (there.dev(), there.ino()) == (opened.dev(), opened.ino()) => {
                return Ok(file);
            }
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    }

    /// A temporary file that a killed process left is used, and does not remain.
    #[test]
    fn leftover_of_a_killed_process_is_reused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(dir.path().join(".file.cgpu-tmp"), "much longer than what comes").unwrap();
        replace(&path, b"new", 0o644).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(dir.path()), ["file"]);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
    }

    #[test]
    fn one_that_never_ends_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let other = open_locked(&beside(&path).unwrap()).unwrap();
        let error = replace(&path, b"new", 0o600).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(!path.exists());
        drop(other);
        replace(&path, b"new", 0o600).unwrap();
    }

    #[test]
    fn many_at_once_write_one_whole_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::thread::scope(|scope| {
            for writer in 0..8_u8 {
                let path = &path;
                scope.spawn(move || {
                    let text = vec![writer; 10_000 + usize::from(writer)];
                    for _ in 0..50 {
                        // A writer whose wait for the others timed out retries.
                        while let Err(error) = replace(path, &text, 0o600) {
                            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
                        }
                        let read = fs::read(path).unwrap();
                        let of_it = usize::from(read[0]);
                        assert_eq!(read, vec![read[0]; 10_000 + of_it]);
                    }
                });
            }
        });
        assert_eq!(names(dir.path()), ["file"]);
    }

    #[test]
    fn nothing_is_written_through_what_another_put_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let other = dir.path().join("other");
        fs::write(&other, "kept").unwrap();
        std::os::unix::fs::symlink(&other, dir.path().join(".file.cgpu-tmp")).unwrap();
        replace(&path, b"new", 0o600).unwrap_err();
        assert_eq!(fs::read(&other).unwrap(), b"kept");
        assert!(!path.exists());
        fs::remove_file(dir.path().join(".file.cgpu-tmp")).unwrap();
        nix::unistd::mkfifo(&dir.path().join(".file.cgpu-tmp"), nix::sys::stat::Mode::S_IRWXU)
            .unwrap();
        replace(&path, b"new", 0o600).unwrap_err();
        assert!(!path.exists());
    }
}
