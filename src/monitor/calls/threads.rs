//! The threads that a container needs once it calls the driver. They are started at the container's first call.
//!
//! Of the threads that answer calls, one leads and serves a call, and the others follow. The support threads look after
//! what calls make. The first call waits for one thread alone; no further call is answered without support threads. A
//! thread [recovers](crate::monitor::calls::recover) the call that a former worker left in its slot before it answers
//! others.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use nix::unistd::gettid;

use crate::monitor::caller::{Lead, Leader, Listeners, Scratch};
use crate::monitor::calls::case::Case;
use crate::monitor::calls::left_calls::{is_in_driver, is_left, take_over_slot};
use crate::monitor::calls::parts::Parts;
use crate::monitor::calls::recover::recover;
use crate::monitor::calls::serve::serve;
use crate::monitor::journal::{SLOTS, Slot, Stage};
use crate::monitor::lock::Lock;
use crate::monitor::log::Topic;
use crate::monitor::thread::spawn;

/// How long a thread waits after it received nothing from a listener: the caller or all processes behind it are gone.
const PAUSE: Duration = Duration::from_micros(50);

/// The least threads that answer calls: one leads, one watches the leader, and one takes the place of either.
const LEAST: usize = 3;

/// A thread's name, and its function.
type NamedThread = (&'static str, fn(&Parts));

/// The support threads, which look after what calls make.
const SUPPORT_THREADS: [NamedThread; 3] = [
    ("mappings", |parts| parts.mappings.audit_mappings_forever()),
    ("shares", |parts| parts.turns.set_slices_forever()),
    ("shares heard", |parts| parts.slices.follow_shares_forever()),
];

/// Which of the threads that calls need are started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum CallThreads {
    /// None: the container has not called yet.
    #[default]
    Unneeded,
    /// So many of the support threads. The other threads are to be started.
    Starting(usize),
    /// All threads.
    Started,
}

/// The threads that answer calls, and the support threads.
#[derive(Debug)]
pub(crate) struct CallService {
    parts: Arc<Parts>,
    listeners: Arc<Listeners>,
    leader: Leader,
    threads: Lock<CallThreads>,
    /// Completed once all support threads are started.
    support_started: Once,
    draining: AtomicBool,
}

impl CallService {
    pub(crate) fn new(parts: Arc<Parts>, listeners: Arc<Listeners>) -> Self {
        CallService {
            parts,
            listeners,
            leader: Leader::default(),
            threads: Lock::default(),
            support_started: Once::new(),
            draining: AtomicBool::new(false),
        }
    }

