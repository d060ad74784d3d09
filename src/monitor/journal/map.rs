//! The journal, mapped: slots, log and counters.
//!
//! [`crate::monitor::journal::layout`] has the layout. Only this worker writes to the journal while it lives: the
//! keeper only holds the memory, and a thread of a former worker that hangs in the driver never comes back to write.
//! The slot of such a thread is left alone until the thread is gone.
#![allow(unsafe_code, reason = "memory shared with workers before and after is raw memory")]

mod log;
mod traces;

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use memmap2::MmapRaw;
use nix::libc::seccomp_notif;

pub(crate) use log::Log;

use crate::calls::{Calls, DURATIONS_US, Durations};
use crate::monitor::journal::call_id::{CallObject, Words};
use crate::monitor::journal::layout::{
    FORMAT, HEAD_BYTES, JOURNAL_BYTES, SLOT_BYTES, SLOTS, Stage, TRACES_OFFSET,
};
use crate::process::ProcessId;

const ACTIVE: usize = 0;
const HANDLES: usize = 8;
const EXPORTS: usize = 16;
const FILES: usize = 24;
const LEFT_OUT: usize = 32;
const WORKERS: usize = 48;
/// The slot whose call is on the lane, counted from 1; 0 where no call is on it.
const LANE: usize = 56;
const COUNTERS: usize = 64;
const DURATIONS: usize = 256;
const SUM_OF_DURATIONS: usize = DURATIONS + 8 * (DURATIONS_US.len() + 1);

/// The journal's format ([`FORMAT`]). It has the same place in each format.
const FORMAT_AT: usize = TRACES_OFFSET - 8;

const _: () = assert!(SUM_OF_DURATIONS + 8 <= FORMAT_AT);

const NOTICE_BYTES: usize = size_of::<seccomp_notif>();
const STAGE: usize = 128;
/// Not 0 where the call's object existed before the call.
const WAS_THERE: usize = 132;
const LISTENER: usize = 136;
const HANDLE: usize = 144;
const ERROR: usize = 148;
/// The bytes that the call has reserved; 0 where it has reserved none.
const RESERVED: usize = 160;
const RESERVED_GPU: usize = 168;
const RESERVED_CLIENT: usize = 172;
/// When the caller's thread began; 0 where the caller isn't known.
const CALLER_STARTED: usize = 176;
/// The client that the handle belongs to.
const OBJECT_CLIENT: usize = 184;
/// How many handles follow the handle.
const MORE: usize = 188;
const WORKER_TID: usize = 192;
const WORKER_STARTED: usize = 200;
/// The flags of the reply.
const REPLY_FLAGS: usize = 208;

const _: () = assert!(NOTICE_BYTES <= STAGE && REPLY_FLAGS + 4 <= SLOT_BYTES);

const _: () = assert!(std::mem::offset_of!(seccomp_notif, id) == 0);

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

/// What a call has reserved while it is in the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SetAside {
    pub(crate) gpu: usize,
    pub(crate) bytes: u64,
    pub(crate) client: u32,
}

/// The place of one thread's call in the journal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot<'a> {
    memory: &'a JournalMap,
    offset: usize,
}

