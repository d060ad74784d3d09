//! The RM lock: calls of the container that make, name or free objects go through the driver one after another.
//! Controls go at the same time, except for those that export or import memory.
//!
//! So a handle names the same object for the driver and in the state as long as its call holds the RM lock, and an
//! audit that holds the RM lock finds driver usage and state of one moment. The lock costs programs little, because the
//! resource manager does the same for the whole host: it takes its API lock for writing whenever it allocates,
//! duplicates, shares or frees an object, and only controls share the lock (`_sysRegistryOverrideResourceServer`,
//! system.c, which sets `RS_API_CTRL` alone, and `serverAllocResourceLookupLockFlags`, rs_server.c, the same from
//! 515.43.04 to 595.45.04). Without the monitor's lock, only UVM's mappings for several processes of a container would
//! be made side by side.
//!
//! A call that hangs in the driver blocks only its own container's RM lock. This file knows no calls and no state.

use std::collections::VecDeque;
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::sync::Lock;

/// How long the monitor's own work waits for the call that holds the lock.
const MONITOR_WAIT: Duration = Duration::from_secs(1);

/// How often a waiting call checks whether its caller still waits.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// Lets one call at a time through.
#[derive(Debug, Default)]
pub(crate) struct RmLock {
    state: Lock<RmLockState>,
}

#[derive(Debug, Default)]
struct RmLockState {
    /// The number of the call, or of the monitor's own work, that holds the lock.
    current: Option<u64>,
    /// The calls and the monitor's own work that wait for the lock; the first of them is next.
    waiting: VecDeque<Waiting>,
    next: u64,
    /// The number that held the lock when the monitor's own work last waited in vain.
    hanging: Option<u64>,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    thread: Thread,
}

/// Where a waiter stands in the queue.
#[derive(Debug, Clone, Copy)]
enum Comes {
    /// The monitor's own work, before all calls.
    First,
    /// A call.
    Last,
}

/// The held lock: no other thread holds it while this value lives.
#[derive(Debug)]
#[must_use = "the RM lock is released when it is dropped"]
pub(crate) struct UnderRmLock<'a> {
    rm_lock: &'a RmLock,
    number: u64,
}

impl Drop for UnderRmLock<'_> {
    fn drop(&mut self) {
        self.rm_lock.leave(self.number);
    }
}

impl UnderRmLock<'_> {
    /// Releases the lock, does `work`, and takes the lock again. Objects and driver usage may have changed by then.
    pub(crate) fn leave_while<T>(&mut self, work: impl FnOnce() -> T) -> T {
        self.rm_lock.leave(self.number);
        let done = work();
        self.number = self.rm_lock.wait();
        done
    }
}

