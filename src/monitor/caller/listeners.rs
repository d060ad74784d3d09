//! The container's listeners, through which the monitor receives its calls, in queues.
//!
//! A thread that waits for a single listener waits within the receiving ioctl, and other listeners cost its calls nothing.
//! So each of the first listeners has a queue of its own, with a thread of its own. The last queue has all further
//! ones, and its thread polls them.
//!
//! A queue has one thread at a time: since Linux 6.6 a call wakes all threads that wait for its listener
//! (`recv_wait_event` of `kernel/seccomp.c` waits without `WQ_FLAG_EXCLUSIVE`), and one of them receives it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::libc::seccomp_notif;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::Pid;

use crate::monitor::caller::listener::Listener;
use crate::monitor::caller::recv_wait::{RecvWait, handle_signal};
use crate::monitor::lock::Lock;

/// The most threads that wait for calls at once.
pub(crate) const QUEUES: usize = 16;

/// All listeners.
#[derive(Debug)]
pub(crate) struct Listeners {
    queues: [Queue; QUEUES],
}

/// Listeners for whose calls one thread waits.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    listeners: Lock<Vec<Arc<Listener>>>,
    /// Counts waits for several listeners. Modulo the number of listeners, it says which one is asked first.
    first: AtomicUsize,
    /// The wait for calls. It ends for a change: a listener came or went, or no more calls are to be received.
    waiting: RecvWait,
}

impl Listeners {
    /// No listener yet. Fails where the signal that ends a wait can't be handled.
    pub(crate) fn new() -> io::Result<Self> {
        handle_signal()?;
        Ok(Listeners { queues: Default::default() })
    }

    /// Adds a listener to the first empty queue, or to the last one. Only one thread adds.
    pub(crate) fn add(&self, listener: Listener) {
        let free = self.queues.iter().find(|queue| queue.is_empty());
        if let Some(queue) = free.or(self.queues.last()) {
            queue.listeners.lock().push(Arc::new(listener));
            queue.waiting.note_change();
        }
    }

    pub(crate) fn remove(&self, number: u64) {
        let has = |queue: &&Queue| queue.all().iter().any(|of| of.number() == number);
        if let Some(queue) = self.queues.iter().find(has) {
            queue.listeners.lock().retain(|listener| listener.number() != number);
            queue.waiting.note_change();
        }
    }

    pub(crate) fn all(&self) -> Vec<Arc<Listener>> {
        self.queues.iter().flat_map(Queue::all).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queues.iter().all(Queue::is_empty)
    }

    /// Has all threads that wait for calls look at their listeners again.
    pub(crate) fn wake(&self) {
        self.queues.iter().for_each(|queue| queue.waiting.note_change());
    }

    /// The queues, each with its number.
    pub(crate) fn queues(&self) -> &[Queue; QUEUES] {
        &self.queues
    }
}

impl Queue {
    pub(crate) fn all(&self) -> Vec<Arc<Listener>> {
        self.listeners.lock().clone()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.listeners.lock().is_empty()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_listeners_have_queues_of_their_own_and_the_last_queue_has_the_others() {
        let listeners = Listeners::new().unwrap();
        let add = |number: u64| {
            let file = std::fs::File::open("/dev/null").unwrap();
            listeners.add(Listener::of_model(number, file.into(), Arc::default()));
        };
        let numbers = |queue: usize| -> Vec<u64> {
            listeners.queues()[queue].all().iter().map(|of| of.number()).collect()
        };
        (0..QUEUES as u64 + 2).for_each(add);
        assert_eq!((numbers(0), numbers(14), numbers(15)), (vec![0], vec![14], vec![15, 16, 17]));
        let known = listeners.queues()[3].changes();
        listeners.remove(3);
        listeners.remove(16);
        assert_eq!((numbers(3), numbers(15)), (vec![], vec![15, 17]));
        assert_eq!(listeners.queues()[3].changes(), known + 1, "its thread is told");
        add(18);
        assert_eq!(numbers(3), [18], "the queue is used again");
        assert_eq!(listeners.all().len(), QUEUES + 1);
    }
}
