//! How things stand with a container, where others read it without waking its monitor.
//!
//! A worker maps the file `figures` of its monitor's directory. It counts its changes there, and
//! leaves there the last [`Status`](super::wire::Status) that it told, with the count that this was
//! true at. Who looks reads both: where the counts are equal nothing has changed since. Else it asks
//! the worker. Each worker makes a file of its own, so that nobody reads what a dead one left.
//!
//! Owns the file's layout: words of eight bytes, in this machine's order.
#![allow(unsafe_code, reason = "a file that two processes have mapped is raw memory")]

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use memmap2::{MmapMut, MmapOptions, MmapRaw};

use crate::process::ProcessId;

/// Bytes of the file. A status that is longer than what is left of them is asked for each time.
const BYTES: usize = 16 << 10;

const WORD: usize = size_of::<u64>();

/// What the file begins with: the layout, by a number of its own.
const LAYOUT: (usize, u64) = (0, 0x6367_7075_6669_0001);
/// The worker's pid, and its start in clock ticks since boot.
const PID: usize = 1;
const START: usize = 2;
/// How many changes there were.
const CHANGES: usize = 3;
/// Odd while the words behind it are written.
const WRITES: usize = 4;
/// At how many changes the text was true.
const TEXT_CHANGES: usize = 5;
/// Bytes of the text; 0 where there is none.
const LENGTH: usize = 6;
/// Where the text begins.
const TEXT: usize = 8;

/// The longest text, in bytes.
const MOST_TEXT: usize = BYTES - TEXT * WORD;

/// The words, mapped.
#[derive(Debug)]
struct Words {
    map: MmapRaw,
}

impl Words {
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!((at + 1) * WORD <= self.map.len(), "a word of the file");
        // SAFETY: the word lies in the mapping (checked), which begins at a page and lives as long as
        // `self`. All of it is accessed as atomics only, by this process and by others, and the file
        // is never made shorter.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(at)) }
    }

    fn load(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }

    fn store(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }
}

/// The figures of a worker, as it writes them.
#[derive(Debug)]
pub struct Figures {
    page: Words,
    /// One at a time writes the text.
    text: Mutex<()>,
    /// The last mark that was told, see [`set_mark`](Figures::set_mark).
    mark: AtomicU64,
}

impl Figures {
    /// Makes the file at `path` anew, with no text yet.
    ///
    /// # Errors
    ///
    /// Where it can't be made, or this process can't be looked at.
    pub fn create(path: &Path) -> io::Result<Self> {
        let own = ProcessId::own().ok_or_else(|| io::Error::other("/proc shows no process"))?;
        // Who has the one of the worker before mapped keeps that.
        let new = path.with_extension("new");
        let _ = fs::remove_file(&new);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(&new)?;
        file.set_len(BYTES as u64)?;
        let figures = Self::of(MmapRaw::map_raw(&file)?, own);
        fs::rename(&new, path)?;
        Ok(figures)
    }

    /// Figures that nobody else reads.
    ///
    /// # Errors
    ///
    /// Where there is no memory for them.
    pub fn without_file() -> io::Result<Self> {
        let map: MmapMut = MmapOptions::new().len(BYTES).map_anon()?;
        Ok(Self::of(map.into(), ProcessId { pid: 0, start_ticks: 0 }))
    }

    fn of(map: MmapRaw, worker: ProcessId) -> Self {
        let page = Words { map };
        page.store(PID, u64::from(worker.pid.unsigned_abs()));
        page.store(START, worker.start_ticks);
        page.store(LAYOUT.0, LAYOUT.1);
        Figures { page, text: Mutex::new(()), mark: AtomicU64::new(0) }
    }

    /// Something has changed: what was noted isn't true any more.
    pub fn change(&self) {
        self.page.word(CHANGES).fetch_add(1, Ordering::Release);
    }

    /// What there is has this mark: a change, where it had another before. By one at a time.
    pub fn set_mark(&self, mark: u64) {
        if self.mark.swap(mark, Ordering::Relaxed) != mark {
            self.change();
        }
    }

    /// How many changes there were. Ask before you look at what may change.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.page.word(CHANGES).load(Ordering::Acquire)
    }

    /// Notes the text that was true at so many changes.
    pub fn note(&self, changes: u64, text: &[u8]) {
        let _alone = self.text.lock().unwrap_or_else(PoisonError::into_inner);
        let writes = self.page.load(WRITES);
        self.page.store(WRITES, writes.wrapping_add(1));
        fence(Ordering::Release);
        let length = if text.len() > MOST_TEXT { 0 } else { text.len() };
        self.page.store(TEXT_CHANGES, changes);
        self.page.store(LENGTH, length as u64);
        for (at, bytes) in text.get(..length).unwrap_or_default().chunks(WORD).enumerate() {
            let mut word = [0; WORD];
            word.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
            self.page.store(TEXT + at, u64::from_ne_bytes(word));
        }
        self.page.word(WRITES).store(writes.wrapping_add(2), Ordering::Release);
    }
}

