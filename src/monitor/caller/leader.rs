//! Leader and followers: whose turn it is to wait for calls.
//!
//! One thread leads: it waits, receives a call and deals with it at once, in the driver
//! too, since handing it to another thread costs more than most calls take. A second one
//! watches: where the leader is still busy with the same call when it looks again, it
//! takes the lead, and the other, when it's done, follows. So a call that hangs
//! holds up its caller, and the others for two looks. The watcher sleeps while nothing
//! happens. Knows no calls.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::Duration;

use crate::monitor::lock::Lock;

/// Time between two looks. Each costs those who take turns on its processor some 20 µs.
const LOOK: Duration = Duration::from_micros(400);

/// Looks without any call after which the watcher sleeps.
const PATIENCE: u32 = 20;

/// Whose turn it is.
#[derive(Debug, Default)]
pub(crate) struct Leader {
    /// The call that the leader is busy with, or 0.
    busy: AtomicU64,
    /// Calls so far.
    calls: AtomicU64,
    /// The watcher sleeps.
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

/// How a thread comes to lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Others are there to follow.
    Followed,
    /// Nobody is: one more thread is needed.
    Alone,
}

impl Leader {
    /// How many threads there are.
    pub(crate) fn threads(&self) -> usize {
        self.roles.lock().spawned
    }

    /// Has `start` start one more thread, by its number, where there are fewer than `most`.
    ///
    /// # Errors
    ///
    /// Where it can't be started: the number is the next one's, then.
    pub(crate) fn enlist(
        &self,
        most: usize,
        start: impl FnOnce(usize) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut roles = self.roles.lock();
        if roles.spawned < most {
            start(roles.spawned)?;
            roles.spawned += 1;
        }
        Ok(())
    }

    /// Waits until it's this thread's turn to lead.
    pub(crate) fn follow(&self) -> Turn {
        let mut roles = self.roles.lock();
        loop {
            if !roles.led {
                roles.led = true;
                return self.turn(roles);
            }
            if !roles.watched {
                roles.watched = true;
                drop(roles);
                self.look();
                roles = self.roles.lock();
                roles.watched = false;
                return self.turn(roles);
            }
            roles.parked += 1;
            roles = self.follow.wait(roles).unwrap_or_else(PoisonError::into_inner);
            roles.parked -= 1;
        }
    }

    /// Somebody must watch from now on.
    fn turn(&self, roles: MutexGuard<'_, Roles>) -> Turn {
        if roles.watched {
            return Turn::Followed;
        }
        if roles.parked > 0 {
            drop(roles);
            self.follow.notify_one();
            return Turn::Followed;
        }
        Turn::Alone
    }

    /// The leader is busy from now on, with the call that is returned.
    pub(crate) fn begin(&self) -> u64 {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        self.busy.store(call, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            drop(self.roles.lock());
            self.watch.notify_one();
        }
        call
    }

    /// It's done with it. Whether it still leads.
    pub(crate) fn end(&self, call: u64) -> bool {
        self.busy.compare_exchange(call, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Watches until the lead is this thread's.
    fn look(&self) {
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
    use std::sync::mpsc::channel;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_thread_that_could_not_be_started_takes_no_number() {
        let lead = Leader::default();
        let mut numbers = Vec::new();
        for is_started in [true, false, false, true, true] {
            let _ = lead.enlist(2, |number| {
                numbers.push(number);
                is_started.then_some(()).ok_or_else(|| io::ErrorKind::WouldBlock.into())
            });
        }
        assert_eq!((numbers, lead.threads()), (vec![0, 1, 1, 1], 2));
    }

    #[test]
    fn a_leader_that_hangs_is_replaced_and_follows_when_it_is_done() {
        let lead = Arc::new(Leader::default());
        assert_eq!(lead.follow(), Turn::Alone);
        let (sender, receiver) = channel();
        for _ in 0..2 {
            let (lead, sender) = (Arc::clone(&lead), sender.clone());
            std::thread::spawn(move || {
                let turn = lead.follow();
                sender.send(turn).unwrap();
            });
        }
        std::thread::sleep(Duration::from_millis(20));
        assert!(receiver.try_recv().is_err());
        let call = lead.begin();
        assert!(lead.end(call), "a short call keeps the lead");
        let call = lead.begin();
        let begun = Instant::now();
        assert_eq!(receiver.recv_timeout(Duration::from_secs(5)).unwrap(), Turn::Followed);
        assert!(begun.elapsed() < Duration::from_secs(1));
        assert!(!lead.end(call), "somebody else leads");
    }
}
