//! Threads that only a container needs which calls the driver: they are started at its first call.
//!
//! Of those that answer calls one leads and deals with a call, and the others follow. Others look after
//! what calls make: without them no call is answered but the first, which waits for one thread alone.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use crate::monitor::caller::leader::{Lead, Leader};
use crate::monitor::caller::listeners::Listeners;
use crate::monitor::caller::recv_wait;
use crate::monitor::caller::scratch::Scratch;
use crate::monitor::calls::case::Case;
use crate::monitor::calls::left_calls::{is_haunted, is_left, move_in};
use crate::monitor::calls::parts::Parts;
use crate::monitor::calls::serve::serve;
use crate::monitor::journal::layout::{SLOTS, Stage};
use crate::monitor::journal::map::Slot;
use crate::monitor::lock::Lock;
use crate::monitor::log::limit::Topic;
use crate::monitor::state::lane::OnLane;
use crate::monitor::thread::spawn;

/// How long a listener that has nothing, or nobody, is left alone.
const PAUSE: Duration = Duration::from_micros(50);

/// Threads that answer calls at least: one leads, one watches it, and one takes the place of either.
const LEAST: usize = 3;

/// A thread's name, and what it does.
type Named = (&'static str, fn(&Parts));

/// The threads that look after what calls make.
const LOOK_AFTER_CALLS: [Named; 3] = [
    ("mappings", |parts| parts.mappings.audit_mappings_forever()),
    ("shares", |parts| parts.turns.set_slices_forever()),
    ("shares heard", |parts| parts.slices.follow_shares_forever()),
];

/// Which of the threads that calls need are there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum CallThreads {
    /// Nobody has called yet: none.
    #[default]
    Unneeded,
    /// So many of those that look after what calls make; the rest is to be started.
    Lacking(usize),
    /// All.
    Started,
}

/// The threads that answer calls, and those that look after what calls make.
#[derive(Debug)]
pub(crate) struct CallService {
    parts: Arc<Parts>,
    listeners: Arc<Listeners>,
    leader: Leader,
    threads: Lock<CallThreads>,
    /// Done once those of them are there that look after what calls make.
    are_looked_after: Once,
    draining: AtomicBool,
}

impl CallService {
    pub(crate) fn new(parts: Arc<Parts>, listeners: Arc<Listeners>) -> Self {
        CallService {
            parts,
            listeners,
            leader: Leader::default(),
            threads: Lock::default(),
            are_looked_after: Once::new(),
            draining: AtomicBool::new(false),
        }
    }