/// What the file at `path` says, where that is true now: nothing changed since it was noted, and the
/// worker that noted it is there and isn't stopped.
#[must_use]
pub fn read(path: &Path) -> Option<Vec<u8>> {
    let file = File::open(path).ok()?;
    if file.metadata().ok()?.len() != BYTES as u64 {
        return None;
    }
    let page = Words { map: MmapOptions::new().map_raw_read_only(&file).ok()? };
    let text = text(&page)?;
    let worker =
        ProcessId { pid: i32::try_from(page.load(PID)).ok()?, start_ticks: page.load(START) };
    worker.runs().then_some(text)
}

/// The text, where nothing changed since it was noted.
fn text(page: &Words) -> Option<Vec<u8>> {
    if page.load(LAYOUT.0) != LAYOUT.1 {
        return None;
    }
    let writes = page.word(WRITES).load(Ordering::Acquire);
    let (of, length) = (page.load(TEXT_CHANGES), usize::try_from(page.load(LENGTH)).ok()?);
    if length == 0 || length > MOST_TEXT {
        return None;
    }
    let words = (0..length.div_ceil(WORD)).map(|at| page.load(TEXT + at).to_ne_bytes());
    let mut text: Vec<u8> = words.flatten().collect();
    text.truncate(length);
    fence(Ordering::Acquire);
    let is_whole = writes.is_multiple_of(2) && page.load(WRITES) == writes;
    (is_whole && page.load(CHANGES) == of).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn a_text_is_told_until_something_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("figures");
        assert_eq!(read(&path), None);
        let figures = Figures::create(&path).unwrap();
        assert_eq!(read(&path), None, "nothing was noted");
        figures.note(figures.changes(), b"how things stand");
        assert_eq!(read(&path).unwrap(), b"how things stand");
        figures.change();
        assert_eq!(read(&path), None);
        figures.note(figures.changes(), b"marked");
        figures.set_mark(7);
        assert_eq!(read(&path), None);
        figures.note(figures.changes(), b"marked");
        figures.set_mark(7);
        assert_eq!(read(&path).unwrap(), b"marked", "the same again is no change");
        // What was looked at before the change isn't true after it.
        figures.note(0, b"late");
        assert_eq!(read(&path), None);
        figures.note(figures.changes(), b"now");
        assert_eq!(read(&path).unwrap(), b"now");
        // Too long to be kept: what was there isn't told for it.
        figures.note(figures.changes(), &vec![b'x'; MOST_TEXT + 1]);
        assert_eq!(read(&path), None);
        figures.note(figures.changes(), &vec![b'x'; MOST_TEXT]);
        assert_eq!(read(&path).unwrap().len(), MOST_TEXT);
        // The next worker begins with nothing.
        let next = Figures::create(&path).unwrap();
        figures.note(figures.changes(), b"of the one before");
        assert_eq!(read(&path), None);
        next.note(next.changes(), b"of the next");
        assert_eq!(read(&path).unwrap(), b"of the next");
    }

    #[test]
    fn a_file_that_is_none_and_a_worker_that_is_gone_tell_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("figures");
        for bytes in [&b""[..], b"x", &[0; BYTES], &[0xff; BYTES], &[0; BYTES + 8]] {
            fs::write(&path, bytes).unwrap();
            assert_eq!(read(&path), None, "{} bytes", bytes.len());
        }
        let figures = Figures::create(&path).unwrap();
        figures.note(0, b"text");
        assert!(read(&path).is_some());
        let start = figures.page.load(START);
        figures.page.store(START, start - 1);
        assert_eq!(read(&path), None, "it has another's pid");
        figures.page.store(START, start);
        figures.page.store(LAYOUT.0, LAYOUT.1 + 1);
        assert_eq!(read(&path), None, "another layout");
    }

    #[test]
    fn nobody_reads_half_of_one_text_and_half_of_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("figures");
        let figures = Figures::create(&path).unwrap();
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for byte in (b'a'..=b'z').cycle().take(20_000) {
                    figures.note(figures.changes(), &vec![byte; 100 + usize::from(byte)]);
                }
                done.store(true, Ordering::Release);
            });
            while !done.load(Ordering::Acquire) {
                let Some(text) = text(&figures.page) else { continue };
                let first = text[0];
                assert!(text.iter().all(|byte| *byte == first), "{text:?}");
                assert_eq!(text.len(), 100 + usize::from(first));
            }
        });
        assert_eq!(read(&path).unwrap()[0], text(&figures.page).unwrap()[0]);
    }

    #[test]
    fn figures_that_nobody_reads_are_written_all_the_same() {
        let figures = Figures::without_file().unwrap();
        figures.change();
        figures.note(figures.changes(), b"text");
        assert_eq!(text(&figures.page).unwrap(), b"text");
    }
}