impl RmLock {
    /// Waits until the calling thread holds the lock.
    pub(crate) fn enter(&self) -> UnderRmLock<'_> {
        UnderRmLock { rm_lock: self, number: self.wait() }
    }

    /// Takes the lock if it is free. Returns `None` otherwise.
    pub(crate) fn try_enter(&self) -> Option<UnderRmLock<'_>> {
        self.enter_in_turn(Comes::Last, Duration::ZERO, || false)
    }

    /// Waits for the lock as long as `waits` is true. Returns `None` if `waits` becomes false first.
    pub(crate) fn enter_while(&self, waits: impl Fn() -> bool) -> Option<UnderRmLock<'_>> {
        self.enter_in_turn(Comes::Last, CHECK_INTERVAL, waits)
    }

    fn enter_in_turn(
        &self,
        comes: Comes,
        check: Duration,
        waits: impl Fn() -> bool,
    ) -> Option<UnderRmLock<'_>> {
        let number = self.wait_for(comes, check, waits)?;
        Some(UnderRmLock { rm_lock: self, number })
    }

    /// Takes the lock for the monitor's own work, before all waiting calls. `None` if a call doesn't release the lock.
    pub(crate) fn enter_for_monitor(&self) -> Option<UnderRmLock<'_>> {
        let still_hanging = {
            let state = self.state.lock();
            state.current.is_some() && state.current == state.hanging
        };
        let timeout = if still_hanging { Duration::ZERO } else { MONITOR_WAIT };
        let entered = self.enter_in_turn(Comes::First, timeout, || false);
        if entered.is_none() {
            let mut state = self.state.lock();
            state.hanging = state.current;
        }
        entered
    }

    fn wait(&self) -> u64 {
        loop {
            if let Some(number) = self.wait_for(Comes::Last, CHECK_INTERVAL, || true) {
                return number;
            }
        }
    }

    /// Waits for the lock, and checks `waits` after each `check`. Returns the number that holds the lock, or `None`
    /// once `waits` is false.
    fn wait_for(&self, comes: Comes, check: Duration, waits: impl Fn() -> bool) -> Option<u64> {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        if state.current.is_none() {
            state.current = Some(number);
            return Some(number);
        }
        let waiting = Waiting { number, thread: std::thread::current() };
        match comes {
            Comes::First => state.waiting.push_front(waiting),
            Comes::Last => state.waiting.push_back(waiting),
        }
        drop(state);
        let mut since = Instant::now();
        loop {
            std::thread::park_timeout(check.saturating_sub(since.elapsed()));
            if self.state.lock().current == Some(number) {
                return Some(number);
            }
            if since.elapsed() < check {
                continue;
            }
            since = Instant::now();
            if waits() {
                continue;
            }
            let mut state = self.state.lock();
            if state.current == Some(number) {
                return Some(number);
            }
            state.waiting.retain(|waiting| waiting.number != number);
            return None;
        }
    }

    /// Hands the lock to the next call, or to the monitor's own work.
    fn leave(&self, number: u64) {
        let mut state = self.state.lock();
        if state.current != Some(number) {
            return;
        }
        let next = state.waiting.pop_front();
        state.current = next.as_ref().map(|next| next.number);
        drop(state);
        if let Some(next) = next {
            next.thread.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn rm_lock() -> &'static RmLock {
        Box::leak(Box::default())
    }

    fn wait_until_waiting(rm_lock: &RmLock, count: usize) {
        while rm_lock.state.lock().waiting.len() < count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn calls_take_the_rm_lock_in_order() {
        let rm_lock = rm_lock();
        let first = rm_lock.enter();
        let (sender, receiver) = channel();
        for call in 1..4 {
            let sender = sender.clone();
            std::thread::spawn(move || {
                let on_it = rm_lock.enter();
                sender.send(call).unwrap();
                drop(on_it);
            });
            wait_until_waiting(rm_lock, call);
        }
        assert!(receiver.try_recv().is_err());
        drop(first);
        let came: Vec<_> = receiver.iter().take(3).collect();
        assert_eq!(came, [1, 2, 3]);
        while rm_lock.state.lock().current.is_some() {
            std::thread::yield_now();
        }
        assert!(rm_lock.enter_for_monitor().is_some());
    }

    /// A call that yields the RM lock for a while lets the calls that wait take it.
    #[test]
    fn yielded_rm_lock_admits_waiting_calls() {
        let rm_lock = rm_lock();
        let mut first = rm_lock.enter();
        let (sender, receiver) = channel();
        let other = std::thread::spawn(move || {
            drop(rm_lock.enter());
            sender.send(()).unwrap();
        });
        first.leave_while(|| receiver.recv().unwrap());
        assert!(rm_lock.try_enter().is_none());
        other.join().unwrap();
    }

    /// The monitor's own work takes the RM lock before all calls that wait, and a call whose caller has exited waits no
    /// more.
    #[test]
    fn monitors_work_precedes_calls_and_abandoned_calls_leave() {
        let rm_lock = rm_lock();
        let first = rm_lock.try_enter().unwrap();
        assert!(rm_lock.try_enter().is_none());
        assert!(rm_lock.enter_while(|| false).is_none());
        let (sender, receiver) = channel();
        let call = sender.clone();
        std::thread::spawn(move || {
            let on_it = rm_lock.enter_while(|| true);
            call.send(("call", on_it.is_some())).unwrap();
        });
        wait_until_waiting(rm_lock, 1);
        std::thread::spawn(move || {
            let on_it = rm_lock.enter_for_monitor();
            sender.send(("monitor", on_it.is_some())).unwrap();
        });
        wait_until_waiting(rm_lock, 2);
        drop(first);
        let came: Vec<_> = receiver.iter().take(2).collect();
        assert_eq!(came, [("monitor", true), ("call", true)]);
    }

    #[test]
    fn audit_waits_once_for_the_same_hanging_call() {
        let rm_lock = rm_lock();
        let hanging = rm_lock.enter();
        let checked = |begun: Instant| {
            (rm_lock.enter_for_monitor().is_none(), begun.elapsed() >= MONITOR_WAIT)
        };
        assert_eq!(checked(Instant::now()), (true, true));
        assert_eq!(checked(Instant::now()), (true, false));
        drop(hanging);
        let other = rm_lock.enter();
        assert_eq!(checked(Instant::now()), (true, true));
        drop(other);
        assert!(rm_lock.enter_for_monitor().is_some() && rm_lock.state.lock().waiting.is_empty());
    }
}
