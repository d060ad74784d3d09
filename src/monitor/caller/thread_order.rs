//! Orders the calls of one thread.
//!
//! The driver can't have two calls of a thread at once: a thread is back before it calls again. But a thread that is
//! interrupted leaves its call to the monitor, which goes on with it, and mostly makes the same call again before the
//! driver has answered. So each call waits for the thread's earlier calls, and finds what they did among the
//! [unclaimed](crate::monitor::caller::unclaimed) replies. This file knows threads, not what a call does.
//!
//! A call is known by the number of the monitor's thread that serves it.

use std::sync::{Condvar, PoisonError};
use std::time::Duration;

use crate::monitor::lock::Lock;
use crate::process::ProcessId;

/// How often a call that waits checks whether its caller still does.
const LOOK: Duration = Duration::from_millis(50);

/// The calls, by who serves them, each with its thread, in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct ThreadOrder {
    all: Lock<Vec<(usize, ProcessId)>>,
    over: Condvar,
}

impl ThreadOrder {
    /// Puts the call of `thread` that `server` serves behind all other calls. Where its caller still waits after that, no later
    /// call of the thread overtakes it.
    pub(crate) fn queue(&self, server: usize, thread: ProcessId) {
        let mut all = self.all.lock();
        all.retain(|(of, _)| *of != server);
        let others = all.iter().any(|(_, of)| *of == thread);
        all.push((server, thread));
        drop(all);
        if others {
            // A call of the thread that waited for the server's old entry may go on now.
            self.over.notify_all();
        }
    }

    /// Waits for the earlier calls of the same thread, as long as `waits` says that it is worth it. `true` where they
    /// are over.
    pub(crate) fn wait(&self, server: usize, thread: ProcessId, waits: impl Fn() -> bool) -> bool {
        let mut all = self.all.lock();
        loop {
            let earlier = all.iter().take_while(|(of, _)| *of != server);
            if !earlier.into_iter().any(|(_, of)| *of == thread) {
                return true;
            }
            drop(all);
            if !waits() {
                return false;
            }
            let (again, _) = self
                .over
                .wait_timeout(self.all.lock(), LOOK)
                .unwrap_or_else(PoisonError::into_inner);
            all = again;
        }
    }

    /// Takes out the server's call, which is over.
    pub(crate) fn leave(&self, server: usize) {
        let mut all = self.all.lock();
        let Some(at) = all.iter().position(|(of, _)| *of == server) else { return };
        let (_, thread) = all.remove(at);
        let others = all.iter().any(|(_, of)| *of == thread);
        drop(all);
        if others {
            self.over.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const ONE: ProcessId = ProcessId { pid: 7, start_ticks: 1 };
    const LATER: ProcessId = ProcessId { pid: 7, start_ticks: 2 };

    #[test]
    fn calls_of_a_thread_wait_for_those_before_and_for_nobody_elses() {
        let turns = ThreadOrder::default();
        turns.queue(0, ONE);
        turns.queue(1, LATER);
        assert!(turns.wait(0, ONE, || unreachable!("it is the first")));
        assert!(turns.wait(1, LATER, || unreachable!("another thread of that number")));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            turns.queue(2, ONE);
            let waits = scope.spawn(|| {
                let came = turns.wait(2, ONE, || true);
                (came, done.load(Ordering::SeqCst))
            });
            std::thread::sleep(Duration::from_millis(20));
            done.store(true, Ordering::SeqCst);
            turns.leave(0);
            assert_eq!(waits.join().unwrap(), (true, true));
        });
        turns.queue(3, ONE);
        assert!(!turns.wait(3, ONE, || false), "its caller is gone");
    }

    #[test]
    fn a_call_is_queued_once() {
        let turns = ThreadOrder::default();
        turns.queue(0, ONE);
        turns.queue(1, ONE);
        turns.queue(0, ONE);
        assert!(turns.wait(1, ONE, || unreachable!("it is the first now")));
        turns.leave(0);
        turns.leave(0);
        turns.leave(1);
        assert!(turns.all.lock().is_empty());
    }
}