    /// Has all threads receive no more calls.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        self.listeners.wake();
    }

    /// Whether no more calls are received, and some calls aren't answered yet.
    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire) && self.has_calls()
    }

    /// Whether the container has called this worker or a former one.
    pub(crate) fn was_called(&self) -> bool {
        let mut slots = (0..SLOTS).map(|number| self.parts.state.journal.slot(number));
        self.parts.state.journal.calls().received() > 0 || slots.any(Self::is_in_use)
    }

    /// Whether any thread answers calls.
    pub(crate) fn has_threads(&self) -> bool {
        self.leader.threads() > 0
    }

    /// Which of the threads that calls need are started.
    pub(crate) fn call_threads(&self) -> CallThreads {
        *self.threads.lock()
    }

    /// Starts the thread that answers the container's first call. That thread starts the others once it has answered,
    /// so that the first call waits for one thread alone.
    pub(crate) fn start_first_thread(self: &Arc<Self>) {
        let mut threads = self.threads.lock();
        *threads = CallThreads::Starting(0);
        // Where the thread can't be started now, it is started with the others.
        let _ = self.start_thread();
    }

    /// Starts the threads that calls need and that aren't started yet. Where a thread can't be started, calls wait
    /// until a later call of this function has started it.
    pub(crate) fn start_missing_threads(self: &Arc<Self>) {
        let mut threads = self.threads.lock();
        let started = match *threads {
            CallThreads::Unneeded => 0,
            CallThreads::Starting(started) => started,
            CallThreads::Started => return,
        };
        if started == 0 {
            // A group gets its slice in the call that schedules it, and the container's first call schedules none.
            self.parts.slices.read_shares();
        }
        for (at, (name, work)) in SUPPORT_THREADS.into_iter().enumerate().skip(started) {
            *threads = CallThreads::Starting(at);
            let parts = Arc::clone(&self.parts);
            if let Err(error) = spawn(name, move || work(&parts)) {
                return self.log_no_thread(&error);
            }
        }
        *threads = CallThreads::Starting(SUPPORT_THREADS.len());
        self.support_started.call_once(|| ());
        match self.start_threads() {
            Ok(()) => *threads = CallThreads::Started,
            Err(error) => self.log_no_thread(&error),
        }
    }

    fn log_no_thread(&self, error: &io::Error) {
        if self.parts.state.log.limit.take_first_line(Topic::NoThread) {
            let container = self.parts.state.settings.short_id.as_str();
            tracing::warn!(container, %error, "driver calls wait: a thread for them can't be started");
        }
    }

    /// Starts a thread for each call that a former worker had received, at least [`LEAST`] threads, and at least one
    /// whose slot has no such call: the driver can't keep that thread from leading.
    fn start_threads(self: &Arc<Self>) -> io::Result<()> {
        let slot = |number| self.parts.state.journal.slot(number);
        // A thread's slot has the thread's number.
        let last = (0..SLOTS).rev().find(|number| Self::is_in_use(slot(*number)));
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

    /// Whether a former worker has left a call in the slot, or a thread that is still in the driver.
    fn is_in_use(slot: Slot<'_>) -> bool {
        slot.notice().id != 0 || is_in_driver(slot)
    }

    fn work(self: &Arc<Self>, number: usize) {
        let slot = self.parts.state.journal.slot(number);
        take_over_slot(slot);
        let mut scratch = Scratch::default();
        recover(&self.parts, &self.listeners, slot, &mut scratch);
        loop {
            // The first call's thread leads alone: the others are started when the first call is answered.
            if self.leader.wait_to_lead() == Lead::Alone && self.support_started.is_completed() {
                // Where all slots have a thread already, no thread watches the leader until a call ends.
                let _ = self.start_thread();
            }
            self.answer_calls(slot, &mut scratch);
        }
    }

    /// Receives calls and serves them, as long as this thread leads.
    fn answer_calls(self: &Arc<Self>, slot: Slot<'_>, scratch: &mut Scratch) {
        let thread = gettid();
        let mut known = self.listeners.changes();
        let mut listeners = self.listeners.all();
        loop {
            if self.draining.load(Ordering::Acquire) {
                // No more calls are received. Other threads may still be busy with theirs.
                std::thread::park();
                continue;
            }
            let Some((listener, notice)) =
                self.listeners.receive(slot, (thread, known), &listeners)
            else {
                if known == self.listeners.changes() {
                    // The caller is gone, or all processes behind the listener: the first thread removes it then.
                    std::thread::sleep(PAUSE);
                }
                known = self.listeners.changes();
                listeners = self.listeners.all();
                continue;
            };
            let call = self.leader.begin();
            serve(&mut Case::new(&self.parts, scratch, slot, listener, notice, false));
            let leads = self.leader.end(call);
            if !self.support_started.is_completed() {
                // The answered caller goes on first: it may wait for this processor.
                std::thread::yield_now();
                self.start_missing_threads();
                self.support_started.wait();
            }
            if !leads {
                return;
            }
        }
    }

    fn has_calls(&self) -> bool {
        (0..SLOTS).map(|slot| self.parts.state.journal.slot(slot)).any(|slot| {
            let open = slot.notice().id != 0 && slot.stage() != Stage::Decided;
            open && self
                .listeners
                .get(slot.listener())
                .is_some_and(|listener| listener.is_valid(slot.notice().id))
        })
    }
}
