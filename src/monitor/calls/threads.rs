//! Threads that only a container needs which calls the driver: they are started at its first call.
//!
//! Of those that answer calls one leads and deals with a call, and the others follow. Others look after
//! what calls make: without them no call is answered but the first, which waits for one thread alone.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use nix::libc::seccomp_notif;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::Pid;

use crate::monitor::caller::leader::Turn;
use crate::monitor::caller::listener::Listener;
use crate::monitor::caller::recv_wait;
use crate::monitor::caller::scratch::Scratch;
use crate::monitor::calls::serve::Case;
use crate::monitor::state::journal::SLOTS;
use crate::monitor::state::journal_map::Slot;
use crate::monitor::worker::Shared;
use crate::monitor::worker::call_threads::CallThreads;
use crate::monitor::worker::log_limit::News;

/// How long a listener that has nothing, or nobody, is left alone.
const PAUSE: Duration = Duration::from_micros(50);

/// Threads that answer calls at least: one leads, one watches it, and one takes the place of either.
const LEAST: usize = 3;

/// A thread's name, and what it does.
type Named = (&'static str, fn(&'static Shared));

/// The threads that look after what calls make.
const LOOK_AFTER_CALLS: [Named; 3] = [
    ("mappings", Shared::audit_mappings_forever),
    ("shares", Shared::share_forever),
    ("shares heard", Shared::hear_of_shares_forever),
];

impl Shared {
    /// Whether the container has called, this worker or one before.
    pub(crate) fn was_called(&self) -> bool {
        let mut slots = (0..SLOTS).map(|number| self.journal.slot(number));
        self.journal.calls().received() > 0 || slots.any(Self::has_anything)
    }

    fn lock_call_threads(&self) -> MutexGuard<'_, CallThreads> {
        self.call_threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the threads are there that calls need.
    pub(crate) fn call_threads(&self) -> CallThreads {
        *self.lock_call_threads()
    }

    /// The container calls for the first time. The thread that answers that call starts the others when it
    /// has: the call waits for none but that one.
    pub(crate) fn start_the_first(&'static self) {
        let mut threads = self.lock_call_threads();
        *threads = CallThreads::Lacking(0);
        // Where it can't be started, it is with the others.
        let _ = self.start_thread();
    }

    /// Starts the threads that calls need and that aren't there yet. Calls wait for those that can't be
    /// started.
    pub(crate) fn start_lacking(&'static self) {
        let mut threads = self.lock_call_threads();
        let started = match *threads {
            CallThreads::Unneeded => 0,
            CallThreads::Lacking(started) => started,
            CallThreads::Started => return,
        };
        if started == 0 {
            // A group gets its slice in the call that schedules it, which isn't the first.
            self.read_shares();
        }
        for (at, (name, work)) in LOOK_AFTER_CALLS.into_iter().enumerate().skip(started) {
            *threads = CallThreads::Lacking(at);
            if let Err(error) = self.spawn(name, move || work(self)) {
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
        if self.log_limit.allows_news(News::NoThread) {
            let container = self.settings.short_id.as_str();
            tracing::warn!(container, %error, "driver calls wait: a thread for them can't be started");
        }
    }

    /// A thread for each call that a worker before had received, and some more: one at least
    /// that the driver can't keep from leading.
    fn start_threads(&'static self) -> io::Result<()> {
        let slot = |number| self.journal.slot(number);
        // Slots are numbered as threads are.
        let last = (0..SLOTS).rev().find(|number| Self::has_anything(slot(*number)));
        let free = (0..SLOTS).find(|number| !Self::is_left(slot(*number)));
        let count = last.max(free).map_or(0, |number| number + 1);
        while self.leader.threads() < count.max(LEAST) {
            self.start_thread()?;
        }
        Ok(())
    }

    fn start_thread(&'static self) -> io::Result<()> {
        self.leader.enlist(SLOTS, |number| self.spawn("calls", move || self.work(number)))
    }

    /// Whether a worker before has left a call in the slot, or its thread.
    fn has_anything(slot: Slot<'_>) -> bool {
        slot.notice().id != 0 || Self::is_haunted(slot)
    }

    fn work(&'static self, number: usize) {
        let slot = self.journal.slot(number);
        Self::move_in(slot);
        let mut scratch = Scratch::default();
        self.recover(slot, &mut scratch);
        loop {
            // Of the first call's thread nobody follows yet: the others are started when it's answered.
            if self.leader.follow() == Turn::Alone && self.are_looked_after.is_completed() {
                // At the bound there is nobody to watch until a call ends.
                let _ = self.start_thread();
            }
            self.answer_calls(slot, &mut scratch);
        }
    }

    /// Waits for calls and answers them, as long as this thread leads.
    fn answer_calls(&'static self, slot: Slot<'_>, scratch: &mut Scratch) {
        let thread = recv_wait::this_thread();
        let mut known = self.waiting.changes();
        let mut listeners = self.listeners();
        loop {
            if self.draining.load(Ordering::Acquire) {
                // Others may still be busy; nothing is received any more.
                std::thread::park();
                continue;
            }
            let Some((listener, notice)) = self.receive(slot, (thread, known), &listeners) else {
                if known == self.waiting.changes() {
                    // The caller is gone, or all are, which the first thread sees too.
                    std::thread::sleep(PAUSE);
                }
                known = self.waiting.changes();
                listeners = self.listeners();
                continue;
            };
            let call = self.leader.begin();
            Case::new(self, scratch, slot, listener, notice, false).serve();
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

    /// Waits for a call, or for a change after those that are known.
    fn receive<'a>(
        &self,
        slot: Slot<'_>,
        (thread, known): (Pid, u64),
        listeners: &'a [Arc<Listener>],
    ) -> Option<(&'a Listener, seccomp_notif)> {
        self.waiting.wait(thread, known, || {
            if let [one] = listeners {
                return one.receive(slot).map(|notice| (&**one, notice));
            }
            let asked = listeners.iter().map(|of| PollFd::new(of.descriptor(), PollFlags::POLLIN));
            let mut asked: Vec<PollFd<'_>> = asked.collect();
            poll(&mut asked, PollTimeout::NONE).ok()?;
            let has = |of: &PollFd<'_>| of.revents().is_some_and(|r| r.contains(PollFlags::POLLIN));
            // From one on that is the next each time: those before could have calls for ever.
            let first = self.first.fetch_add(1, Ordering::Relaxed) % listeners.len().max(1);
            let all = listeners.iter().zip(&asked);
            let all = all.clone().skip(first).chain(all.take(first));
            let ready = all.filter(|(_, asked)| has(asked));
            ready.into_iter().find_map(|(of, _)| of.receive(slot).map(|notice| (&**of, notice)))
        })
    }
}
