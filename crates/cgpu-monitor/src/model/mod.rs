//! The monitor without a kernel: tests hand calls to it, and it asks a driver in memory.
//!
//! A call comes from a process that only waits for its end and shares a page of memory with the test. From [`Case`] on,
//! the monitor does what the product does: it reads and writes the caller's memory, takes the caller's descriptors, and
//! asks the driver. The model needs no root, no file system and no engine.

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

pub(crate) use self::driver::{DRIVER, ModelDriver, ModelFile};
pub(crate) use self::program::Program;
pub(crate) use self::world::World;
use crate::caller::Listeners;
use crate::caller::Scratch;
use crate::calls::serve;
use crate::case::Case;
use crate::daemon::Service;

/// Bytes of the GPU, and bytes of the container's quota.
pub(crate) const TOTAL: u64 = 1 << 30;
pub(crate) const QUOTA: u64 = 100 << 20;

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
    /// The caller stops waiting before the monitor reads the call.
    Interrupted,
    /// The caller stops waiting before it gets the reply.
    ReplyIsLost,
}

/// What the caller gets for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallerGets {
    /// The caller has to make the call itself.
    Continue,
    /// The call failed with this error number.
    Errno(i32),
    Done,
    /// The call was not answered.
    Nothing,
}

/// Has a service serve a call by this thread.
fn serve_by(service: &Service, listeners: &Listeners, notice: seccomp_notif) {
    let all = listeners.all();
    let listener = all.first().expect("it was added");
    serve(&mut Case::new(&service.monitor, &mut Scratch::default(), listener, notice));
}

/// A call as a program makes it.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// The number of the escape (`nv_escape.h`) or of the UVM call.
    pub(crate) number: u32,
    /// The descriptor that the call is made on.
    pub(crate) descriptor: RawFd,
    /// The call's struct; then the parameters that the struct points at, with the offset of the pointer.
    pub(crate) bytes: Vec<u8>,
    pub(crate) params: Option<(usize, Vec<u8>)>,
}
