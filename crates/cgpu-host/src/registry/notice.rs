//! Reports to processes that a directory's files have changed: [`Notice`], a word that all have mapped.
//!
//! A process that changes a file counts up, and wakes those that wait (futex(2)). inotify would do as well, but
//! the kernel gives each user few instances of that (`fs.inotify.max_user_instances`, 128), which
//! others on the host need, and there are as many monitors as containers.
#![allow(unsafe_code, reason = "a file that many processes have mapped is raw memory")]

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use memmap2::MmapRaw;
use rustix::thread::futex::{Flags, Timespec, wait, wake};

/// The file's name in its directory.
const FILE: &str = ".notice";

const BYTES: usize = 4096;

/// All that wait.
const EVERYBODY: u32 = i32::MAX.unsigned_abs();

/// The word.
#[derive(Debug)]
pub struct Notice {
    map: MmapRaw,
}

impl Notice {
    /// That of a directory; its file is made where there is none.
    ///
    /// # Errors
    ///
    /// Where it can't be made or mapped.
    pub fn open(dir: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(dir.join(FILE))?;
        if file.metadata()?.len() < BYTES as u64 {
            // With space for it: a page that can't be had later would end the process that touches it.
            rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, BYTES as u64)?;
        }
        Ok(Notice { map: MmapRaw::map_raw(&file)? })
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the mapping begins at a page, has space for the word and lives as long as `self`; the
        // word is accessed as an atomic only, by all processes, and the file is never made shorter.
        unsafe { AtomicU32::from_ptr(self.map.as_mut_ptr().cast::<u32>()) }
    }

    /// How often there was a change. Ask before you read what may change.
    #[must_use]
    pub fn changes(&self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    /// Something has changed: wakes those that wait.
    pub fn report(&self) {
        self.word().fetch_add(1, Ordering::Release);
        let _ = wake(self.word(), Flags::empty(), EVERYBODY);
    }

    /// Waits for a change after those that are known, at most so long.
    pub fn wait(&self, known: u32, most: Duration) {
        let most = Timespec {
            tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: most.subsec_nanos().into(),
        };
        // A signal, a change before that, the time: the caller checks again.
        let _ = wait(self.word(), Flags::empty(), known, Some(&most));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_reader_is_woken_through_own_mapping() {
        let dir = tempfile::tempdir().unwrap();
        let (theirs, ours) = (Notice::open(dir.path()).unwrap(), Notice::open(dir.path()).unwrap());
        let known = theirs.changes();
        let waits = std::thread::spawn(move || {
            while theirs.changes() == known {
                theirs.wait(known, Duration::from_secs(600));
            }
        });
        ours.report();
        waits.join().unwrap();
        assert_eq!(ours.changes(), known.wrapping_add(1));
        ours.wait(known, Duration::from_secs(600));
    }
}
