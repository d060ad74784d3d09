//! Threads that answer calls: one leads and deals with a call, the others follow.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
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

/// How long a listener that has nothing, or nobody, is left alone.
const PAUSE: Duration = Duration::from_micros(50);

impl Shared {
    /// A thread for each call that a worker before had received, and some more: one at least
    /// that the driver can't keep from leading.
    pub(crate) fn start_threads(&'static self) -> io::Result<()> {
        self.queue_what_is_left();
        let slot = |number| self.journal.slot(number);
        let has_anything =
            |number: &usize| slot(*number).notice().id != 0 || Self::is_haunted(slot(*number));
        // Slots are numbered as threads are.
        let last = (0..SLOTS).rev().find(has_anything);
        let free = (0..SLOTS).find(|number| !Self::is_left(slot(*number)));
        let count = last.max(free).map_or(0, |number| number + 1);
        for _ in 0..count.max(3) {
            self.start_thread()?;
        }
        Ok(())
    }

    fn start_thread(&'static self) -> io::Result<()> {
        let Some(number) = self.leader.enlist(SLOTS) else { return Ok(()) };
        self.spawn("calls", move || self.work(number))
    }

    fn work(&'static self, number: usize) {
        let slot = self.journal.slot(number);
        Self::move_in(slot);
        let mut scratch = Scratch::default();
        self.recover(slot, &mut scratch);
        loop {
            if self.leader.follow() == Turn::Alone {
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
            if !self.leader.end(call) {
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
