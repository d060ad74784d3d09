//! The journal, mapped: head, slots and log.
//!
//! Only this worker writes to the journal while it lives: the keeper only holds the memory, and a thread of a former
//! worker that hangs in the driver never comes back to write. The slot of such a thread is left alone until the thread
//! is gone. The log's records have their layout from [`crate::monitor::journal::layout`].
#![allow(unsafe_code, reason = "memory shared with workers before and after is raw memory")]

mod log;
mod slot;
mod traces;

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use memmap2::MmapRaw;

pub(crate) use log::Log;
pub(crate) use slot::{CallReservation, Slot};

use crate::calls::{Calls, DURATIONS_US, Durations};
use crate::monitor::journal::call_id::Trace;
use crate::monitor::journal::layout::{
    FORMAT, HEAD_BYTES, JOURNAL_BYTES, SLOT_BYTES, SLOTS, TRACE_PLACES,
};
use slot::SlotMemory;
use traces::StoredTrace;

/// The head of the journal. All of it is 0 in a new journal.
#[repr(C)]
#[derive(Debug)]
struct Head {
    /// The journal's [`FORMAT`]. It has the same place in each format.
    format: AtomicU64,
    /// The half of the log that is in use: 0 or 1.
    active_half: AtomicU32,
    next_handle: AtomicU32,
    next_export: AtomicU64,
    next_file: AtomicU32,
    /// The slot whose call is on the lane, counted from 1; 0 where no call is on it.
    lane: AtomicU32,
    /// How many workers have begun.
    workers: AtomicU64,
    /// By [`LeftOut`].
    left_out: [AtomicU64; 2],
    /// By [`Count`].
    calls: [AtomicU64; 5],
    /// How many calls took so long, by [`DURATIONS_US`].
    durations: [AtomicU64; DURATIONS_US.len() + 1],
    durations_sum_ns: AtomicU64,
    traces: [StoredTrace; TRACE_PLACES],
}

const _: () = assert!(size_of::<Head>() <= HEAD_BYTES && size_of::<SlotMemory>() <= SLOT_BYTES);

/// Makes all threads allocate from one heap. The threads take turns with calls, so a heap for each would become as
/// large as the common one, and would keep what its thread once needed.
pub(crate) fn share_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the function takes only numbers, and there is no second thread yet.
    unsafe {
        nix::libc::mallopt(nix::libc::M_ARENA_MAX, 1)
    };
}

/// What became of a call, for the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Count {
    Continued = 0,
    Executed = 1,
    OverQuota = 2,
    Refused = 3,
    Killed = 4,
}

/// Events that were left out. The next event tells how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeftOut {
    /// Allocations over the quota.
    Refusals = 0,
    /// Processes that were killed.
    Kills = 1,
}

/// The mapped journal.
#[derive(Debug)]
pub(crate) struct JournalMap {
    map: MmapRaw,
}

