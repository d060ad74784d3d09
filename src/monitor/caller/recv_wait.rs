//! Waits in the kernel for a call, so that another thread can end the wait.
//!
//! A thread that waits for a single listener waits within the receiving ioctl: a poll before it would cost each call
//! a microsecond. Such a wait notices nothing else. So a thread that brings a change counts it and sends a signal to
//! the waiting thread. The signal goes only to a thread that waits: a call in the driver would fail by it.
#![allow(unsafe_code, reason = "a signal's handler is set, and a thread is told, by raw calls")]

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{Pid, getpid};

use crate::monitor::lock::Lock;

/// The signal is sent again after this time: one that comes between the waiting thread's check and its wait is lost.
const RESEND: Duration = Duration::from_micros(200);

const SIGNAL: Signal = Signal::SIGUSR1;

/// The thread that waits, and the number of changes.
#[derive(Debug, Default)]
pub(crate) struct RecvWait {
    changes: AtomicU64,
    /// The waiting thread, and how many changes it knows.
    waiting: Lock<Option<(Pid, u64)>>,
}

extern "C" fn nothing(_: libc::c_int) {}

/// Has the signal interrupt a system call that waits, and do nothing else.
pub(crate) fn handle_signal() -> io::Result<()> {
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler does nothing, and nothing else in this program handles this signal.
    unsafe { sigaction(SIGNAL, &action) }?;
    Ok(())
}

impl RecvWait {
    /// How many changes there were so far.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Waits by `wait`, which a change beyond the `known` ones interrupts. `None` at once where there is such a
    /// change.
    pub(crate) fn wait<T>(
        &self,
        thread: Pid,
        known: u64,
        wait: impl FnOnce() -> Option<T>,
    ) -> Option<T> {
        *self.waiting.lock() = Some((thread, known));
        let got = if self.changes() == known { wait() } else { None };
        *self.waiting.lock() = None;
        if self.changes() != known {
            // A signal that was sent is handled here, on the way back from the kernel, and not during a later call.
            std::thread::yield_now();
        }
        got
    }

    /// Counts a change. Returns when no thread waits that doesn't know of it.
    pub(crate) fn note_change(&self) {
        let now = self.changes.fetch_add(1, Ordering::SeqCst) + 1;
        loop {
            let waiting = self.waiting.lock();
            match *waiting {
                Some((thread, known)) if known < now => signal_thread(thread),
                _ => return,
            }
            drop(waiting);
            std::thread::sleep(RESEND);
        }
    }
}

fn signal_thread(thread: Pid) {
    let signal = SIGNAL as libc::c_int;
    // SAFETY: takes numbers only; the thread is one of this process, and waits.
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
        let waiting = Arc::new(RecvWait::default());
        handle_signal().unwrap();
        let (sender, receiver) = channel();
        let other = Arc::clone(&waiting);
        std::thread::spawn(move || {
            let me = nix::unistd::gettid();
            let nap = || poll(&mut [], PollTimeout::NONE).is_err().then_some(());
            // The first wait is interrupted. The second one knows as little as the first, and ends at once.
            let slept = other.wait(me, 0, nap);
            let stale = other.wait(me, 0, nap);
            sender.send((slept, stale)).unwrap();
            // No signal comes to a thread that doesn't wait.
            let begun = std::time::Instant::now();
            let worked = poll(&mut [], PollTimeout::from(200_u8));
            sender
                .send((worked.ok().map(drop), (begun.elapsed().as_millis() < 200).then_some(())))
                .unwrap();
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(receiver.try_recv().is_err(), "it waits");
        waiting.note_change();
        assert_eq!(receiver.recv_timeout(Duration::from_secs(5)), Ok((Some(()), None)));
        for _ in 0..20 {
            waiting.note_change();
        }
        assert_eq!(receiver.recv_timeout(Duration::from_secs(5)), Ok((Some(()), None)));
    }
}
