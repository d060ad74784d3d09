//! Reading the events that are there, and those that come: [`Follower`].
//!
//! A file that is renamed meanwhile is read on until the next is renamed: somebody may have opened
//! it before, and not have written yet.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;

use super::store::is_same;
use super::{Event, MOST_LINE_BYTES, Store};

/// Bytes that are read at once.
const PART_BYTES: usize = 64 << 10;

/// A file, read as far as it goes.
#[derive(Debug)]
struct Tail {
    file: File,
    read_bytes: u64,
    /// What was read of a line whose end wasn't there.
    rest: Vec<u8>,
}

/// Reads events as they come.
#[derive(Debug)]
pub struct Follower {
    store: Store,
    before: Option<Tail>,
    newest: Option<Tail>,
}

impl Follower {
    /// From the first event on that is kept.
    ///
    /// # Errors
    ///
    /// Where a file is there and can't be opened.
    pub fn new(store: Store) -> io::Result<Self> {
        let [newest, before] = store.files();
        // In this order: what is renamed in between is read twice at most, and is the same file then.
        let newest = Tail::open(newest)?;
        let mut before = Tail::open(before)?;
        if let (Some(newest), Some(tail)) = (&newest, &before)
            && newest.file.metadata().is_ok_and(|meta| is_same(&tail.file, &meta))
        {
            before = None;
        }
        Ok(Follower { store, before, newest })
    }

    /// What came since it was called last.
    ///
    /// # Errors
    ///
    /// Where a file can't be read.
    pub fn read(&mut self) -> io::Result<Vec<Event>> {
        let mut events = Vec::new();
        loop {
            if let Some(before) = &mut self.before {
                before.read(&mut events)?;
            }
            if let Some(newest) = &mut self.newest {
                newest.read(&mut events)?;
            }
            let [path, _] = self.store.files();
            let is_newest = match (&self.newest, fs::symlink_metadata(path)) {
                (Some(newest), Ok(meta)) => is_same(&newest.file, &meta),
                (_, Err(error)) if error.kind() == io::ErrorKind::NotFound => true,
                (None, Ok(_)) => false,
                (_, Err(error)) => return Err(error),
            };
            if is_newest {
                return Ok(events);
            }
            if let Some(next) = Tail::open(path)? {
                self.before = self.newest.replace(next).or(self.before.take());
            }
        }
    }
}

impl Tail {
    /// `None` where it isn't there.
    fn open(path: &std::path::Path) -> io::Result<Option<Self>> {
        match File::open(path) {
            Ok(file) => Ok(Some(Tail { file, read_bytes: 0, rest: Vec::new() })),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        if self.file.metadata()?.size() < self.read_bytes {
            // It was emptied.
            self.file.seek(SeekFrom::Start(0))?;
            self.read_bytes = 0;
            self.rest.clear();
        }
        let mut part = vec![0; PART_BYTES];
        loop {
            let count = self.file.read(&mut part)?;
            if count == 0 {
                return Ok(());
            }
            self.read_bytes += count as u64;
            for piece in part.get(..count).unwrap_or_default().split_inclusive(|b| *b == b'\n') {
                // One that is too long is none of ours.
                if self.rest.len() <= 2 * MOST_LINE_BYTES {
                    self.rest.extend_from_slice(piece);
                }
                if piece.ends_with(b"\n") {
                    let line = String::from_utf8_lossy(&self.rest);
                    events.extend(Event::parse(line.trim_end()));
                    self.rest.clear();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{Kind, MOST_FILE_BYTES};
    use std::io::Write;
    use std::path::Path;

    fn event(id: &str) -> Event {
        Event::new(Kind::Created).of(id, None, "/run/runc")
    }

    fn ids(follower: &mut Follower) -> Vec<String> {
        follower.read().unwrap().into_iter().map(|event| event.id).collect()
    }

    fn fill(path: &Path) {
        fs::write(path, "\n".repeat(usize::try_from(MOST_FILE_BYTES).unwrap())).unwrap();
    }

    /// Events are read as they come, from before the file exists and over a rotation.
    #[test]
    fn follower_starts_before_file_and_survives_rotation() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        let mut follower = Follower::new(store.clone()).unwrap();
        assert!(ids(&mut follower).is_empty());
        store.append(&event("a")).unwrap();
        assert_eq!(ids(&mut follower), ["a"]);
        store.append(&event("b")).unwrap();
        let late = fs::OpenOptions::new().append(true).open(dir.path().join("events")).unwrap();
        late.set_len(MOST_FILE_BYTES).unwrap();
        store.append(&event("c")).unwrap();
        assert!(dir.path().join("events.1").exists());
        assert_eq!(ids(&mut follower), ["b", "c"]);
        // A writer that had opened it before it was renamed, and writes only now.
        (&late).write_all(b"\n").unwrap();
        (&late).write_all(event("late").line().as_bytes()).unwrap();
        assert_eq!(ids(&mut follower), ["late"]);
        assert!(ids(&mut follower).is_empty());
    }

    /// Both files are read from the beginning, the older one first.
    #[test]
    fn follower_reads_both_files_the_older_first() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        fill(&dir.path().join("events"));
        let mut file = fs::OpenOptions::new().append(true).open(dir.path().join("events")).unwrap();
        file.write_all(event("old").line().as_bytes()).unwrap();
        store.append(&event("new")).unwrap();
        assert_eq!(ids(&mut Follower::new(store).unwrap()), ["old", "new"]);
    }

    /// Half a line waits for its end, and a line that is no event is skipped.
    #[test]
    fn partial_line_waits_and_invalid_line_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        let path = dir.path().join("events");
        let line = event("a").line();
        let (one, other) = line.split_at(20);
        fs::write(&path, format!("rubbish\n{}\n{one}", "x".repeat(100_000))).unwrap();
        let mut follower = Follower::new(store).unwrap();
        assert!(ids(&mut follower).is_empty());
        let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(other.as_bytes()).unwrap();
        assert_eq!(ids(&mut follower), ["a"]);
        // Emptied manually.
        file.set_len(0).unwrap();
        file.write_all(b"\n").unwrap();
        assert!(ids(&mut follower).is_empty());
        file.write_all(event("b").line().as_bytes()).unwrap();
        assert_eq!(ids(&mut follower), ["b"]);
    }
}
