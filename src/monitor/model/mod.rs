//! The worker without a kernel: tests hand calls to the worker, and the worker asks a driver in memory.
//!
//! A call comes from a process that only waits for its end and shares a page of memory with the test. From [`Case`] on,
//! the worker does what the product does: it reads and writes the caller's memory, takes the caller's descriptors, asks
//! the driver and writes the journal. A worker that is killed is a thread that ends in the middle of a driver call,
//! with nothing undone; the next worker gets the journal. The model needs no root, no file system and no engine.

mod driver;
mod exports;
mod objects;
mod program;
mod start;
mod uvm;
mod world;

#[cfg(test)]
mod tests;

use std::os::fd::RawFd;

use nix::libc::seccomp_notif;

pub(crate) use self::driver::{DRIVER, Death, ModelDriver, ModelFile, set_death};
pub(crate) use self::program::Program;
pub(crate) use self::world::World;
use crate::monitor::caller::Scratch;
use crate::monitor::calls::{Case, serve, take_over_slot};
use crate::monitor::worker::Worker;

/// Bytes of the GPU, and bytes of the container's quota.
pub(crate) const TOTAL: u64 = 1 << 30;
pub(crate) const QUOTA: u64 = 100 << 20;

/// The slot of the test's own thread, and the slot of threads that die.
const OWN_SLOT: usize = 0;
const DYING_SLOT: usize = 1;

/// The number of the only listener.
const LISTENER: u64 = 1;

/// What happens to a call and to its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The call is answered.
    Answered,
    /// The call is answered, but a signal interrupts the caller before it sees the answer: the kernel makes the call
    /// again.
    AnswerIsLost,
    /// The caller stops waiting before the worker looks at the call.
    Interrupted,
    /// The caller stops waiting before it gets the reply.
    ReplyIsLost,
    /// The worker dies in its `nth` call of the driver, counted from 0, before or after the driver makes the call.
    /// `waits`: whether the caller waits for the next worker.
    WorkerDies { nth: u32, death: Death, waits: bool },
    /// So many workers, one after another, crash in their first call of the driver for this call, before the driver makes
    /// it. The caller waits.
    EndsWorkers(u32),
}

/// What the caller gets for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallerGets {
    /// The caller has to make the call itself.
    Continue,
    /// The call failed with this error number.
    Errno(i32),
    /// The call was made.
    Done,
    /// The call was not answered.
    Nothing,
}

/// Has a worker serve a call in the slot by this thread.
fn serve_in(worker: &Worker, slot: usize, notice: seccomp_notif) {
    let slot = worker.parts.state.journal.slot(slot);
    if slot.number() == DYING_SLOT {
        take_over_slot(slot);
    }
    slot.receive_of_model(LISTENER, notice);
    let listener = worker.listeners.get(LISTENER).expect("it was handed over");
    serve(&mut Case::new(&worker.parts, &mut Scratch::default(), slot, &listener, notice, false));
}

/// A call as a program makes it.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// The number of the escape (`nv_escape.h`) or of UVM's call.
    pub(crate) number: u32,
    /// The descriptor that the call is made on.
    pub(crate) descriptor: RawFd,
    /// The call's struct; then the parameters that the struct points at, with the offset of the pointer.
    pub(crate) bytes: Vec<u8>,
    pub(crate) params: Option<(usize, Vec<u8>)>,
}
