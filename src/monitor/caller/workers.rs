//! The threads that wait for calls: which one has which queue of listeners.
//!
//! A queue has one thread. It waits for a call, receives it and serves it at once, the driver's part included, since
//! handing a call to another thread costs more than most calls take. One more thread watches these. If one of them
//! is busy with the same call at two looks in a row, the watcher takes its queue, and the other waits for a queue
//! when its call is done. So a call that hangs holds up its own caller, and other callers for two looks only. The
//! watcher sleeps while no call comes. A queue and a call are no more than numbers here.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::Duration;

use crate::monitor::caller::listeners::QUEUES;
use crate::monitor::lock::Lock;

/// Time between two looks. Each look costs the threads that take turns on the watcher's processor some 20 µs.
const LOOK: Duration = Duration::from_micros(400);

/// Looks in a row without a call after which the watcher sleeps.
const PATIENCE: u32 = 20;

/// Which thread has which queue, and whether one watches.
#[derive(Debug, Default)]
pub(crate) struct Workers {
    /// The number of the call that each queue's thread is busy with; 0 if it waits for a call.
    busy: [AtomicU64; QUEUES],
    /// How many calls there were so far.
    calls: AtomicU64,
    /// Whether the watcher sleeps.
    asleep: AtomicBool,
    /// Whether a queue may need a thread.
    is_called: AtomicBool,
    roles: Lock<Roles>,
    follow: Condvar,
    watch: Condvar,
}

#[derive(Debug, Default)]
struct Roles {
    /// The queues that have a thread.
    taken: [bool; QUEUES],
    watched: bool,
    parked: usize,
    spawned: usize,
}

/// Whether a thread that has a new queue is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Watch {
    /// Another thread watches, or was woken to watch.
    Watched,
    /// No other thread is free to watch: one more is needed.
    Unwatched,
}

impl Workers {
    /// How many threads were started.
    pub(crate) fn threads(&self) -> usize {
        self.roles.lock().spawned
    }

