//! The threads that a container needs once it calls the driver. They are started at the container's first call.
//!
//! Each queue of listeners has a thread that answers its calls, one watches those, and one waits to take the place of
//! another ([`Workers`]). The support threads look after what calls make. The first call waits for one thread alone; no
//! further call is answered without support threads.

use std::io;
use std::sync::{Arc, Once};
use std::time::Duration;

use nix::unistd::gettid;

use crate::monitor::caller::{Listeners, Queue, Scratch, Watch, Workers};
use crate::monitor::calls::case::Case;
use crate::monitor::calls::parts::Parts;
use crate::monitor::calls::serve::serve;
use crate::monitor::lock::Lock;
use crate::monitor::log::Topic;
use crate::monitor::state::ProcessorBudget;
use crate::monitor::thread::spawn;

/// How long a thread waits after it received nothing from a listener: the caller or all processes behind it are gone.
const PAUSE: Duration = Duration::from_micros(50);

/// How many threads there are besides those of the queues: one watches, and one takes the place of another.
const FREE: usize = 2;

/// The most threads that answer calls.
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
    workers: Workers,
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
            workers: Workers::default(),
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
        self.workers.threads() > 0
    }

    /// Which of the threads that calls need are started.
    pub(crate) fn call_threads(&self) -> CallThreads {
        *self.threads.lock()
    }

    /// Starts the thread that answers the container's first call; if the container has several listeners, one for each.
    /// That thread starts the others once it has answered, so that the first call waits for one thread alone.
    pub(crate) fn start_first_thread(self: &Arc<Self>) {
        let mut threads = self.threads.lock();
        *threads = CallThreads::Starting(0);
        // A thread that can't be started now is started with the others.
        let _ = self.start_threads(0);
    }

    /// Has a thread wait for the calls of a listener that has come since. If no thread is free, one more is to be started.
    pub(crate) fn serve_new_listener(&self) {
        self.workers.call();
        let mut threads = self.threads.lock();
        if *threads == CallThreads::Started && self.workers.threads() < self.needed(FREE) {
            *threads = CallThreads::Starting(SUPPORT_THREADS.len());
        }
    }

    /// How many threads are needed: one for each queue, and so many others.
    fn needed(&self, others: usize) -> usize {
        self.listeners.queues().iter().filter(|queue| !queue.is_empty()).count() + others
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
        match self.start_threads(FREE) {
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

    /// Starts a thread for each queue, and so many others.
    fn start_threads(self: &Arc<Self>, others: usize) -> io::Result<()> {
        while self.workers.threads() < self.needed(others) {
            self.start_thread()?;
        }
        Ok(())
    }

    fn start_thread(self: &Arc<Self>) -> io::Result<()> {
        self.workers.start_another(MOST, || {
            let service = Arc::clone(self);
            spawn("calls", move || service.work())
        })
    }

    fn work(self: &Arc<Self>) {
        let mut scratch = Scratch::default();
        let queues = self.listeners.queues();
        let needs_thread = |number: usize| queues.get(number).is_some_and(|of| !of.is_empty());
        loop {
            let (number, watch) = self.workers.wait_for_queue(needs_thread);
            // The first call's thread is alone: the others are started when the first call is answered.
            if watch == Watch::Unwatched && self.support_started.is_completed() {
                // Where there are enough already, no thread watches this one until a call ends.
                let _ = self.start_thread();
            }
            if let Some(queue) = queues.get(number) {
                self.answer_calls((number, queue), &mut scratch);
            }
        }
    }

    /// Receives the calls of a queue and serves them, as long as this thread has the queue.
    fn answer_calls(self: &Arc<Self>, (number, queue): (usize, &Queue), scratch: &mut Scratch) {
        let thread = gettid();
        let mut known = queue.changes();
        let mut listeners = queue.all();
        loop {
            if listeners.is_empty() && self.workers.give_up(number, || !queue.is_empty()) {
                return;
            }
            if let Some(pause) = self.budget.pause() {
                std::thread::sleep(pause);
            }
            let at_work = self.parts.state.work.begin();
            let Some((listener, notice)) = queue.receive((thread, known), &listeners) else {
                drop(at_work);
                if known == queue.changes() {
                    // The caller is gone, or all processes behind the listener: the first thread removes it then.
                    std::thread::sleep(PAUSE);
                }
                known = queue.changes();
                listeners = queue.all();
                continue;
            };
            let call = self.workers.begin(number);
            serve(&mut Case::new(&self.parts, scratch, listener, notice));
            let has_queue = self.workers.end(number, call);
            drop(at_work);
            if !self.support_started.is_completed() {
                // The answered caller goes on first: it may wait for this processor.
                std::thread::yield_now();
                self.start_missing_threads();
                self.support_started.wait();
            }
            if !has_queue {
                return;
            }
        }
    }
}
