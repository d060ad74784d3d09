//! The threads that a container needs once it calls the driver. They are started at the container's first call.
//!
//! Each queue of listeners has a thread ([`Workers`]). It waits for a call, receives it and serves it at once, the
//! driver's part included, since handing a call to another thread costs more than most calls take. One more thread
//! watches these, and one waits to take the place of another. If a thread is busy with the same call at two polls in a
//! row, the watcher takes its queue, and the other waits for a queue when its call is done. So a call that hangs holds
//! up its own caller, and other callers for two polls only. The watcher sleeps while no call comes.
//!
//! The support threads maintain what calls make. The first call waits for one thread alone; no further call is answered
//! without support threads.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, MutexGuard, Once, PoisonError};
use std::time::Duration;

use rustix::thread::gettid;

use crate::caller::{Listeners, QUEUES, Queue, Scratch};
use crate::calls::dispatch::serve;
use crate::calls::processor_budget::ProcessorBudget;
use crate::case::Case;
use crate::compute::{follow_shares_forever, read_shares, set_slices_forever};
use crate::log::Topic;
use crate::shared::Monitor;
use crate::sync::{Lock, spawn};
use crate::uvm::audit_mappings_forever;

/// How long a thread waits after it received nothing from a listener: the caller or all processes behind it are gone.
const PAUSE: Duration = Duration::from_micros(50);

/// How many threads there are besides those of the queues: one watches, and one takes the place of another.
const FREE: usize = 2;

/// The most threads that answer calls.
const MOST: usize = 32;

/// The support threads, which maintain what calls make.
const SUPPORT_THREADS: [NamedThread; 3] = [
    ("mappings", |monitor| audit_mappings_forever(monitor)),
    ("shares", set_slices_forever),
    ("shares heard", |monitor| follow_shares_forever(monitor)),
];

/// Time between two polls. Each poll costs the threads that take turns on the watcher's processor some 20 µs.
const POLL_INTERVAL: Duration = Duration::from_micros(400);

/// Polls in a row without a call after which the watcher sleeps.
const TIMEOUT: u32 = 20;

/// A thread's name, and its function.
type NamedThread = (&'static str, fn(&Arc<Monitor>));

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
    monitor: Arc<Monitor>,
    listeners: Arc<Listeners>,
    workers: Workers,
    threads: Lock<CallThreads>,
    /// Completed once all support threads are started.
    support_started: Once,
    budget: ProcessorBudget,
}

impl CallService {
    pub(crate) fn new(monitor: Arc<Monitor>, listeners: Arc<Listeners>) -> Self {
        let budget = ProcessorBudget::new(monitor.settings.processor_limit);
        CallService {
            monitor,
            listeners,
            workers: Workers::default(),
            threads: Lock::default(),
            support_started: Once::new(),
            budget,
        }
    }

    /// Whether the container has called the driver.
    pub(crate) fn was_called(&self) -> bool {
        self.monitor.counters.calls().received() > 0
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

    /// Has a thread wait for the calls of a listener that has come since. If no thread is free, one more is to be
    /// started.
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

    /// Starts the threads that calls need and that aren't started yet. If a thread can't be started, calls wait until a
    /// later call of this function has started it.
    pub(crate) fn start_missing_threads(self: &Arc<Self>) {
        let mut threads = self.threads.lock();
        let started = match *threads {
            CallThreads::Unneeded => 0,
            CallThreads::Starting(started) => started,
            CallThreads::Started => return,
        };
        if started == 0 {
            // A group gets its slice in the call that schedules it, and the container's first call schedules none.
            read_shares(&self.monitor);
        }
        for (at, (name, work)) in SUPPORT_THREADS.into_iter().enumerate().skip(started) {
            *threads = CallThreads::Starting(at);
            let monitor = Arc::clone(&self.monitor);
            if let Err(error) = spawn(name, move || work(&monitor)) {
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
        if self.monitor.log.limit.take_first_line(Topic::NoThread) {
            let container = self.monitor.settings.short_id.as_str();
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
                // If there are enough already, no thread watches this one until a call ends.
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
            let at_work = self.monitor.work.begin();
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
            serve(&mut Case::new(&self.monitor, scratch, listener, notice));
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

    /// Has `start` start one more thread, if fewer than `most` were started. Fails if `start` fails.
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
            if quiet > TIMEOUT {
                quiet = 0;
                self.sleep();
            }
            std::thread::sleep(POLL_INTERVAL);
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
    fn thread_that_failed_to_start_does_not_count() {
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

    /// Threads, of which one has a queue, one watches it, and one waits; they report which queues they take. The queues
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
    fn watcher_takes_the_queue_of_a_hanging_thread() {
        let Three { workers, taken, .. } = loop {
            let three = three();
            std::thread::sleep(Duration::from_millis(20));
            assert!(three.taken.try_recv().is_err());
            let begun = Instant::now();
            let call = three.workers.begin(0);
            let has_it = three.workers.end(0, call);
            // On a busy machine it may have been long.
            if begun.elapsed() < POLL_INTERVAL {
                assert!(has_it, "a short call keeps the queue");
                break three;
            }
        };
        let call = workers.begin(0);
        let timeout = Duration::from_secs(600);
        assert_eq!(taken.recv_timeout(timeout).unwrap(), (0, Watch::Watched));
        assert!(!workers.end(0, call), "another thread has it");
    }

    /// Each new queue gets a thread as long as there is one.
    #[test]
    fn each_new_queue_gets_a_thread_if_available() {
        let Three { workers, taken, needed } = three();
        for (queue, watch) in [(1, Watch::Watched), (2, Watch::Unwatched)] {
            needed.fetch_add(1, Ordering::SeqCst);
            workers.call();
            let timeout = Duration::from_secs(600);
            assert_eq!(taken.recv_timeout(timeout).unwrap(), (queue, watch));
        }
        // One that is still needed isn't given up; one that isn't is free for the next thread.
        assert!(!workers.give_up(2, || true));
        assert!(workers.give_up(1, || false));
        assert_eq!(workers.wait_for_queue(|queue| queue < 3), (1, Watch::Unwatched));
    }
}
