//! Callers that a signal takes away, and that make their call again.
//!
//! Before Linux 5.19 any signal ends a caller's wait, and the kernel makes the call again. What was
//! done for such a caller is kept until its thread calls again ([`unclaimed`](crate::monitor::caller::unclaimed)).
//!
//! A reply that was sent may be lost, too: the kernel looks for signals before it looks for the reply
//! (`seccomp_do_user_notification`, `wait_for_completion_interruptible` and then the lock). Of 5,000
//! signals that come in the middle of a call, about one does that. The caller then makes the call
//! again, with the answer in its memory. Such a call is made once more, and where the driver says that
//! it is done already, the caller is told that it is done. The books heard of it before, and believe
//! what the driver says: any program can make a call twice.

use super::{Case, INTERRUPTED, Over};
use crate::monitor::caller::call_id::{Fingerprint, Making, Trace};
use crate::monitor::caller::listener::Reply;
use crate::monitor::caller::scratch::Copy;
use crate::monitor::caller::unclaimed::{Kept, Match, Outcome};
use crate::monitor::calls::lane::OnLane;
use crate::monitor::state::journal_map::Count;

/// What is known of a call whose caller may be interrupted, and make it again.
#[derive(Debug, Default)]
pub(crate) struct Retry {
    /// The call must not be done twice: where nobody takes its reply, that is kept.
    pub(crate) is_begun: bool,
    /// Later calls of the thread wait for it.
    pub(crate) is_queued: bool,
    /// The thread makes its last call again, and the struct that we read has the answer to that: the
    /// thread may not have received the reply.
    pub(crate) repeats: bool,
    /// The call that was made in its place, whose reply the caller is given.
    pub(crate) kept: Option<Kept>,
}

impl Retry {
    /// The outcome of the call that was made in its place.
    pub(crate) fn outcome(&self) -> Option<&Outcome> {
        self.kept.as_ref()?.outcome.as_ref()
    }
}

impl<'a> Case<'a> {
    /// Begins a call of which all is read. It is over where the caller doesn't wait, or has a reply
    /// that it didn't take.
    pub(crate) fn begin(&mut self) -> Result<(), Over> {
        self.wait_for_turn()?;
        self.begin_in_turn(None)
    }