impl JournalMap {
    /// Maps the journal. Fails where it can't be mapped, is shorter than [`JOURNAL_BYTES`], or has another format. A
    /// journal of another format is of a worker of another version, whose program goes on with the journal.
    pub(crate) fn map(file: &File) -> io::Result<Self> {
        let map = MmapRaw::map_raw(file)?;
        if map.len() < JOURNAL_BYTES {
            return Err(io::Error::other("the journal is shorter than this version's"));
        }
        let journal = Self { map };
        let format = &journal.head().format;
        match format.compare_exchange(0, FORMAT, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) | Err(FORMAT) => Ok(journal),
            Err(other) => Err(io::Error::other(format!(
                "the journal has format {other}, and this version's is {FORMAT}"
            ))),
        }
    }

    fn address(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset + bytes <= JOURNAL_BYTES, "a place in the journal");
        // SAFETY: the place lies in the mapping, whose length was checked when it was made.
        unsafe { self.map.as_mut_ptr().add(offset) }
    }

    fn head(&self) -> &Head {
        let address = self.address(0, size_of::<Head>()).cast::<Head>();
        // SAFETY: the head lies in the mapping (checked by `address`), which begins at a page and lives as long as
        // `self`. It has atomics only, of which any bytes are valid.
        unsafe { &*address }
    }

    /// The slot with this number.
    pub(crate) fn slot(&self, number: usize) -> Slot<'_> {
        assert!(number < SLOTS, "a slot's number");
        let address = self.address(HEAD_BYTES + number * SLOT_BYTES, SLOT_BYTES);
        // SAFETY: the slot lies in the mapping (checked by `address`), aligned to 256 bytes, and the mapping lives as
        // long as `self`. The slot has atomics and a notification, of which any bytes are valid.
        Slot::new(number, unsafe { &*address.cast::<SlotMemory>() })
    }

    /// A number for an export that neither this worker nor a former one has given.
    pub(crate) fn next_export(&self) -> u64 {
        self.head().next_export.fetch_add(1, Ordering::Relaxed)
    }

    /// Takes `count` consecutive numbers for handles. Returns the first one.
    pub(crate) fn next_handles(&self, count: u32) -> u32 {
        self.head().next_handle.fetch_add(count, Ordering::Relaxed)
    }

    /// A number for a file of UVM's. After 2³² files the numbers begin anew.
    pub(crate) fn next_file(&self) -> u32 {
        self.head().next_file.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn count(&self, count: Count) {
        self.head().calls[count as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the duration of a call.
    pub(crate) fn add_duration(&self, time: Duration) {
        let head = self.head();
        if let Some(count) = head.durations.get(Durations::place(time)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        head.durations_sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// How long calls took.
    pub(crate) fn durations(&self) -> Durations {
        let head = self.head();
        Durations {
            counts: head.durations.each_ref().map(|count| count.load(Ordering::Relaxed)),
            sum_ns: head.durations_sum_ns.load(Ordering::Relaxed),
        }
    }

    /// The slot whose call is on the lane, or was on it when the worker before ended.
    pub(crate) fn lane(&self) -> Option<usize> {
        let number = usize::try_from(self.head().lane.load(Ordering::Acquire)).ok()?;
        number.checked_sub(1).filter(|slot| *slot < SLOTS)
    }

    /// Notes the slot whose call is on the lane; `None` where no call is.
    pub(crate) fn set_lane(&self, slot: Option<usize>) {
        let number = slot.and_then(|slot| u32::try_from(slot + 1).ok()).unwrap_or(0);
        self.head().lane.store(number, Ordering::Release);
    }

    /// Counts a worker that begins.
    pub(crate) fn count_worker(&self) {
        self.head().workers.fetch_add(1, Ordering::Relaxed);
    }

    /// How many workers have begun.
    pub(crate) fn workers(&self) -> u64 {
        self.head().workers.load(Ordering::Relaxed)
    }

    /// Counts one more event that was left out.
    pub(crate) fn leave_out(&self, what: LeftOut) {
        self.head().left_out[what as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Whether events of this kind were left out.
    pub(crate) fn has_left_out(&self, what: LeftOut) -> bool {
        self.head().left_out[what as usize].load(Ordering::Relaxed) > 0
    }

    /// How many events were left out, for the next event to tell. The count begins anew.
    pub(crate) fn take_left_out(&self, what: LeftOut) -> u64 {
        self.head().left_out[what as usize].swap(0, Ordering::Relaxed)
    }

    /// Stores a trace. Returns its place, or `None` where no place is free. One thread at a time may do this.
    pub(crate) fn keep_trace(&self, trace: &Trace) -> Option<usize> {
        let all = &self.head().traces;
        let (place, stored) = (0..).zip(all).find(|(_, stored)| stored.load().is_none())?;
        stored.store(trace);
        Some(place)
    }

    /// Removes the trace at this place.
    pub(crate) fn forget_trace(&self, place: usize) {
        self.head().traces[place].clear();
    }

    /// All traces, with their places.
    pub(crate) fn traces(&self) -> impl Iterator<Item = (usize, Trace)> {
        (0..).zip(&self.head().traces).filter_map(|(place, stored)| Some((place, stored.load()?)))
    }

    pub(crate) fn calls(&self) -> Calls {
        let [continued, executed, over_quota, refused, killed] =
            self.head().calls.each_ref().map(|count| count.load(Ordering::Relaxed));
        Calls { continued, executed, over_quota, refused, killed }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::monitor::journal::call_id::CallObject;
    use crate::monitor::journal::layout::Stage;

    /// The journal of a container that has had no worker yet.
    pub(crate) fn new_journal() -> File {
        let journal = File::from(memfd_create("journal", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&journal, JOURNAL_BYTES as u64).unwrap();
        journal
    }

    #[test]
    fn a_journal_of_another_format_is_not_read() {
        let file = new_journal();
        assert!(JournalMap::map(&file).is_ok(), "one that is new");
        assert!(JournalMap::map(&file).is_ok(), "one that a worker has had");
        JournalMap::map(&file).unwrap().head().format.store(FORMAT + 1, Ordering::Release);
        let refused = JournalMap::map(&file).unwrap_err().to_string();
        assert_eq!(
            refused,
            format!("the journal has format {}, and this version's is {FORMAT}", FORMAT + 1)
        );
        file.set_len(JOURNAL_BYTES as u64 - 4096).unwrap();
        let refused = JournalMap::map(&file).unwrap_err().to_string();
        assert_eq!(refused, "the journal is shorter than this version's");
    }

    /// Where a worker is killed before the stage says that the call is decided, the next worker reads both.
    #[test]
    fn what_is_decided_leaves_what_the_driver_was_asked_for_as_it_was() {
        let memory = JournalMap::map(&new_journal()).unwrap();
        let slot = memory.slot(3);
        let asked = CallObject { client: 5, handle: 6, more: 2, was_there: true };
        slot.set_executing(asked);
        slot.set_decided((-4, 0));
        assert_eq!(
            (slot.call_object(), slot.decision(), slot.stage()),
            (asked, (-4, 0), Stage::Decided)
        );
        slot.clear(1);
        assert_eq!((slot.call_object(), slot.stage()), (CallObject::default(), Stage::Received));
    }
}