    /// Nothing more is received.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        self.listeners.wake();
    }

    /// Whether it drains, and calls aren't answered yet.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire) && self.has_calls()
    }

    /// Whether the container has called, this worker or one before.
    pub(crate) fn was_called(&self) -> bool {
        let mut slots = (0..SLOTS).map(|number| self.parts.state.journal.slot(number));
        self.parts.state.journal.calls().received() > 0 || slots.any(Self::has_anything)
    }

    /// Whether any thread answers calls.
    pub(crate) fn has_threads(&self) -> bool {
        self.leader.threads() > 0
    }

    /// Whether the threads are there that calls need.
    pub(crate) fn call_threads(&self) -> CallThreads {
        *self.threads.lock()
    }

    /// The container calls for the first time. The thread that answers that call starts the others when it
    /// has: the call waits for none but that one.
    pub(crate) fn start_the_first(self: &Arc<Self>) {
        let mut threads = self.threads.lock();
        *threads = CallThreads::Lacking(0);
        // Where it can't be started, it is with the others.
        let _ = self.start_thread();
    }

    /// Starts the threads that calls need and that aren't there yet. Calls wait for those that can't be
    /// started.
    pub(crate) fn start_lacking(self: &Arc<Self>) {
        let mut threads = self.threads.lock();
        let started = match *threads {
            CallThreads::Unneeded => 0,
            CallThreads::Lacking(started) => started,
            CallThreads::Started => return,
        };
        if started == 0 {
            // A group gets its slice in the call that schedules it, which isn't the first.
            self.parts.slices.read_shares();
        }
        for (at, (name, work)) in LOOK_AFTER_CALLS.into_iter().enumerate().skip(started) {
            *threads = CallThreads::Lacking(at);
            let parts = Arc::clone(&self.parts);
            if let Err(error) = spawn(name, move || work(&parts)) {
                return self.tell_of_no_thread(&error);
            }
        }
        *threads = CallThreads::Lacking(LOOK_AFTER_CALLS.len());
        self.are_looked_after.call_once(|| ());
        match self.start_threads() {
            Ok(()) => *threads = CallThreads::Started,
            Err(error) => self.tell_of_no_thread(&error),
        }
    }

    fn tell_of_no_thread(&self, error: &io::Error) {
        if self.parts.state.log.limit.take_first_line(Topic::NoThread) {
            let container = self.parts.state.settings.short_id.as_str();
            tracing::warn!(container, %error, "driver calls wait: a thread for them can't be started");
        }
    }

    /// A thread for each call that a worker before had received, and some more: one at least
    /// that the driver can't keep from leading.
    fn start_threads(self: &Arc<Self>) -> io::Result<()> {
        let slot = |number| self.parts.state.journal.slot(number);
        // Slots are numbered as threads are.
        let last = (0..SLOTS).rev().find(|number| Self::has_anything(slot(*number)));
        let free = (0..SLOTS).find(|number| !is_left(slot(*number)));
        let count = last.max(free).map_or(0, |number| number + 1);
        while self.leader.threads() < count.max(LEAST) {
            self.start_thread()?;
        }
        Ok(())
    }

    fn start_thread(self: &Arc<Self>) -> io::Result<()> {
        self.leader.start_another(SLOTS, |number| {
            let service = Arc::clone(self);
            spawn("calls", move || service.work(number))
        })
    }

    /// Whether a worker before has left a call in the slot, or its thread.
    fn has_anything(slot: Slot<'_>) -> bool {
        slot.notice().id != 0 || is_haunted(slot)
    }

    fn work(self: &Arc<Self>, number: usize) {
        let slot = self.parts.state.journal.slot(number);
        move_in(slot);
        let mut scratch = Scratch::default();
        self.recover(slot, &mut scratch);
        loop {
            // Of the first call's thread nobody follows yet: the others are started when it's answered.
            if self.leader.wait_to_lead() == Lead::Alone && self.are_looked_after.is_completed() {
                // At the bound there is nobody to watch until a call ends.
                let _ = self.start_thread();
            }
            self.answer_calls(slot, &mut scratch);
        }
    }

    /// Waits for calls and answers them, as long as this thread leads.
    fn answer_calls(self: &Arc<Self>, slot: Slot<'_>, scratch: &mut Scratch) {
        let thread = recv_wait::this_thread();
        let mut known = self.listeners.changes();
        let mut listeners = self.listeners.all();
        loop {
            if self.draining.load(Ordering::Acquire) {
                // Others may still be busy; nothing is received any more.
                std::thread::park();
                continue;
            }
            let Some((listener, notice)) =
                self.listeners.receive(slot, (thread, known), &listeners)
            else {
                if known == self.listeners.changes() {
                    // The caller is gone, or all are, which the first thread sees too.
                    std::thread::sleep(PAUSE);
                }
                known = self.listeners.changes();
                listeners = self.listeners.all();
                continue;
            };
            let call = self.leader.begin();
            serve(&mut Case::new(&self.parts, scratch, slot, listener, notice, false));
            let leads = self.leader.end(call);
            if !self.are_looked_after.is_completed() {
                // Who was answered goes on first: it may wait for this processor.
                std::thread::yield_now();
                self.start_lacking();
                self.are_looked_after.wait();
            }
            if !leads {
                return;
            }
        }
    }

    /// What is left to be undone comes before all that its threads ask for by now.
    pub(crate) fn queue_what_is_left(&self) {
        for slot in (0..SLOTS).map(|slot| self.parts.state.journal.slot(slot)) {
            let executing = slot.notice().id != 0 && slot.stage() == Stage::Executing;
            if let Some(thread) = slot.thread().filter(|_| executing) {
                self.parts.callers.thread_order.queue(slot.number(), thread);
            }
        }
    }

    /// Finishes what is left in a slot, whose call may be on the lane already.
    pub(crate) fn recover(&self, slot: Slot<'_>, scratch: &mut Scratch) {
        let lane = self.parts.lane.take_over(slot);
        let was_on_lane = lane.is_some();
        self.finish_call(slot, lane, scratch);
        self.parts.callers.thread_order.leave(slot.number());
        if was_on_lane {
            self.parts.state.books().cancel_former_reservation();
        }
    }

    fn finish_call(&self, slot: Slot<'_>, lane: Option<OnLane<'_>>, scratch: &mut Scratch) {
        let notice = slot.notice();
        let Some(listener) = self.listeners.get(slot.listener()) else { return };
        if notice.id == 0 {
            return;
        }
        let waits = listener.is_valid(notice.id);
        match slot.stage() {
            // Whether the caller got the reply isn't known where it doesn't wait any more: nothing is undone.
            Stage::Decided => {
                let _ = listener.send(notice.id, slot.decision());
            }
            stage @ (Stage::Received | Stage::Executing) if waits => {
                let again = stage == Stage::Executing;
                let mut case = Case::new(&self.parts, scratch, slot, &listener, notice, again);
                case.lane = lane;
                serve(&mut case);
            }
            // Interrupted or dead, and maybe it was made: if the thread is there, it's undone.
            Stage::Executing => {
                let lane = lane.unwrap_or_else(|| self.parts.lane.enter(slot));
                self.parts.callers.undo_unknown(&lane, slot);
            }
            Stage::Received => {}
        }
        slot.clear(0);
    }

    fn has_calls(&self) -> bool {
        (0..SLOTS).map(|slot| self.parts.state.journal.slot(slot)).any(|slot| {
            let open = slot.notice().id != 0 && slot.stage() != Stage::Decided;
            open && self
                .listeners
                .get(slot.listener())
                .is_some_and(|of| of.is_valid(slot.notice().id))
        })
    }
}