impl JournalMap {
    /// Maps the journal.
    ///
    /// # Errors
    ///
    /// Where it can't be mapped, is shorter than [`JOURNAL_BYTES`], or has another format. A journal of another format
    /// is of a worker of another version, whose program goes on with the journal.
    pub(crate) fn map(file: &File) -> io::Result<Self> {
        let map = MmapRaw::map_raw(file)?;
        if map.len() < JOURNAL_BYTES {
            return Err(io::Error::other("the journal is shorter than this version's"));
        }
        let journal = Self { map };
        let format = journal.long(FORMAT_AT);
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

    fn word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "aligned");
        let address = self.address(offset, 4).cast::<u32>();
        // SAFETY: aligned (checked; the mapping begins at a page), in the mapping, which
        // lives as long as `self`; all of it is accessed as atomics only.
        unsafe { AtomicU32::from_ptr(address) }
    }

    fn long(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "aligned");
        let address = self.address(offset, 8).cast::<u64>();
        // SAFETY: as in `word`.
        unsafe { AtomicU64::from_ptr(address) }
    }

    /// The slot with this number.
    pub(crate) fn slot(&self, number: usize) -> Slot<'_> {
        assert!(number < SLOTS, "a slot's number");
        Slot { memory: self, offset: HEAD_BYTES + number * SLOT_BYTES }
    }

    /// A number for an export that neither this worker nor a former one has given.
    pub(crate) fn next_export(&self) -> u64 {
        self.long(EXPORTS).fetch_add(1, Ordering::Relaxed)
    }

    /// Takes `count` consecutive numbers for handles. Returns the first one.
    pub(crate) fn next_handles(&self, count: u32) -> u32 {
        self.word(HANDLES).fetch_add(count, Ordering::Relaxed)
    }

    /// A number for a file of UVM's. After 2³² files the numbers begin anew.
    pub(crate) fn next_file(&self) -> u32 {
        self.word(FILES).fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn count(&self, count: Count) {
        self.long(COUNTERS + 8 * count as usize).fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the duration of a call.
    pub(crate) fn add_duration(&self, time: Duration) {
        let place = DURATIONS + 8 * Durations::place(time);
        self.long(place).fetch_add(1, Ordering::Relaxed);
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.long(SUM_OF_DURATIONS).fetch_add(ns, Ordering::Relaxed);
    }

    /// How long calls took.
    pub(crate) fn durations(&self) -> Durations {
        let count = |at| self.long(DURATIONS + 8 * at).load(Ordering::Relaxed);
        Durations {
            counts: std::array::from_fn(count),
            sum_ns: self.long(SUM_OF_DURATIONS).load(Ordering::Relaxed),
        }
    }

    /// The slot whose call is on the lane, or was on it when the worker before ended.
    pub(crate) fn lane(&self) -> Option<usize> {
        let number = usize::try_from(self.word(LANE).load(Ordering::Acquire)).ok()?;
        number.checked_sub(1).filter(|slot| *slot < SLOTS)
    }

    /// Notes the slot whose call is on the lane; `None` where no call is.
    pub(crate) fn set_lane(&self, slot: Option<usize>) {
        let number = slot.and_then(|slot| u32::try_from(slot + 1).ok()).unwrap_or(0);
        self.word(LANE).store(number, Ordering::Release);
    }

    /// Counts a worker that begins.
    pub(crate) fn count_worker(&self) {
        self.long(WORKERS).fetch_add(1, Ordering::Relaxed);
    }

    /// How many workers have begun.
    pub(crate) fn workers(&self) -> u64 {
        self.long(WORKERS).load(Ordering::Relaxed)
    }

    /// Counts one more event that was left out.
    pub(crate) fn leave_out(&self, what: LeftOut) {
        self.left_out(what).fetch_add(1, Ordering::Relaxed);
    }

    /// Whether events of this kind were left out.
    pub(crate) fn has_left_out(&self, what: LeftOut) -> bool {
        self.left_out(what).load(Ordering::Relaxed) > 0
    }

    /// How many events were left out, for the next event to tell. The count begins anew.
    pub(crate) fn take_left_out(&self, what: LeftOut) -> u64 {
        self.left_out(what).swap(0, Ordering::Relaxed)
    }

    fn left_out(&self, what: LeftOut) -> &AtomicU64 {
        self.long(LEFT_OUT + 8 * what as usize)
    }

    pub(crate) fn calls(&self) -> Calls {
        let [continued, executed, over_quota, refused, killed] =
            [0, 1, 2, 3, 4].map(|at| self.long(COUNTERS + 8 * at).load(Ordering::Relaxed));
        Calls { continued, executed, over_quota, refused, killed }
    }
}

impl<'a> Slot<'a> {
    /// Clears the slot for a notification of the listener with this number.
    pub(crate) fn clear(self, listener: u64) {
        self.memory.long(self.offset).store(0, Ordering::Relaxed);
        let address = self.memory.address(self.offset, NOTICE_BYTES);
        // SAFETY: the place lies in the mapping, and this thread alone uses its slot.
        unsafe { address.write_bytes(0, NOTICE_BYTES) };
        self.memory.long(self.offset + LISTENER).store(listener, Ordering::Relaxed);
        self.memory.long(self.offset + CALLER_STARTED).store(0, Ordering::Relaxed);
        for word in [OBJECT_CLIENT, HANDLE, MORE, WAS_THERE] {
            self.memory.word(self.offset + word).store(0, Ordering::Relaxed);
        }
        self.set_aside(None);
        self.memory.word(self.offset + STAGE).store(Stage::Received as u32, Ordering::Release);
    }

    /// Ends the notification with this id, with all that the slot has of it. Does nothing where the slot has another
    /// notification by now: other threads than the slot's own may call this.
    pub(crate) fn forget(self, id: u64) {
        let place = self.memory.long(self.offset);
        let _ = place.compare_exchange(id, 0, Ordering::Release, Ordering::Relaxed);
    }

    /// Notes the caller's thread.
    pub(crate) fn set_thread(self, thread: ProcessId) {
        self.memory.long(self.offset + CALLER_STARTED).store(thread.start_ticks, Ordering::Relaxed);
    }

    /// The caller's thread; `None` where it isn't known.
    pub(crate) fn thread(self) -> Option<ProcessId> {
        let start_ticks = self.memory.long(self.offset + CALLER_STARTED).load(Ordering::Relaxed);
        let pid = self.notice().pid.cast_signed();
        (start_ticks != 0).then_some(ProcessId { pid, start_ticks })
    }

    /// Where the kernel writes a notification. A notification that is written there is never lost.
    pub(crate) fn notice_address(self) -> *mut seccomp_notif {
        self.memory.address(self.offset, NOTICE_BYTES).cast()
    }

    /// Stores a test's notification in the place where the kernel would write one.
    #[cfg(test)]
    pub(crate) fn receive_of_model(self, listener: u64, notice: seccomp_notif) {
        self.clear(listener);
        // SAFETY: as in `notice`.
        unsafe { self.notice_address().write(notice) };
    }

    /// The slot's notification. Its id is 0 where there is none.
    pub(crate) fn notice(self) -> seccomp_notif {
        // SAFETY: the place lies in the mapping, aligned to a page or 256 bytes; any bytes
        // are a notification, and this thread alone uses its slot.
        unsafe { self.notice_address().read() }
    }

    /// The registers of the slot's call.
    pub(crate) fn words(self) -> Words {
        let [descriptor, request, argument, ..] = self.notice().data.args;
        (request & 0xffff_ffff | descriptor << 32, argument)
    }

    pub(crate) fn listener(self) -> u64 {
        self.memory.long(self.offset + LISTENER).load(Ordering::Relaxed)
    }

    pub(crate) fn stage(self) -> Stage {
        Stage::of(self.memory.word(self.offset + STAGE).load(Ordering::Acquire))
    }

    /// Notes what the call has reserved, for the next worker.
    pub(crate) fn set_aside(self, memory: Option<SetAside>) {
        // The bytes say whether GPU and client count: they are written last, and are cleared alone.
        if let Some(SetAside { gpu, client, .. }) = memory {
            let gpu = u32::try_from(gpu).unwrap_or(u32::MAX);
            self.memory.word(self.offset + RESERVED_GPU).store(gpu, Ordering::Relaxed);
            self.memory.word(self.offset + RESERVED_CLIENT).store(client, Ordering::Relaxed);
        }
        let bytes = memory.map_or(0, |memory| memory.bytes);
        self.memory.long(self.offset + RESERVED).store(bytes, Ordering::Release);
    }

    /// What the slot's call has reserved; `None` where it has reserved nothing.
    pub(crate) fn was_set_aside(self) -> Option<SetAside> {
        let bytes = self.memory.long(self.offset + RESERVED).load(Ordering::Acquire);
        let gpu = self.memory.word(self.offset + RESERVED_GPU).load(Ordering::Relaxed);
        let client = self.memory.word(self.offset + RESERVED_CLIENT).load(Ordering::Relaxed);
        let gpu = usize::try_from(gpu).ok()?;
        (bytes != 0).then_some(SetAside { gpu, bytes, client })
    }

    /// Notes the worker's thread that uses the slot from now on.
    pub(crate) fn set_worker_thread(self, thread: ProcessId) {
        // The thread's id says whether its start time counts: the id is cleared first and written last.
        let tid = thread.pid.cast_unsigned();
        self.memory.word(self.offset + WORKER_TID).store(0, Ordering::Release);
        self.memory.long(self.offset + WORKER_STARTED).store(thread.start_ticks, Ordering::Release);
        self.memory.word(self.offset + WORKER_TID).store(tid, Ordering::Release);
    }

    /// The thread of this worker or a former one that used the slot last; `None` where none did.
    pub(crate) fn worker_thread(self) -> Option<ProcessId> {
        let tid = self.memory.word(self.offset + WORKER_TID).load(Ordering::Acquire).cast_signed();
        let start_ticks = self.memory.long(self.offset + WORKER_STARTED).load(Ordering::Acquire);
        (tid != 0).then_some(ProcessId { pid: tid, start_ticks })
    }

    /// The slot's number.
    pub(crate) fn number(self) -> usize {
        (self.offset - HEAD_BYTES) / SLOT_BYTES
    }

    /// Notes that the driver is about to be asked, and for which object.
    pub(crate) fn set_executing(self, CallObject { client, handle, more, was_there }: CallObject) {
        let was_there = u32::from(was_there);
        let words =
            [(OBJECT_CLIENT, client), (HANDLE, handle), (MORE, more), (WAS_THERE, was_there)];
        for (field, value) in words {
            self.memory.word(self.offset + field).store(value, Ordering::Relaxed);
        }
        self.memory.word(self.offset + STAGE).store(Stage::Executing as u32, Ordering::Release);
    }

    /// The object that the driver was asked for.
    pub(crate) fn call_object(self) -> CallObject {
        let [client, handle, more, was_there] = [OBJECT_CLIENT, HANDLE, MORE, WAS_THERE]
            .map(|field| self.memory.word(self.offset + field).load(Ordering::Relaxed));
        CallObject { client, handle, more, was_there: was_there != 0 }
    }

    /// Notes that the call is decided and only the reply is left.
    pub(crate) fn set_decided(self, (error, flags): (i32, u32)) {
        self.memory.word(self.offset + ERROR).store(error.cast_unsigned(), Ordering::Relaxed);
        self.memory.word(self.offset + REPLY_FLAGS).store(flags, Ordering::Relaxed);
        self.memory.word(self.offset + STAGE).store(Stage::Decided as u32, Ordering::Release);
    }

    /// Error and flags of the reply.
    pub(crate) fn decision(self) -> (i32, u32) {
        let error = self.memory.word(self.offset + ERROR).load(Ordering::Relaxed);
        let flags = self.memory.word(self.offset + REPLY_FLAGS).load(Ordering::Relaxed);
        (error.cast_signed(), flags)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    /// The journal of a container that has had no worker yet.
    pub(crate) fn journal() -> File {
        let journal = File::from(memfd_create("journal", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&journal, JOURNAL_BYTES as u64).unwrap();
        journal
    }

    #[test]
    fn a_journal_of_another_format_is_not_read() {
        let file = journal();
        assert!(JournalMap::map(&file).is_ok(), "one that is new");
        assert!(JournalMap::map(&file).is_ok(), "one that a worker has had");
        JournalMap::map(&file).unwrap().long(FORMAT_AT).store(FORMAT + 1, Ordering::Release);
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
        let memory = JournalMap::map(&journal()).unwrap();
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
