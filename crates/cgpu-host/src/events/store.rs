//! The file of events: lines of JSON, added at the end by each process that reports an event.
//!
//! ```text
//! STATE_DIR/events      the newest
//! STATE_DIR/events.1    those before; together at most twice MOST_FILE_BYTES, and a little more
//! ```
//!
//! A line is one write to the end of the file, which the kernel makes as a whole. A file that is full
//! is renamed by the process that finds it so and gets its lock at once; no process waits for another.
//! Must not know what a line says.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::Event;

/// When a file is full, in bytes: some eight thousand events.
pub const MOST_FILE_BYTES: u64 = 4 << 20;

/// The names of both files, the newest first.
pub const NAMES: [&str; 2] = ["events", "events.1"];

/// Where events are kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Store {
    files: [PathBuf; 2],
}

impl Store {
    /// The one of that state directory.
    #[must_use]
    pub fn of(state_dir: &Path) -> Self {
        Store { files: NAMES.map(|name| state_dir.join(name)) }
    }

    /// Its files, the newest first.
    #[must_use]
    pub fn files(&self) -> [&Path; 2] {
        let [newest, before] = &self.files;
        [newest, before]
    }

    /// Adds an event.
    ///
    /// # Errors
    ///
    /// If it can't be written; or the file is full, and the process that was about to rename it has stopped.
    pub fn append(&self, event: &Event) -> io::Result<()> {
        let line = event.line();
        let (mut file, bytes) = self.open()?;
        let file = if bytes + line.len() as u64 > MOST_FILE_BYTES {
            self.rotate(&file)?;
            let (next, bytes) = self.open()?;
            if bytes > 2 * MOST_FILE_BYTES {
                return Err(io::ErrorKind::FileTooLarge.into());
            }
            file = next;
            &mut file
        } else {
            &mut file
        };
        match file.write(line.as_bytes()) {
            Ok(written) if written < line.len() => Err(io::ErrorKind::WriteZero.into()),
            Ok(_) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// The newest file, made where it is missing, and its bytes.
    fn open(&self) -> io::Result<(File, u64)> {
        let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let mut options = OpenOptions::new();
        options.append(true).create(true).mode(0o640).custom_flags(flags.bits().cast_signed());
        let file = options.open(&self.files[0])?;
        let meta = file.metadata()?;
        match meta.is_file() {
            true => Ok((file, meta.size())),
            false => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Renames `full`, unless another process has or is about to.
    fn rotate(&self, full: &File) -> io::Result<()> {
        let [newest, before] = &self.files;
        if full.try_lock().is_err() {
            return Ok(());
        }
        let is_newest = fs::symlink_metadata(newest).is_ok_and(|now| is_same(full, &now));
        if is_newest { fs::rename(newest, before) } else { Ok(()) }
    }
}

/// Whether `file` is the one that `meta` is of.
pub(super) fn is_same(file: &File, meta: &fs::Metadata) -> bool {
    let own = file.metadata();
    own.is_ok_and(|own| (own.dev(), own.ino()) == (meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Kind;
    use std::os::unix::fs::PermissionsExt;

    fn event(id: &str) -> Event {
        Event::new(Kind::Created).of(id, None, "/run/runc")
    }

    /// Events are appended to a file that only root and its group can read.
    #[test]
    fn events_file_is_private_to_root_and_group() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        store.append(&event("a")).unwrap();
        store.append(&event("b")).unwrap();
        let text = fs::read_to_string(dir.path().join("events")).unwrap();
        let read: Vec<_> = text.lines().filter_map(Event::parse).map(|event| event.id).collect();
        assert_eq!(read, ["a", "b"]);
        let mode = fs::metadata(dir.path().join("events")).unwrap().permissions().mode();
        assert_eq!(mode & 0o137, 0, "{mode:o}");
    }

    /// A full file is renamed once, and both files together are bounded.
    #[test]
    fn full_file_rotates_once_within_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        let long = event("long").because(&"x".repeat(1200));
        let bytes = long.line().len() as u64;
        let [newest, before] = store.files.clone();
        for _ in 0..3 * MOST_FILE_BYTES / bytes {
            store.append(&long).unwrap();
            let size = |path: &Path| fs::metadata(path).map_or(0, |meta| meta.len());
            assert!(size(&newest) <= MOST_FILE_BYTES && size(&before) <= MOST_FILE_BYTES);
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    /// A process that holds the lock of a full file holds up no writer.
    #[test]
    fn lock_of_a_full_file_blocks_no_writer() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        store.append(&event("first")).unwrap();
        let held = OpenOptions::new().append(true).open(dir.path().join("events")).unwrap();
        held.lock().unwrap();
        held.set_len(MOST_FILE_BYTES).unwrap();
        store.append(&event("second")).unwrap();
        assert!(!dir.path().join("events.1").exists());
        held.set_len(2 * MOST_FILE_BYTES + 1).unwrap();
        store.append(&event("third")).unwrap_err();
        drop(held);
        store.append(&event("fourth")).unwrap();
        assert!(dir.path().join("events.1").exists());
    }

    #[test]
    fn concurrent_writers_lose_and_mix_no_lines() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        // So that it is renamed while they write.
        fs::write(dir.path().join("events"), "\n".repeat(4 << 20)).unwrap();
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let store = store.clone();
                scope.spawn(move || {
                    for number in 0..500 {
                        store.append(&event(&format!("{writer}-{number}"))).unwrap();
                    }
                });
            }
        });
        let text = NAMES.map(|name| fs::read_to_string(dir.path().join(name)).unwrap()).concat();
        let lines: Vec<_> = text.lines().filter(|line| !line.is_empty()).collect();
        assert_eq!(lines.len(), 2000);
        let mut ids: Vec<_> = lines.iter().map(|line| Event::parse(line).unwrap().id).collect();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), 2000);
    }

    #[test]
    fn events_are_written_only_to_regular_files() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(dir.path().join("other"), dir.path().join("events")).unwrap();
        Store::of(dir.path()).append(&event("a")).unwrap_err();
        assert!(!dir.path().join("other").exists());
        fs::remove_file(dir.path().join("events")).unwrap();
        nix::unistd::mkfifo(&dir.path().join("events"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        Store::of(dir.path()).append(&event("a")).unwrap_err();
    }
}
