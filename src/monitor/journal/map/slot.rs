//! A slot: the place of one thread's call in the journal.
#![allow(unsafe_code, reason = "the kernel writes notifications to the slot")]

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::libc::seccomp_notif;

use crate::ledger::Process;
use crate::monitor::journal::call_id::{CallObject, Registers, Trace};
use crate::monitor::journal::layout::Stage;
use crate::process::ProcessId;

/// What a call has reserved while it is in the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallReservation {
    pub(crate) gpu: usize,
    pub(crate) bytes: u64,
    pub(crate) client: u32,
}

/// A slot as the journal has it. All of it is 0 in a new journal.
#[repr(C)]
#[derive(Debug)]
pub(super) struct SlotMemory {
    notice: UnsafeCell<seccomp_notif>,
    /// The number of the listener that the notification came by.
    listener: AtomicU64,
    /// When the caller's thread began; 0 where the caller isn't known.
    caller_started: AtomicU64,
    /// The bytes that the call has reserved; 0 where it has reserved none.
    reserved_bytes: AtomicU64,
    worker_started: AtomicU64,
    worker_tid: AtomicU32,
    reserved_gpu: AtomicU32,
    reserved_client: AtomicU32,
    /// A [`Stage`].
    stage: AtomicU32,
    /// The call's object: its client, its handle, how many handles follow that one, and whether the object existed
    /// before the call (not 0).
    object: [AtomicU32; 4],
    /// Error and flags of the reply.
    reply: [AtomicU32; 2],
    /// The number of the caller's process; 0 where the caller isn't known, or a worker of an older version noted it.
    caller_process: AtomicU64,
    /// How many workers crashed while they had the call.
    crashes: AtomicU32,
}

const _: () = assert!(std::mem::offset_of!(seccomp_notif, id) == 0);

/// The place of one thread's call in the journal.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot<'a> {
    number: usize,
    memory: &'a SlotMemory,
}

impl<'a> Slot<'a> {
    pub(super) fn new(number: usize, memory: &'a SlotMemory) -> Self {
        Slot { number, memory }
    }

