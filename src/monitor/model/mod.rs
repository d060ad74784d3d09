//! The worker without a kernel: calls are handed to it, and it asks a driver in memory.
//!
//! A call comes from a process that waits for nothing but its end, with a page of memory that the test has,
//! too. What the worker does for it is the product's own way from [`Case`] on: it reads and writes the caller's
//! memory, takes its descriptors, asks the driver and writes the journal. A worker that is killed is a thread
//! that ends in the middle of a driver call, with nothing undone; the next one has the journal. Needs no root,
//! no file system and no engine.

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
use crate::monitor::caller::scratch::Scratch;
use crate::monitor::calls::case::Case;
use crate::monitor::calls::left_calls::move_in;
use crate::monitor::calls::serve::serve;
use crate::monitor::worker::Worker;

/// Bytes of the GPU, and of the container's quota.
pub(crate) const TOTAL: u64 = 1 << 30;
pub(crate) const QUOTA: u64 = 100 << 20;

/// The slot of the test's own thread, and of those that die.
const OWN_SLOT: usize = 0;
const DYING_SLOT: usize = 1;

/// The only listener's number.
const LISTENER: u64 = 1;

/// What becomes of a call and of its caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is answered.
    Answered,
    /// It is answered and a signal takes its caller away before that looks: the kernel makes it again.
    AnswerIsLost,
    /// Its caller stops waiting before it is looked at.
    Interrupted,
    /// Its caller stops waiting before it gets the reply.
    ReplyIsLost,
    /// The worker dies in its `nth` call of the driver, counted from 0, before the driver has heard of that or
    /// after it has done it; the caller waits for the next worker, or not.
    WorkerDies { nth: u32, death: Death, waits: bool },
}

/// What a caller was answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallerGets {
    /// The call is the caller's to make.
    Continue,
    /// It failed with this error number.
    Errno(i32),
    /// It was made.
    Done,
    /// It wasn't answered.
    Nothing,
}

impl Worker {
    /// Deals with a call in that slot, by this thread.
    fn serve_in(&self, slot: usize, notice: seccomp_notif) {
        let slot = self.parts.state.journal.slot(slot);
        if slot.number() == DYING_SLOT {
            move_in(slot);
        }
        slot.receive_of_model(LISTENER, notice);
        let listener = self.listeners.get(LISTENER).expect("it was handed over");
        serve(&mut Case::new(&self.parts, &mut Scratch::default(), slot, &listener, notice, false));
    }
}

/// A call as a program makes it.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// The escape's number (`nv_escape.h`), or UVM's.
    pub(crate) number: u32,
    /// The file that it is made on: its descriptor.
    pub(crate) descriptor: RawFd,
    /// Its struct, and what that points at, with the place of the pointer.
    pub(crate) bytes: Vec<u8>,
    pub(crate) params: Option<(usize, Vec<u8>)>,
}
