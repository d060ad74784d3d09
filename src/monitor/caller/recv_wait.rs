//! Waiting in the kernel for a call, and being fetched out of it.
//!
//! Who waits for one listener alone waits in its receiving itself: to poll before would
//! cost each call a microsecond. Such a wait sees nothing else, so where there is something
//! else to know, whoever brings it counts it and sends a signal to who waits. A signal
//! reaches no thread that does anything but wait: a call in the driver would fail by it.
#![allow(unsafe_code, reason = "a signal's handler is set, and a thread is told, by raw calls")]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{Pid, getpid, gettid};

use crate::monitor::lock::Lock;

/// A signal that comes between a look and the wait is lost: it's sent again after this.
const AGAIN: Duration = Duration::from_micros(200);

const SIGNAL: Signal = Signal::SIGUSR1;

/// Who waits, and what there is to know.
#[derive(Debug, Default)]
pub(crate) struct RecvWait {
    changes: AtomicU64,
    /// Who waits, and how many changes it knows of.
    who: Lock<Option<(Pid, u64)>>,
}

extern "C" fn nothing(_: libc::c_int) {}

impl RecvWait {
    /// Makes the signal interrupt what waits, and do nothing else.
    pub(crate) fn new() -> io::Result<Self> {
        let action =
            SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing, and nobody else handles this signal.
        unsafe { sigaction(SIGNAL, &action) }?;
        Ok(Self::default())
    }

    /// The changes so far.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Waits by `wait`, which a change after those that are `known` interrupts.
    pub(crate) fn wait<T>(
        &self,
        thread: Pid,
        known: u64,
        wait: impl FnOnce() -> Option<T>,
    ) -> Option<T> {
        *self.who.lock() = Some((thread, known));
        let got = if self.changes() == known { wait() } else { None };
        *self.who.lock() = None;
        if self.changes() != known {
            // A signal that was sent is taken here, on the way back from the kernel.
            std::thread::yield_now();
        }
        got
    }

    /// Something changed: returns when nobody waits who doesn't know.
    pub(crate) fn change(&self) {
        let now = self.changes.fetch_add(1, Ordering::SeqCst) + 1;
        loop {
            let who = self.who.lock();
            match *who {
                Some((thread, known)) if known < now => tell(thread),
                _ => return,
            }
            drop(who);
            std::thread::sleep(AGAIN);
        }
    }
}

/// This thread, for [`RecvWait::wait`].
pub(crate) fn this_thread() -> Pid {
    gettid()
}

fn tell(thread: Pid) {
    let signal = SIGNAL as libc::c_int;
    // SAFETY: takes numbers only; the thread is one of ours, and waits.
    let told =
        unsafe { libc::syscall(libc::SYS_tgkill, getpid().as_raw(), thread.as_raw(), signal) };
    if let Err(errno) = Errno::result(told) {
        tracing::error!(%errno, "a thread can't be told of a change");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use nix::poll::{PollTimeout, poll};

    use super::*;

    #[test]
    fn who_waits_is_fetched_and_who_works_is_not() {
        let waiting = Arc::new(RecvWait::new().unwrap());
        let (sender, receiver) = channel();
        let other = Arc::clone(&waiting);
        std::thread::spawn(move || {
            let me = this_thread();
            let nap = || poll(&mut [], PollTimeout::NONE).is_err().then_some(());
            // Interrupted, and asked with what it knew before: at once.
            let slept = other.wait(me, 0, nap);
            let stale = other.wait(me, 0, nap);
            sender.send((slept, stale)).unwrap();
            // At work no signal comes.
            let begun = std::time::Instant::now();
            let worked = poll(&mut [], PollTimeout::from(200_u8));
            sender
                .send((worked.ok().map(drop), (begun.elapsed().as_millis() < 200).then_some(())))
                .unwrap();
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(receiver.try_recv().is_err(), "it waits");
        waiting.change();
        assert_eq!(receiver.recv_timeout(Duration::from_secs(5)), Ok((Some(()), None)));
        for _ in 0..20 {
            waiting.change();
        }
        assert_eq!(receiver.recv_timeout(Duration::from_secs(5)), Ok((Some(()), None)));
    }
}
