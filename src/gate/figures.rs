//! A container's status in a file, so that readers need not wake its monitor.
//!
//! A worker maps the file `figures` of its monitor's directory. The worker counts the changes of its state in the
//! file. It also stores the last [`Status`](super::wire::Status) that it told, with the number of changes at which
//! that status was true. A reader compares the two numbers: where they are equal, nothing has changed since, and the
//! stored status is true. Otherwise the reader asks the worker. Each worker makes a new file, so that nobody reads
//! the file of a dead worker as the next one's.
//!
//! This module owns the file's layout: words of eight bytes, in this machine's byte order.
#![allow(unsafe_code, reason = "a file that two processes have mapped is raw memory")]

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use memmap2::{MmapMut, MmapOptions, MmapRaw};

use crate::process::ProcessId;

/// Bytes of the file. A status that does not fit is not stored, and is asked for each time.
const BYTES: usize = 16 << 10;

const WORD: usize = size_of::<u64>();

/// The first word: its place, and a number that stands for this layout.
const LAYOUT: (usize, u64) = (0, 0x6367_7075_6669_0001);
/// The worker's pid, and its start in clock ticks since boot.
const PID: usize = 1;
const START: usize = 2;
/// How many changes there were.
const CHANGES: usize = 3;
/// Odd while the words behind this one are being written.
const WRITES: usize = 4;
/// The number of changes at which the text was true.
const TEXT_CHANGES: usize = 5;
/// Bytes of the text; 0 where no text is stored.
const LENGTH: usize = 6;
/// The first word of the text.
const TEXT: usize = 8;

/// The longest text, in bytes.
const MOST_TEXT: usize = BYTES - TEXT * WORD;

/// The words of the mapped file.
#[derive(Debug)]
struct Words {
    map: MmapRaw,
}

impl Words {
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!((at + 1) * WORD <= self.map.len(), "a word of the file");
        // SAFETY: the word lies in the mapping (checked above), which begins at a page and lives as long as `self`.
        // This process and all others access the words as atomics only, and nobody makes the file shorter.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().cast::<u64>().add(at)) }
    }

    fn load(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Relaxed)
    }

    fn store(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }
}

/// The file as its worker writes it.
#[derive(Debug)]
pub struct Figures {
    page: Words,
    /// Held while the text is written: one thread at a time.
    text: Mutex<()>,
    /// The last mark that [`set_mark`](Figures::set_mark) was given.
    mark: AtomicU64,
}

impl Figures {
    /// Makes the file at `path` anew, with no text yet.
    ///
    /// # Errors
    ///
    /// Where the file can't be made, or `/proc` does not show this process.
    pub fn create(path: &Path) -> io::Result<Self> {
        let own = ProcessId::own().ok_or_else(|| io::Error::other("/proc shows no process"))?;
        // A new file takes the old name: a reader that has mapped the old worker's file keeps the old file.
        let new = path.with_extension("new");
        let _ = fs::remove_file(&new);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(&new)?;
        file.set_len(BYTES as u64)?;
        let figures = Self::new(MmapRaw::map_raw(&file)?, own);
        fs::rename(&new, path)?;
        Ok(figures)
    }

    /// Figures in anonymous memory, which no other process reads.
    ///
    /// # Errors
    ///
    /// Where there is no memory for the words.
    pub fn without_file() -> io::Result<Self> {
        let map: MmapMut = MmapOptions::new().len(BYTES).map_anon()?;
        Ok(Self::new(map.into(), ProcessId { pid: 0, start_ticks: 0 }))
    }

    fn new(map: MmapRaw, worker: ProcessId) -> Self {
        let page = Words { map };
        page.store(PID, u64::from(worker.pid.unsigned_abs()));
        page.store(START, worker.start_ticks);
        page.store(LAYOUT.0, LAYOUT.1);
        Figures { page, text: Mutex::new(()), mark: AtomicU64::new(0) }
    }

    /// Counts a change: the stored text is not true any more.
    pub fn change(&self) {
        self.page.word(CHANGES).fetch_add(1, Ordering::Release);
    }

    /// Remembers `mark`, and counts a change where the last mark was another. One thread at a time may call this.
    pub fn set_mark(&self, mark: u64) {
        if self.mark.swap(mark, Ordering::Relaxed) != mark {
            self.change();
        }
    }

    /// How many changes there were. Read this number before the state that may change.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.page.word(CHANGES).load(Ordering::Acquire)
    }

    /// Stores a text that was true when there had been `changes` changes.
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

/// The text of the file at `path`. `None` where the text is not true now: something has changed since it was stored,
/// or the worker that stored it has ended or is stopped.
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

/// The text; `None` where something has changed since it was stored, or it is being written.
fn text(page: &Words) -> Option<Vec<u8>> {
    if page.load(LAYOUT.0) != LAYOUT.1 {
        return None;
    }
    let writes = page.word(WRITES).load(Ordering::Acquire);
    let (changes, length) = (page.load(TEXT_CHANGES), usize::try_from(page.load(LENGTH)).ok()?);
    if length == 0 || length > MOST_TEXT {
        return None;
    }
    let words = (0..length.div_ceil(WORD)).map(|at| page.load(TEXT + at).to_ne_bytes());
    let mut text: Vec<u8> = words.flatten().collect();
    text.truncate(length);
    fence(Ordering::Acquire);
    let is_whole = writes.is_multiple_of(2) && page.load(WRITES) == writes;
    (is_whole && page.load(CHANGES) == changes).then_some(text)
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
        // A text from before the change is not true after the change.
        figures.note(0, b"late");
        assert_eq!(read(&path), None);
        figures.note(figures.changes(), b"now");
        assert_eq!(read(&path).unwrap(), b"now");
        // A text that is too long is not stored, and the old text is not told in its place.
        figures.note(figures.changes(), &vec![b'x'; MOST_TEXT + 1]);
        assert_eq!(read(&path), None);
        figures.note(figures.changes(), &vec![b'x'; MOST_TEXT]);
        assert_eq!(read(&path).unwrap().len(), MOST_TEXT);
        // The next worker's file begins without a text.
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
