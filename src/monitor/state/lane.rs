//! The lane: calls of the container that make, name or free objects go through the driver one after another. Controls
//! go beside them, except for those that export or import memory.
//!
//! So a handle names the same object for the driver and in the books as long as its call is on the lane, and an audit
//! on the lane finds figures and books of one moment. The lane costs programs little, because the resource manager does
//! the same for the whole host: it takes its API lock for writing whenever it allocates, duplicates, shares or frees an
//! object, and only controls share the lock (`_sysRegistryOverrideResourceServer`, system.c, which sets `RS_API_CTRL`
//! alone, and `serverAllocResourceLookupLockFlags`, rs_server.c, the same from 515.43.04 to 595.45.04). Without the
//! lane, only UVM's mappings for several processes of a container would be made side by side.
//!
//! A call that hangs in the driver keeps only its own container's lane. The next worker finds the slot of that call
//! ([`JournalMap::lane`](crate::monitor::journal::JournalMap::lane)), and lets nobody on the lane before the call
//! is over. This file knows no calls and no books.

use std::collections::VecDeque;
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::monitor::journal::{JournalMap, Slot};
use crate::monitor::lock::Lock;

/// How long the monitor's own work waits for the call on the lane.
const MONITOR_WAIT: Duration = Duration::from_secs(1);

/// How often a waiting call checks whether its caller still waits.
const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// The number of the call that the worker before had on the lane.
const FORMER_CALL: u64 = 0;

/// Lets one call at a time through.
#[derive(Debug)]
pub(crate) struct Lane {
    memory: &'static JournalMap,
    state: Lock<LaneState>,
}

#[derive(Debug, Default)]
struct LaneState {
    /// The number of the call, or of the monitor's own work, that is on the lane.
    current: Option<u64>,
    /// The slot whose call the worker before had on the lane, until the slot's thread takes that call over.
    former: Option<usize>,
    /// The calls and the monitor's own work that wait for the lane; the first of them is next.
    waiting: VecDeque<Waiting>,
    next: u64,
    /// The number that was on the lane when the monitor's own work last waited in vain.
    hanging: Option<u64>,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    slot: Option<usize>,
    thread: Thread,
}

/// A place on the lane: nobody else is on the lane while this value lives.
#[derive(Debug)]
#[must_use = "the lane is left when it is dropped"]
pub(crate) struct OnLane<'a> {
    lane: &'a Lane,
    number: u64,
    slot: Option<usize>,
}

impl Drop for OnLane<'_> {
    fn drop(&mut self) {
        self.lane.leave(self.number);
    }
}

impl OnLane<'_> {
    /// Leaves the lane, does `work`, and enters the lane again. Objects and figures may have changed by then.
    pub(crate) fn leave_while<T>(&mut self, work: impl FnOnce() -> T) -> T {
        self.lane.leave(self.number);
        let done = work();
        self.number = self.lane.wait(self.slot);
        done
    }
}

