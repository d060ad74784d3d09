//! Leader and followers: which thread waits for calls.
//!
//! One thread leads: it waits for a call, receives it and serves it at once, the driver's part included, since
//! handing a call to another thread costs more than most calls take. A second thread watches the leader. Where the
//! leader is busy with the same call at two looks in a row, the watcher takes the lead, and the old leader follows
//! when its call is done. So a call that hangs holds up its own caller, and other callers for two looks only. The
//! watcher sleeps while no call comes. A call is no more than a number here.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::Duration;

use crate::monitor::lock::Lock;

/// Time between two looks. Each look costs the threads that take turns on the watcher's processor some 20 µs.
const LOOK: Duration = Duration::from_micros(400);

/// Looks in a row without a call after which the watcher sleeps.
const PATIENCE: u32 = 20;

/// Which thread leads, and whether another one watches.
#[derive(Debug, Default)]
pub(crate) struct Leader {
    /// The number of the call that the leader is busy with; 0 where it waits for a call.
    busy: AtomicU64,
    /// How many calls there were so far.
    calls: AtomicU64,
    /// Whether the watcher sleeps.
    asleep: AtomicBool,
    roles: Lock<Roles>,
    follow: Condvar,
    watch: Condvar,
}

#[derive(Debug, Default)]
struct Roles {
    led: bool,
    watched: bool,
    parked: usize,
    spawned: usize,
}

/// Whether a new leader is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lead {
    /// Another thread watches, or was woken to watch.
    Followed,
    /// No other thread is free to watch: one more is needed.
    Alone,
}

impl Leader {
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

    /// Waits until this thread leads.
    pub(crate) fn wait_to_lead(&self) -> Lead {
        let mut roles = self.roles.lock();
        loop {
            if !roles.led {
                roles.led = true;
                return self.lead(roles);
            }
            if !roles.watched {
                roles.watched = true;
                drop(roles);
                self.watch_leader();
                roles = self.roles.lock();
                roles.watched = false;
                return self.lead(roles);
            }
            roles.parked += 1;
            roles = self.follow.wait(roles).unwrap_or_else(PoisonError::into_inner);
            roles.parked -= 1;
        }
    }

    /// Makes sure that another thread watches this new leader, where there is one.
    fn lead(&self, roles: MutexGuard<'_, Roles>) -> Lead {
        if roles.watched {
            return Lead::Followed;
        }
        if roles.parked > 0 {
            drop(roles);
            self.follow.notify_one();
            return Lead::Followed;
        }
        Lead::Alone
    }

    /// Notes that the leader is busy with a call from now on. Returns the call's number, for [`Self::end`].
    pub(crate) fn begin(&self) -> u64 {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        self.busy.store(call, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            drop(self.roles.lock());
            self.watch.notify_one();
        }
        call
    }

    /// Notes that the call is done. `true` where this thread still leads: the watcher may have taken the lead.
    pub(crate) fn end(&self, call: u64) -> bool {
        self.busy.compare_exchange(call, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Watches the leader until this thread takes the lead.
    fn watch_leader(&self) {
        let mut seen = 0;
        let mut calls = 0;
        let mut quiet = 0;
        loop {
            let busy = self.busy.load(Ordering::SeqCst);
            if busy != 0 && busy == seen && self.end(busy) {
                return;
            }
            let now = self.calls.load(Ordering::Relaxed);
            quiet = if busy == 0 && now == calls { quiet + 1 } else { 0 };
            (seen, calls) = (busy, now);
            if quiet > PATIENCE {
                quiet = 0;
                let roles = self.roles.lock();
                self.asleep.store(true, Ordering::SeqCst);
                if self.busy.load(Ordering::SeqCst) == 0 {
                    drop(self.watch.wait(roles).unwrap_or_else(PoisonError::into_inner));
                }
                self.asleep.store(false, Ordering::SeqCst);
            }
            std::thread::sleep(LOOK);
        }
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
        let lead = Leader::default();
        let mut asked = 0;
        for is_started in [true, false, false, true, true] {
            let _ = lead.start_another(2, || {
                asked += 1;
                is_started.then_some(()).ok_or_else(|| io::ErrorKind::WouldBlock.into())
            });
        }
        assert_eq!((asked, lead.threads()), (4, 2));
    }

    /// A leader with one thread that watches it and one that follows, which tell their turns.
    fn followed() -> (Arc<Leader>, Receiver<Lead>) {
        let lead = Arc::new(Leader::default());
        assert_eq!(lead.wait_to_lead(), Lead::Alone);
        let (sender, receiver) = channel();
        for _ in 0..2 {
            let (lead, sender) = (Arc::clone(&lead), sender.clone());
            std::thread::spawn(move || sender.send(lead.wait_to_lead()));
        }
        let is_ready = || {
            let roles = lead.roles.lock();
            roles.watched && roles.parked == 1
        };
        while !is_ready() {
            std::thread::sleep(Duration::from_millis(1));
        }
        (lead, receiver)
    }

    #[test]
    fn a_leader_that_hangs_is_replaced_and_follows_when_it_is_done() {
        let (lead, receiver) = loop {
            let (lead, receiver) = followed();
            std::thread::sleep(Duration::from_millis(20));
            assert!(receiver.try_recv().is_err());
            let begun = Instant::now();
            let call = lead.begin();
            let leads = lead.end(call);
            // On a busy machine it may have been long.
            if begun.elapsed() < LOOK {
                assert!(leads, "a short call keeps the lead");
                break (lead, receiver);
            }
        };
        let call = lead.begin();
        assert_eq!(receiver.recv_timeout(Duration::from_secs(600)).unwrap(), Lead::Followed);
        assert!(!lead.end(call), "somebody else leads");
    }
}
