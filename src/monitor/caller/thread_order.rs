//! Calls of one thread, one after the other.
//!
//! The driver can't have two: a thread is back before it calls again. But one that is
//! interrupted leaves its call to us while we make it, and mostly asks the same again, before
//! the driver has answered. So each waits for those before it, and finds in the
//! [unclaimed](crate::monitor::caller::unclaimed) what they did. Knows slots and threads, and no calls.

use std::sync::{Condvar, PoisonError};
use std::time::Duration;

use crate::monitor::lock::Lock;
use crate::process::ProcessId;

/// How often who waits looks whether its caller does.
const LOOK: Duration = Duration::from_millis(50);

/// Slots with a call and its thread, in the order in which they came.
#[derive(Debug, Default)]
pub(crate) struct ThreadOrder {
    all: Lock<Vec<(usize, ProcessId)>>,
    over: Condvar,
}

impl ThreadOrder {
    /// The slot has a call of `thread` from now on, which comes after all there are. What is
    /// still waited for afterwards, no later call of that thread will overtake.
    pub(crate) fn queue(&self, slot: usize, thread: ProcessId) {
        let mut all = self.all.lock();
        all.retain(|(of, _)| *of != slot);
        let others = all.iter().any(|(_, of)| *of == thread);
        all.push((slot, thread));
        drop(all);
        if others {
            // An older call of its that waits has nobody to wait for.
            self.over.notify_all();
        }
    }

    /// Waits for the calls of the same thread that came before, as long as `waits` says that
    /// it is worth it. Whether they are over.
    pub(crate) fn wait(&self, slot: usize, thread: ProcessId, waits: impl Fn() -> bool) -> bool {
        let mut all = self.all.lock();
        loop {
            let earlier = all.iter().take_while(|(of, _)| *of != slot);
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

    /// The slot's call is over.
    pub(crate) fn leave(&self, slot: usize) {
        let mut all = self.all.lock();
        let Some(at) = all.iter().position(|(of, _)| *of == slot) else { return };
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
    fn a_slot_is_queued_once() {
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