    /// The same, for a call that makes, names or frees objects: it's alone on the lane then.
    pub(crate) fn begin_on_lane(&mut self) -> Result<OnLane<'a>, Over> {
        self.wait_for_turn()?;
        self.take_lane()
    }

    /// Waits for what the same thread called before.
    ///
    /// A call joins its thread's queue before it asks whether its caller still waits. So a later call waits
    /// for an earlier one, or the earlier one finds its caller gone.
    pub(crate) fn wait_for_turn(&mut self) -> Result<(), Over> {
        let thread = self.target()?.thread;
        self.slot.set_thread(thread);
        let (turns, slot) = (&self.parts.callers.thread_order, self.slot.number());
        turns.queue(slot, thread);
        self.retry.is_queued = true;
        self.still_waits()?;
        if !turns.wait(slot, thread, || self.is_valid()) {
            return Err(INTERRUPTED);
        }
        Ok(())
    }

    /// Begins a call, when it's its turn, as soon as it is alone on the lane.
    pub(crate) fn take_lane(&mut self) -> Result<OnLane<'a>, Over> {
        let lane = match self.lane.take() {
            Some(lane) => lane,
            // What the worker before made is made again, to be undone.
            None if self.again || self.retry.is_begun => self.parts.lane.enter(self.slot),
            None => match self.parts.lane.enter_at_once(self.slot) {
                Some(lane) => lane,
                None => {
                    let lane = self.parts.lane.enter_while(self.slot, || self.is_valid());
                    let lane = lane.ok_or(INTERRUPTED)?;
                    self.still_waits()?;
                    lane
                }
            },
        };
        if !self.retry.is_begun {
            self.begin_in_turn(Some(&lane))?;
        }
        Ok(lane)
    }

    /// The same for a call that isn't made on the lane, but does something that has to be.
    pub(crate) fn enter_lane(&mut self) -> OnLane<'a> {
        self.lane.take().unwrap_or_else(|| self.parts.lane.enter(self.slot))
    }

    /// From here on the call is made, unless it was already: then its caller is given the reply.
    fn begin_in_turn(&mut self, lane: Option<&OnLane<'_>>) -> Result<(), Over> {
        self.retry.is_begun = true;
        self.scratch.remember();
        let parts = self.parts;
        if !parts.state.settings.interruptible && parts.callers.unclaimed.is_empty() {
            return Ok(());
        }
        let (words, read) = (self.slot.words(), self.as_read());
        let target = self.target()?;
        let thread = target.thread;
        self.retry.repeats = target.take_answered() == Some(read);
        match parts.callers.unclaimed.take(thread, words, read) {
            Match::Nothing => Ok(()),
            Match::Other(kept) => {
                match lane {
                    Some(lane) => parts.callers.undo(lane, &kept),
                    None => parts.callers.undo(&self.enter_lane(), &kept),
                }
                Ok(())
            }
            Match::Same(kept) => {
                // What the next worker is to know of it, it finds here from now on.
                self.slot.set_executing(kept.trace.object);
                parts.callers.unclaimed.settle(&kept);
                let Some(outcome) = &kept.outcome else {
                    self.again = true;
                    return Ok(());
                };
                // What was read is no answer.
                self.write_nothing();
                self.counted = Count::Executed;
                let reply = outcome.reply;
                self.retry.kept = Some(kept);
                Err(reply)
            }
        }
    }

    /// The call as it was read.
    fn as_read(&self) -> Fingerprint {
        Fingerprint::of(self.slot.words(), &self.scratch.input, &[])
    }

    /// The call as its caller's memory has it, once it's answered.
    fn as_answered(&self) -> Fingerprint {
        let scratch = &*self.scratch;
        let has = |copy| self.writes.has(copy);
        let bytes = if has(Copy::Struct) { &scratch.bytes[..] } else { scratch.bytes_read() };
        let params = if has(Copy::Params) { &scratch.params[..] } else { scratch.params_read() };
        Fingerprint::of(self.slot.words(), bytes, params)
    }

    /// The driver has done the call, as its caller is about to be told.
    pub(crate) fn remember_answer(&self) {
        if let Some(target) = self.target.as_ref().filter(|_| self.retry.is_begun) {
            let kept = self.retry.outcome().map(|outcome| outcome.seen[1]);
            target.set_answered(kept.unwrap_or_else(|| self.as_answered()));
        }
    }

    /// Keeps what was done for a caller that didn't take the reply. `object` is what the slot says.
    pub(crate) fn keep(&mut self, (reply, is_ok): (Reply, bool), object: Making) {
        let (trace, outcome) = match self.retry.kept.take() {
            Some(Kept { trace, outcome, .. }) => (trace, outcome),
            // A caller that stopped waiting before the driver was asked is answered when it asks again.
            None if !self.retry.is_begun || reply == INTERRUPTED => return,
            None => {
                let Some(target) = &self.target else { return };
                let (thread, process) = (target.thread, target.process);
                let outcome = self.outcome(reply, is_ok);
                let mut trace = Trace { thread, process, words: self.slot.words(), object };
                // The call failed and made no object: the next worker is to free nothing.
                trace.object.was_there |= object.handle != 0 && outcome.made.is_empty();
                (trace, Some(outcome))
            }
        };
        if let Some(oldest) = self.parts.callers.unclaimed.keep(trace, outcome) {
            self.parts.callers.undo(&self.parts.lane.enter(self.slot), &oldest);
        }
        self.parts.audit.wake();
    }

    fn outcome(&mut self, reply: Reply, is_ok: bool) -> Outcome {
        let seen = [self.as_read(), self.as_answered()];
        let output = self.writes.output(self.scratch);
        let made = std::mem::take(&mut self.made);
        // What is kept keeps a client alive, so it is only where it's needed.
        let device = self.device.take().filter(|_| !made.is_empty());
        Outcome { seen, output, reply, is_ok, device, made }
    }
}