impl Lane {
    /// Opens the lane. The former worker's call is on it, if one was on it and `is_left` says that something of it is
    /// left.
    pub(crate) fn open(memory: &'static JournalMap, is_left: impl Fn(Slot<'_>) -> bool) -> Self {
        let former = memory.lane().filter(|slot| is_left(memory.slot(*slot)));
        memory.set_lane(former);
        let current = former.map(|_| FORMER_CALL);
        let state = LaneState { current, former, next: FORMER_CALL + 1, ..LaneState::default() };
        Lane { memory, state: Lock::new(state) }
    }

    /// Waits until the slot's call is alone on the lane.
    pub(crate) fn enter(&self, slot: Slot<'_>) -> OnLane<'_> {
        let slot = Some(slot.number());
        OnLane { lane: self, number: self.wait(slot), slot }
    }

    /// Enters the lane where it is free. Returns `None` otherwise.
    pub(crate) fn try_enter(&self, slot: Slot<'_>) -> Option<OnLane<'_>> {
        let slot = Some(slot.number());
        let number = self.wait_for(slot, Duration::ZERO, || false)?;
        Some(OnLane { lane: self, number, slot })
    }

    /// Waits for the lane as long as `waits` is true. Returns `None` where `waits` becomes false first.
    pub(crate) fn enter_while(
        &self,
        slot: Slot<'_>,
        waits: impl Fn() -> bool,
    ) -> Option<OnLane<'_>> {
        let slot = Some(slot.number());
        let number = self.wait_for(slot, CHECK_INTERVAL, waits)?;
        Some(OnLane { lane: self, number, slot })
    }

    /// Enters the lane for the monitor's own work, before all waiting calls. `None` where a call stays on the lane.
    pub(crate) fn enter_for_monitor(&self) -> Option<OnLane<'_>> {
        let still_hanging = {
            let state = self.state.lock();
            state.current.is_some() && state.current == state.hanging
        };
        let patience = if still_hanging { Duration::ZERO } else { MONITOR_WAIT };
        let Some(number) = self.wait_for(None, patience, || false) else {
            let mut state = self.state.lock();
            state.hanging = state.current;
            return None;
        };
        Some(OnLane { lane: self, number, slot: None })
    }

    /// Takes over the lane for the slot's call, where this call was on it when the worker before ended.
    pub(crate) fn take_over(&self, slot: Slot<'_>) -> Option<OnLane<'_>> {
        let slot = Some(slot.number());
        let mut state = self.state.lock();
        (state.former.is_some() && state.former == slot).then(|| {
            state.former = None;
            OnLane { lane: self, number: FORMER_CALL, slot }
        })
    }

    fn wait(&self, slot: Option<usize>) -> u64 {
        loop {
            if let Some(number) = self.wait_for(slot, CHECK_INTERVAL, || true) {
                return number;
            }
        }
    }

    /// Waits for the lane, and checks `waits` after each `look`. Returns the number on the lane, or `None` once `waits`
    /// is false.
    fn wait_for(
        &self,
        slot: Option<usize>,
        look: Duration,
        waits: impl Fn() -> bool,
    ) -> Option<u64> {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        if state.current.is_none() {
            state.current = Some(number);
            self.memory.set_lane(slot);
            return Some(number);
        }
        let waiting = Waiting { number, slot, thread: std::thread::current() };
        match slot {
            // The monitor's own work comes before all calls.
            None => state.waiting.push_front(waiting),
            Some(_) => state.waiting.push_back(waiting),
        }
        drop(state);
        let mut since = Instant::now();
        loop {
            std::thread::park_timeout(look.saturating_sub(since.elapsed()));
            if self.state.lock().current == Some(number) {
                return Some(number);
            }
            if since.elapsed() < look {
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

    /// Lets the next call, or the monitor's own work, on the lane.
    fn leave(&self, number: u64) {
        let mut state = self.state.lock();
        if state.current != Some(number) {
            return;
        }
        let next = state.waiting.pop_front();
        state.current = next.as_ref().map(|next| next.number);
        self.memory.set_lane(next.as_ref().and_then(|next| next.slot));
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
    use crate::monitor::journal::{SLOTS, new_journal};

    fn memory() -> &'static JournalMap {
        Box::leak(Box::new(JournalMap::map(&new_journal()).unwrap()))
    }

    #[test]
    fn they_come_on_one_after_the_other_in_their_order() {
        let memory = memory();
        let lane: &'static Lane = Box::leak(Box::new(Lane::open(memory, |_| true)));
        let first = lane.enter(memory.slot(0));
        assert_eq!(memory.lane(), Some(0));
        let (sender, receiver) = channel();
        for slot in 1..4 {
            let sender = sender.clone();
            std::thread::spawn(move || {
                let on_it = lane.enter(memory.slot(slot));
                sender.send((slot, memory.lane())).unwrap();
                drop(on_it);
            });
            while lane.state.lock().waiting.len() < slot {
                std::thread::yield_now();
            }
        }
        assert!(receiver.try_recv().is_err());
        drop(first);
        let came: Vec<_> = receiver.iter().take(3).collect();
        assert_eq!(came, [(1, Some(1)), (2, Some(2)), (3, Some(3))]);
        while memory.lane().is_some() {
            std::thread::yield_now();
        }
        assert!(lane.enter_for_monitor().is_some());
    }

    #[test]
    fn who_steps_aside_lets_those_on_who_wait() {
        let memory = memory();
        let lane: &'static Lane = Box::leak(Box::new(Lane::open(memory, |_| true)));
        let mut first = lane.enter(memory.slot(0));
        let (sender, receiver) = channel();
        let other = std::thread::spawn(move || {
            drop(lane.enter(memory.slot(1)));
            sender.send(()).unwrap();
        });
        first.leave_while(|| receiver.recv().unwrap());
        assert_eq!(memory.lane(), Some(0));
        other.join().unwrap();
    }

    #[test]
    fn who_is_no_call_comes_before_all_calls_that_wait_and_whose_caller_is_gone_waits_no_more() {
        let memory = memory();
        let lane: &'static Lane = Box::leak(Box::new(Lane::open(memory, |_| true)));
        let first = lane.try_enter(memory.slot(0)).unwrap();
        assert!(lane.try_enter(memory.slot(1)).is_none());
        assert!(lane.enter_while(memory.slot(1), || false).is_none());
        let (sender, receiver) = channel();
        let waiting = |count| {
            while lane.state.lock().waiting.len() < count {
                std::thread::yield_now();
            }
        };
        let call = sender.clone();
        std::thread::spawn(move || {
            let on_it = lane.enter_while(memory.slot(2), || true);
            call.send((memory.lane(), on_it.is_some())).unwrap();
        });
        waiting(1);
        std::thread::spawn(move || {
            let on_it = lane.enter_for_monitor();
            sender.send((memory.lane(), on_it.is_some())).unwrap();
        });
        waiting(2);
        drop(first);
        let came: Vec<_> = receiver.iter().take(2).collect();
        assert_eq!(came, [(None, true), (Some(2), true)]);
    }

    #[test]
    fn an_audit_waits_in_vain_once_for_the_same_call() {
        let memory = memory();
        let lane = Lane::open(memory, |_| true);
        let hanging = lane.enter(memory.slot(0));
        let looked =
            |begun: Instant| (lane.enter_for_monitor().is_none(), begun.elapsed() >= MONITOR_WAIT);
        assert_eq!(looked(Instant::now()), (true, true));
        assert_eq!(looked(Instant::now()), (true, false));
        drop(hanging);
        let other = lane.enter(memory.slot(1));
        assert_eq!(looked(Instant::now()), (true, true));
        drop(other);
        assert!(lane.enter_for_monitor().is_some() && lane.state.lock().waiting.is_empty());
    }

    #[test]
    fn the_next_worker_lets_nobody_on_before_the_call_that_was() {
        let memory = memory();
        std::mem::forget(Lane::open(memory, |_| true).enter(memory.slot(SLOTS - 1)));
        let next = Lane::open(memory, |_| true);
        assert!(next.enter_for_monitor().is_none() && next.take_over(memory.slot(0)).is_none());
        let former = next.take_over(memory.slot(SLOTS - 1)).unwrap();
        assert!(next.take_over(memory.slot(SLOTS - 1)).is_none());
        drop(former);
        assert!(next.enter_for_monitor().is_some() && memory.lane().is_none());
        std::mem::forget(next.enter(memory.slot(3)));
        assert!(
            Lane::open(memory, |_| false).enter_for_monitor().is_some(),
            "nothing is left of it"
        );
    }
}