    /// Has `start` start one more thread, where fewer than `most` were started. Fails where `start` fails.
    pub(crate) fn start_another(
        &self,
        most: usize,
        start: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<()> {
        let mut roles = self.roles.lock();
        if roles.spawned < most {
            start()?;
            roles.spawned += 1;
        }
        Ok(())
    }

    /// Has a free thread take a queue that has a listener since now.
    pub(crate) fn call(&self) {
        // Both: one that is woken may take another new queue first.
        let _roles = self.roles.lock();
        self.is_called.store(true, Ordering::SeqCst);
        self.follow.notify_one();
        self.watch.notify_one();
    }

    /// Waits until this thread has a queue: one without a thread that `needs_thread`, or one whose thread is busy.
    pub(crate) fn wait_for_queue(&self, needs_thread: impl Fn(usize) -> bool) -> (usize, Watch) {
        let mut roles = self.roles.lock();
        loop {
            let mut free = roles.taken.iter_mut().enumerate().filter(|(_, taken)| !**taken);
            if let Some((queue, taken)) = free.find(|(queue, _)| needs_thread(*queue)) {
                *taken = true;
                return (queue, self.see_that_one_watches(roles));
            }
            if !roles.watched {
                roles.watched = true;
                drop(roles);
                let queue = self.watch_the_others();
                roles = self.roles.lock();
                roles.watched = false;
                if let Some(queue) = queue {
                    return (queue, self.see_that_one_watches(roles));
                }
                continue;
            }
            roles.parked += 1;
            roles = self.follow.wait(roles).unwrap_or_else(PoisonError::into_inner);
            roles.parked -= 1;
        }
    }

    /// Gives a queue up if it `needs_thread` no more. `false` if it does.
    pub(crate) fn give_up(&self, queue: usize, needs_thread: impl FnOnce() -> bool) -> bool {
        let mut roles = self.roles.lock();
        let is_needed = needs_thread();
        if let Some(taken) = roles.taken.get_mut(queue) {
            *taken = is_needed;
        }
        !is_needed
    }

    /// Wakes a thread to watch this one, which has a new queue, if there is one.
    fn see_that_one_watches(&self, roles: MutexGuard<'_, Roles>) -> Watch {
        if roles.watched {
            return Watch::Watched;
        }
        if roles.parked > 0 {
            drop(roles);
            self.follow.notify_one();
            return Watch::Watched;
        }
        Watch::Unwatched
    }

    /// Notes that a queue's thread is busy with a call from now on. Returns the call's number, for [`Self::end`].
    pub(crate) fn begin(&self, queue: usize) -> u64 {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(busy) = self.busy.get(queue) {
            busy.store(call, Ordering::SeqCst);
        }
        if self.asleep.load(Ordering::SeqCst) {
            drop(self.roles.lock());
            self.watch.notify_one();
        }
        call
    }

    /// Notes that the call is done. `true` if this thread still has the queue: the watcher may have taken it.
    pub(crate) fn end(&self, queue: usize, call: u64) -> bool {
        let busy = self.busy.get(queue);
        busy.is_some_and(|busy| {
            busy.compare_exchange(call, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        })
    }

    /// Watches the other threads until this one has the queue of one that is busy, or is called.
    fn watch_the_others(&self) -> Option<usize> {
        let mut seen = [0; QUEUES];
        let mut calls = 0;
        let mut quiet = 0;
        loop {
            if self.is_called.swap(false, Ordering::SeqCst) {
                return None;
            }
            for (queue, seen) in seen.iter_mut().enumerate() {
                let busy = self.busy.get(queue).map_or(0, |busy| busy.load(Ordering::SeqCst));
                if busy != 0 && busy == *seen && self.end(queue, busy) {
                    return Some(queue);
                }
                *seen = busy;
            }
            let now = self.calls.load(Ordering::Relaxed);
            let is_idle = seen.iter().all(|busy| *busy == 0);
            quiet = if is_idle && now == calls { quiet + 1 } else { 0 };
            calls = now;
            if quiet > PATIENCE {
                quiet = 0;
                self.sleep();
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Sleeps until a call begins, or this thread is called.
    fn sleep(&self) {
        let roles = self.roles.lock();
        self.asleep.store(true, Ordering::SeqCst);
        let is_idle = self.busy.iter().all(|busy| busy.load(Ordering::SeqCst) == 0);
        if is_idle && !self.is_called.load(Ordering::SeqCst) {
            drop(self.watch.wait(roles).unwrap_or_else(PoisonError::into_inner));
        }
        self.asleep.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_thread_that_could_not_be_started_does_not_count() {
        let workers = Workers::default();
        let mut asked = 0;
        for is_started in [true, false, false, true, true] {
            let _ = workers.start_another(2, || {
                asked += 1;
                is_started.then_some(()).ok_or_else(|| io::ErrorKind::WouldBlock.into())
            });
        }
        assert_eq!((asked, workers.threads()), (4, 2));
    }

    /// Threads, of which one has a queue, one watches it, and one waits; they tell which queues they take. The queues
    /// below `needed` need a thread.
    struct Three {
        workers: Arc<Workers>,
        taken: Receiver<(usize, Watch)>,
        needed: Arc<AtomicU64>,
    }

    fn three() -> Three {
        let (workers, needed) = (Arc::new(Workers::default()), Arc::new(AtomicU64::new(1)));
        assert_eq!(workers.wait_for_queue(|queue| queue == 0), (0, Watch::Unwatched));
        let (sender, taken) = channel();
        for _ in 0..2 {
            let (workers, sender) = (Arc::clone(&workers), sender.clone());
            let needed = Arc::clone(&needed);
            let needs = move |queue| (queue as u64) < needed.load(Ordering::SeqCst);
            std::thread::spawn(move || sender.send(workers.wait_for_queue(needs)));
        }
        let is_ready = || {
            let roles = workers.roles.lock();
            roles.watched && roles.parked == 1
        };
        while !is_ready() {
            std::thread::sleep(Duration::from_millis(1));
        }
        Three { workers, taken, needed }
    }

    #[test]
    fn the_queue_of_a_thread_that_hangs_is_taken_by_the_watcher() {
        let Three { workers, taken, .. } = loop {
            let three = three();
            std::thread::sleep(Duration::from_millis(20));
            assert!(three.taken.try_recv().is_err());
            let begun = Instant::now();
            let call = three.workers.begin(0);
            let has_it = three.workers.end(0, call);
            // On a busy machine it may have been long.
            if begun.elapsed() < LOOK {
                assert!(has_it, "a short call keeps the queue");
                break three;
            }
        };
        let call = workers.begin(0);
        let patience = Duration::from_secs(600);
        assert_eq!(taken.recv_timeout(patience).unwrap(), (0, Watch::Watched));
        assert!(!workers.end(0, call), "another thread has it");
    }

    #[test]
    fn each_new_queue_gets_a_thread_as_long_as_there_is_one() {
        let Three { workers, taken, needed } = three();
        for (queue, watch) in [(1, Watch::Watched), (2, Watch::Unwatched)] {
            needed.fetch_add(1, Ordering::SeqCst);
            workers.call();
            let patience = Duration::from_secs(600);
            assert_eq!(taken.recv_timeout(patience).unwrap(), (queue, watch));
        }
        // One that is still needed isn't given up; one that isn't is free for the next thread.
        assert!(!workers.give_up(2, || true));
        assert!(workers.give_up(1, || false));
        assert_eq!(workers.wait_for_queue(|queue| queue < 3), (1, Watch::Unwatched));
    }
}
