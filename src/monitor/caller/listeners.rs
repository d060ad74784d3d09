//! The container's listeners, through which the monitor receives its calls.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::libc::seccomp_notif;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::Pid;

use crate::monitor::caller::listener::Listener;
use crate::monitor::caller::recv_wait::RecvWait;
use crate::monitor::lock::Lock;

/// All listeners, and the thread that waits for their calls.
#[derive(Debug)]
pub(crate) struct Listeners {
    all: Lock<Vec<Arc<Listener>>>,
    /// Counts waits for several listeners. Modulo the number of listeners, it says which one is asked first.
    first: AtomicUsize,
    /// The wait for calls. It ends for a change: a listener came or went, or no more calls are to be received.
    waiting: RecvWait,
}

impl Listeners {
    /// No listener yet. Fails where the signal that ends a wait can't be handled.
    pub(crate) fn new() -> io::Result<Self> {
        let (all, first) = (Lock::default(), AtomicUsize::new(0));
        Ok(Listeners { all, first, waiting: RecvWait::new()? })
    }

    pub(crate) fn add(&self, listener: Listener) {
        self.all.lock().push(Arc::new(listener));
        self.wake();
    }

    pub(crate) fn remove(&self, number: u64) {
        self.all.lock().retain(|listener| listener.number() != number);
        self.wake();
    }

    pub(crate) fn all(&self) -> Vec<Arc<Listener>> {
        self.all.lock().clone()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.lock().is_empty()
    }

    /// Has the thread that waits for calls look at the listeners again.
    pub(crate) fn wake(&self) {
        self.waiting.note_change();
    }

    /// How many changes there were so far.
    pub(crate) fn changes(&self) -> u64 {
        self.waiting.changes()
    }

    /// Waits for a call of one of `listeners`. `None` for a change beyond the `known` ones, or a call that is gone.
    pub(crate) fn receive<'a>(
        &self,
        (thread, known): (Pid, u64),
        listeners: &'a [Arc<Listener>],
    ) -> Option<(&'a Listener, seccomp_notif)> {
        self.waiting.wait(thread, known, || {
            if let [single] = listeners {
                return single.receive().map(|notice| (&**single, notice));
            }
            let asked = listeners.iter().map(|of| PollFd::new(of.descriptor(), PollFlags::POLLIN));
            let mut asked: Vec<PollFd<'_>> = asked.collect();
            poll(&mut asked, PollTimeout::NONE).ok()?;
            let has = |fd: &PollFd<'_>| fd.revents().is_some_and(|r| r.contains(PollFlags::POLLIN));
            // Another listener comes first each time: one with calls at all times would hold up the others for ever.
            let first = self.first.fetch_add(1, Ordering::Relaxed) % listeners.len().max(1);
            let all = listeners.iter().zip(&asked);
            let all = all.clone().skip(first).chain(all.take(first));
            let ready = all.filter(|(_, asked)| has(asked));
            ready.into_iter().find_map(|(of, _)| of.receive().map(|notice| (&**of, notice)))
        })
    }
}
