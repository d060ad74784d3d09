//! The log in the journal: the changes of the books that outlive a worker. The next worker makes its books from it.
#![allow(unsafe_code, reason = "memory shared with workers before and after is raw memory")]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::libc;

use super::JournalMap;
use crate::monitor::journal::layout::{
    COUNT_BYTES, HALF_BYTES, LOG_OFFSET, Record, is_due, read_records, write,
};

/// How many written bytes of the log leave the worker's memory at once.
const BLOCK_BYTES: usize = 64 << 10;

/// Drops a written block of the log from the worker's memory: until the next worker begins, nobody reads it, and only
/// the keeper needs to hold it.
fn drop_block(memory: &JournalMap, offset: usize) {
    let address = memory.address(offset, BLOCK_BYTES);
    // SAFETY: the block lies in the mapping (checked by `address`) and begins and ends at
    // pages. The mapping is shared with a file, which keeps what was written.
    unsafe { libc::madvise(address.cast(), BLOCK_BYTES, libc::MADV_DONTNEED) };
}

/// How many bytes of records a half has; `half` is where the half begins.
fn log_bytes(memory: &JournalMap, half: usize) -> &AtomicU64 {
    // SAFETY: the count lies in the mapping (checked by `address`), at the beginning of a half, which is a page. It is
    // accessed as an atomic only.
    unsafe { AtomicU64::from_ptr(memory.address(half, COUNT_BYTES).cast()) }
}

/// Where a half begins.
fn offset_of_half(number: u32) -> usize {
    LOG_OFFSET + if number & 1 == 0 { 0 } else { HALF_BYTES }
}

/// The log. One thread at a time writes it.
#[derive(Debug)]
pub(crate) struct Log {
    memory: &'static JournalMap,
    used: usize,
    kept: usize,
    was_full: bool,
}

impl Log {
    /// Opens the log that the journal has.
    pub(crate) fn open(memory: &'static JournalMap) -> Self {
        let half = offset_of_half(memory.head().active_half.load(Ordering::Acquire));
        let used = usize::try_from(log_bytes(memory, half).load(Ordering::Acquire)).unwrap_or(0);
        let used = used.min(HALF_BYTES - COUNT_BYTES);
        Log { memory, used, kept: used, was_full: false }
    }

    /// All records of the log, in order.
    pub(crate) fn records(&self) -> impl Iterator<Item = Record> {
        let half = offset_of_half(self.memory.head().active_half.load(Ordering::Acquire));
        let address = self.memory.address(half + COUNT_BYTES, self.used);
        // SAFETY: the place lies in the mapping (checked by `address`), which is never unmapped: it
        // is `'static`. Nobody writes below the count while this log is borrowed.
        read_records(unsafe { std::slice::from_raw_parts(address, self.used) })
    }

    /// Appends a record. Whenever the worker ends, the log has the whole record or nothing of it.
    pub(crate) fn append(&mut self, record: Record) {
        let active = self.memory.head().active_half.load(Ordering::Relaxed);
        self.put(active, record);
    }

    fn put(&mut self, half: u32, record: Record) {
        let half = offset_of_half(half);
        let room = HALF_BYTES - COUNT_BYTES - self.used;
        let address = self.memory.address(half + COUNT_BYTES + self.used, room);
        // SAFETY: the place lies in the mapping (checked by `address`), beyond the count, where only the owner of the
        // log reads or writes.
        let place = unsafe { std::slice::from_raw_parts_mut(address, room) };
        let Some(bytes) = write(&record, place) else {
            // The limits of the books keep the log far below this size.
            if !std::mem::replace(&mut self.was_full, true) {
                tracing::error!("the journal is full; what happens now is lost with this worker");
            }
            return;
        };
        let before = self.used / BLOCK_BYTES;
        self.used += bytes;
        log_bytes(self.memory, half).store(self.used as u64, Ordering::Release);
        if self.used / BLOCK_BYTES > before {
            drop_block(self.memory, half + before * BLOCK_BYTES);
        }
    }

    /// Whether [`Log::rewrite`] is due.
    pub(crate) fn is_due(&self) -> bool {
        is_due(self.used, self.kept)
    }

    /// Replaces the log by `records`, which have the same meaning.
    pub(crate) fn rewrite(&mut self, records: impl Iterator<Item = Record>) {
        let active = self.memory.head().active_half.load(Ordering::Relaxed);
        let next = (active & 1) ^ 1;
        self.used = 0;
        log_bytes(self.memory, offset_of_half(next)).store(0, Ordering::Release);
        records.for_each(|record| self.put(next, record));
        self.memory.head().active_half.store(next, Ordering::Release);
        self.kept = self.used;
        let _ = free_half(self.memory, offset_of_half(active));
    }
}

/// Gives the pages of a half back to the kernel.
fn free_half(memory: &JournalMap, half: usize) -> io::Result<()> {
    let address = memory.address(half, HALF_BYTES);
    // SAFETY: the half lies in the mapping, begins and ends at pages, and is not in use:
    // the head names the other one.
    let done = unsafe { libc::madvise(address.cast(), HALF_BYTES, libc::MADV_REMOVE) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
