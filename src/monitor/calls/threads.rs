//! The threads that a container needs once it calls the driver. They are started at the container's first call.
//!
//! Of the threads that answer calls, one leads and serves a call, and the others follow. The support threads look after
//! what calls make. The first call waits for one thread alone; no further call is answered without support threads.

use std::io;
use std::sync::{Arc, Once};
use std::time::Duration;

use nix::unistd::gettid;

use crate::monitor::caller::{Lead, Leader, Listeners, Scratch};
use crate::monitor::calls::case::Case;
use crate::monitor::calls::parts::Parts;
use crate::monitor::calls::serve::serve;
use crate::monitor::lock::Lock;
use crate::monitor::log::Topic;
use crate::monitor::state::ProcessorBudget;
use crate::monitor::thread::spawn;

/// How long a thread waits after it received nothing from a listener: the caller or all processes behind it are gone.
const PAUSE: Duration = Duration::from_micros(50);

/// The least and the most threads that answer calls: one leads, one watches the leader, and one takes the place of
/// either.
const LEAST: usize = 3;
const MOST: usize = 32;

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
    budget: ProcessorBudget,
}

impl CallService {
    pub(crate) fn new(parts: Arc<Parts>, listeners: Arc<Listeners>) -> Self {
        let budget = ProcessorBudget::new(parts.state.settings.processor_limit);
        CallService {
            parts,
            listeners,
            leader: Leader::default(),
            threads: Lock::default(),
            support_started: Once::new(),
            budget,
        }
    }

    /// Whether the container has called the driver.
    pub(crate) fn was_called(&self) -> bool {
        self.parts.state.counters.calls().received() > 0
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

    /// Starts the [`LEAST`] threads.
    fn start_threads(self: &Arc<Self>) -> io::Result<()> {
        while self.leader.threads() < LEAST {
            self.start_thread()?;
        }
        Ok(())
    }

    fn start_thread(self: &Arc<Self>) -> io::Result<()> {
        self.leader.start_another(MOST, || {
            let service = Arc::clone(self);
            spawn("calls", move || service.work())
        })
    }

    fn work(self: &Arc<Self>) {
        let mut scratch = Scratch::default();
        loop {
            // The first call's thread leads alone: the others are started when the first call is answered.
            if self.leader.wait_to_lead() == Lead::Alone && self.support_started.is_completed() {
                // Where there are enough already, no thread watches the leader until a call ends.
                let _ = self.start_thread();
            }
            self.answer_calls(&mut scratch);
        }
    }

    /// Receives calls and serves them, as long as this thread leads.
    fn answer_calls(self: &Arc<Self>, scratch: &mut Scratch) {
        let thread = gettid();
        let mut known = self.listeners.changes();
        let mut listeners = self.listeners.all();
        loop {
            if let Some(pause) = self.budget.pause() {
                std::thread::sleep(pause);
            }
            let at_work = self.parts.state.work.begin();
            let Some((listener, notice)) = self.listeners.receive((thread, known), &listeners)
            else {
                drop(at_work);
                if known == self.listeners.changes() {
                    // The caller is gone, or all processes behind the listener: the first thread removes it then.
                    std::thread::sleep(PAUSE);
                }
                known = self.listeners.changes();
                listeners = self.listeners.all();
                continue;
            };
            let call = self.leader.begin();
            serve(&mut Case::new(&self.parts, scratch, listener, notice));
            let leads = self.leader.end(call);
            drop(at_work);
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
}