    /// The id of the slot's notification; 0 where there is none.
    fn notice_id(self) -> &'a AtomicU64 {
        // SAFETY: the id is the notification's first field, aligned, and lives as long as the slot.
        unsafe { AtomicU64::from_ptr(self.notice_address().cast()) }
    }

    /// Clears the slot for a notification of the listener with this number.
    pub(crate) fn clear(self, listener: u64) {
        self.notice_id().store(0, Ordering::Relaxed);
        // SAFETY: this thread alone uses its slot, and all zeroes are a notification.
        unsafe { self.notice_address().write_bytes(0, 1) };
        self.memory.listener.store(listener, Ordering::Relaxed);
        self.memory.caller_started.store(0, Ordering::Relaxed);
        self.memory.caller_process.store(0, Ordering::Relaxed);
        self.memory.crashes.store(0, Ordering::Relaxed);
        self.store_object(CallObject::default());
        self.set_reservation(None);
        self.memory.stage.store(Stage::Received as u32, Ordering::Release);
    }

    /// Ends the notification with this id, with all that the slot has of it. Does nothing where the slot has another
    /// notification by now: other threads than the slot's own may call this.
    pub(crate) fn forget(self, id: u64) {
        let _ = self.notice_id().compare_exchange(id, 0, Ordering::Release, Ordering::Relaxed);
    }

    /// Notes the caller's thread and process.
    pub(crate) fn set_caller(self, thread: ProcessId, process: Process) {
        self.memory.caller_process.store(process.0, Ordering::Relaxed);
        self.memory.caller_started.store(thread.start_ticks, Ordering::Release);
    }

    /// The caller's thread; `None` where it isn't known.
    pub(crate) fn thread(self) -> Option<ProcessId> {
        let start_ticks = self.memory.caller_started.load(Ordering::Acquire);
        let pid = self.notice().pid.cast_signed();
        (start_ticks != 0).then_some(ProcessId { pid, start_ticks })
    }

    /// What the slot has of its call, whether the driver was asked or not. `None` where its caller isn't known.
    pub(crate) fn trace(self) -> Option<Trace> {
        let process = Process(self.memory.caller_process.load(Ordering::Relaxed));
        let (registers, object) = (self.registers(), self.call_object());
        self.thread().map(|thread| Trace { thread, process, registers, object })
    }

    /// Where the kernel writes a notification. A notification that is written there is never lost.
    pub(crate) fn notice_address(self) -> *mut seccomp_notif {
        self.memory.notice.get()
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
        // SAFETY: any bytes are a notification, and this thread alone uses its slot.
        unsafe { self.notice_address().read() }
    }

    /// The registers of the slot's call.
    pub(crate) fn registers(self) -> Registers {
        let [descriptor, request, argument, ..] = self.notice().data.args;
        (request & 0xffff_ffff | descriptor << 32, argument)
    }

    pub(crate) fn listener(self) -> u64 {
        self.memory.listener.load(Ordering::Relaxed)
    }

    pub(crate) fn stage(self) -> Stage {
        Stage::of(self.memory.stage.load(Ordering::Acquire))
    }

    /// Notes what the call has reserved, for the next worker.
    pub(crate) fn set_reservation(self, memory: Option<CallReservation>) {
        // The bytes say whether GPU and client count: they are written last, and are cleared alone.
        if let Some(CallReservation { gpu, client, .. }) = memory {
            let gpu = u32::try_from(gpu).unwrap_or(u32::MAX);
            self.memory.reserved_gpu.store(gpu, Ordering::Relaxed);
            self.memory.reserved_client.store(client, Ordering::Relaxed);
        }
        let bytes = memory.map_or(0, |memory| memory.bytes);
        self.memory.reserved_bytes.store(bytes, Ordering::Release);
    }

    /// What the slot's call has reserved; `None` where it has reserved nothing.
    pub(crate) fn reservation(self) -> Option<CallReservation> {
        let bytes = self.memory.reserved_bytes.load(Ordering::Acquire);
        let gpu = self.memory.reserved_gpu.load(Ordering::Relaxed);
        let client = self.memory.reserved_client.load(Ordering::Relaxed);
        let gpu = usize::try_from(gpu).ok()?;
        (bytes != 0).then_some(CallReservation { gpu, bytes, client })
    }

    /// Notes the worker's thread that uses the slot from now on.
    pub(crate) fn set_worker_thread(self, thread: ProcessId) {
        // The thread's id says whether its start time counts: the id is cleared first and written last.
        let tid = thread.pid.cast_unsigned();
        self.memory.worker_tid.store(0, Ordering::Release);
        self.memory.worker_started.store(thread.start_ticks, Ordering::Release);
        self.memory.worker_tid.store(tid, Ordering::Release);
    }

    /// The thread of this worker or a former one that used the slot last; `None` where none did.
    pub(crate) fn worker_thread(self) -> Option<ProcessId> {
        let tid = self.memory.worker_tid.load(Ordering::Acquire).cast_signed();
        let start_ticks = self.memory.worker_started.load(Ordering::Acquire);
        (tid != 0).then_some(ProcessId { pid: tid, start_ticks })
    }

    /// The slot's number.
    pub(crate) fn number(self) -> usize {
        self.number
    }

    /// Counts a worker that crashed while it had the slot's call.
    pub(crate) fn count_crash(self) {
        self.memory.crashes.fetch_add(1, Ordering::Relaxed);
    }

    /// How many workers crashed while they had the slot's call.
    pub(crate) fn crashes(self) -> u32 {
        self.memory.crashes.load(Ordering::Relaxed)
    }

    /// Notes that the driver is about to be asked, and for which object.
    pub(crate) fn set_executing(self, object: CallObject) {
        self.store_object(object);
        self.memory.stage.store(Stage::Executing as u32, Ordering::Release);
    }

    fn store_object(self, CallObject { client, handle, more, was_there }: CallObject) {
        // The handle says whether there is an object: it is cleared first and written last.
        let [client_field, handle_field, more_field, was_there_field] = &self.memory.object;
        handle_field.store(0, Ordering::Release);
        client_field.store(client, Ordering::Release);
        more_field.store(more, Ordering::Release);
        was_there_field.store(was_there.into(), Ordering::Release);
        handle_field.store(handle, Ordering::Release);
    }

    /// The object that the driver was asked for.
    pub(crate) fn call_object(self) -> CallObject {
        let [client, handle, more, was_there] =
            self.memory.object.each_ref().map(|field| field.load(Ordering::Relaxed));
        CallObject { client, handle, more, was_there: was_there != 0 }
    }

    /// Notes that the call is decided and only the reply is left.
    pub(crate) fn set_decided(self, (error, flags): (i32, u32)) {
        let [error_field, flags_field] = &self.memory.reply;
        error_field.store(error.cast_unsigned(), Ordering::Relaxed);
        flags_field.store(flags, Ordering::Relaxed);
        self.memory.stage.store(Stage::Decided as u32, Ordering::Release);
    }

    /// Error and flags of the reply.
    pub(crate) fn decision(self) -> (i32, u32) {
        let [error, flags] =
            self.memory.reply.each_ref().map(|field| field.load(Ordering::Relaxed));
        (error.cast_signed(), flags)
    }
}
