//! The container's listeners, by which its calls come.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::libc::seccomp_notif;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::Pid;

use crate::monitor::caller::listener::Listener;
use crate::monitor::caller::recv_wait::RecvWait;
use crate::monitor::journal::map::Slot;
use crate::monitor::lock::Lock;

/// All that there are, and who waits for calls of them.
#[derive(Debug)]
pub(crate) struct Listeners {
    all: Lock<Vec<Arc<Listener>>>,
    /// The listener that is looked at first, but for how many there are.
    first: AtomicUsize,
    /// For calls; a change is one of the listeners, or that nothing more is received.
    waiting: RecvWait,
}

impl Listeners {
    /// None yet.
    ///
    /// # Errors
    ///
    /// Where who waits couldn't be fetched out of it.
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

    pub(crate) fn get(&self, number: u64) -> Option<Arc<Listener>> {
        self.all.lock().iter().find(|listener| listener.number() == number).cloned()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.lock().is_empty()
    }

    /// Who waits for calls looks again.
    pub(crate) fn wake(&self) {
        self.waiting.change();
    }

    /// The changes so far.
    pub(crate) fn changes(&self) -> u64 {
        self.waiting.changes()
    }

    /// Waits for a call, or for a change after those that are known.
    pub(crate) fn receive<'a>(
        &self,
        slot: Slot<'_>,
        (thread, known): (Pid, u64),
        listeners: &'a [Arc<Listener>],
    ) -> Option<(&'a Listener, seccomp_notif)> {
        self.waiting.wait(thread, known, || {
            if let [one] = listeners {
                return one.receive(slot).map(|notice| (&**one, notice));
            }
            let asked = listeners.iter().map(|of| PollFd::new(of.descriptor(), PollFlags::POLLIN));
            let mut asked: Vec<PollFd<'_>> = asked.collect();
            poll(&mut asked, PollTimeout::NONE).ok()?;
            let has = |of: &PollFd<'_>| of.revents().is_some_and(|r| r.contains(PollFlags::POLLIN));
            // From one on that is the next each time: those before could have calls for ever.
            let first = self.first.fetch_add(1, Ordering::Relaxed) % listeners.len().max(1);
            let all = listeners.iter().zip(&asked);
            let all = all.clone().skip(first).chain(all.take(first));
            let ready = all.filter(|(_, asked)| has(asked));
            ready.into_iter().find_map(|(of, _)| of.receive(slot).map(|notice| (&**of, notice)))
        })
    }
}
