//! Callers that signals take away, and that come back.
//!
//! What was done for one that doesn't wait any more is stashed until its thread makes the call
//! again. Nor has a reply that was sent come for certain: the kernel looks for signals before it
//! looks for the answer, and takes that one between the two as well
//! (`seccomp_do_user_notification`, `wait_for_completion_interruptible` and then the lock). The
//! caller then makes the call again, with the answer in its memory. So such a call is made once
//! more, and what the driver says of what is done already is no news to its caller. The books heard
//! of it before, and believe what the driver says: any program can make a call twice.

use std::sync::atomic::Ordering;

use super::{Case, INTERRUPTED, Over};
use crate::monitor::caller::call_id::{Making, Print, Trace};
use crate::monitor::caller::listener::Reply;
use crate::monitor::caller::scratch::Copy;
use crate::monitor::caller::unclaimed::{Kept, Match, Outcome};
use crate::monitor::calls::lane::OnLane;
use crate::monitor::state::journal_map::Count;
use crate::process::ProcessId;
use crate::rm::number::NV_OK;

impl<'a> Case<'a> {
    /// All is read: whether the caller still waits, and the call wasn't made already, for the
    /// same thread, and not taken.
    pub(crate) fn only_once(&mut self) -> Result<(), Over> {
        self.in_turn()?;
        self.make_once(None)
    }

    /// The same, for a call that makes, names or frees objects: it's alone on the lane then.
    pub(crate) fn only_once_on_lane(&mut self) -> Result<OnLane<'a>, Over> {
        self.in_turn()?;
        self.on_lane()
    }

    /// Waits for what the same thread called before.
    ///
    /// A call joins its thread's queue before it asks whether its caller still waits. So a later call waits
    /// for an earlier one, or the earlier one finds its caller gone.
    pub(crate) fn in_turn(&mut self) -> Result<(), Over> {
        let thread = self.target()?.thread;
        self.slot.is_of(thread);
        let (turns, slot) = (&self.shared.thread_order, self.slot.number());
        turns.queue(slot, thread);
        self.queued = true;
        self.still_waits()?;
        if !turns.wait(slot, thread, || self.is_valid()) {
            return Err(INTERRUPTED);
        }
        Ok(())
    }

    /// Waits until a call whose turn it is is alone on the lane.
    pub(crate) fn on_lane(&mut self) -> Result<OnLane<'a>, Over> {
        let lane = match self.lane.take() {
            Some(lane) => lane,
            // What the worker before made is made again, to be undone.
            None if self.again || self.once => self.shared.lane.enter(self.slot),
            None => match self.shared.lane.enter_at_once(self.slot) {
                Some(lane) => lane,
                None => {
                    let lane = self.shared.lane.enter_while(self.slot, || self.is_valid());
                    let lane = lane.ok_or(INTERRUPTED)?;
                    self.still_waits()?;
                    lane
                }
            },
        };
        if !self.once {
            self.make_once(Some(&lane))?;
        }
        Ok(lane)
    }

    /// The same for a call that isn't made on the lane, but does something that has to be.
    pub(crate) fn enter_lane(&mut self) -> OnLane<'a> {
        self.lane.take().unwrap_or_else(|| self.shared.lane.enter(self.slot))
    }

    /// From here on the call is made, unless it was already.
    fn make_once(&mut self, lane: Option<&OnLane<'_>>) -> Result<(), Over> {
        self.once = true;
        let target = self.target()?;
        let thread = target.thread;
        // The one before may have answered after this one was read.
        self.may_differ = target.was_late.swap(false, Ordering::AcqRel);
        self.scratch.remember();
        self.come_back(lane, thread)
    }

    /// A caller that was interrupted comes back for what was done.
    fn come_back(&mut self, lane: Option<&OnLane<'_>>, thread: ProcessId) -> Result<(), Over> {
        let shared = self.shared;
        if !shared.settings.interruptible && shared.unclaimed.is_empty() {
            return Ok(());
        }
        let read = Print::of(&self.scratch.input, &[]);
        self.read = Some(read);
        self.slot.has_read(read);
        let asked = self.asked();
        let same = |answered: Trace| answered.asked == asked && answered.after == read;
        self.repeats = self.takes_answer().is_some_and(same);
        match shared.unclaimed.take(thread, asked, read) {
            Match::Nothing => {}
            Match::Other(kept) => match lane {
                Some(lane) => shared.undo(lane, &kept),
                None => shared.undo(&self.enter_lane(), &kept),
            },
            Match::Same(kept) => {
                // What the next worker is to know of it, it finds here from now on.
                self.slot.executing(kept.trace.object);
                shared.unclaimed.settle(&kept);
                let Some(outcome) = &kept.outcome else {
                    self.again = true;
                    return Ok(());
                };
                // What was read is no answer.
                self.write_nothing();
                self.counted = Count::Executed;
                let reply = outcome.reply;
                self.done = Some(kept);
                return Err(reply);
            }
        }
        Ok(())
    }

    /// What the call is known by, if its caller comes back; `object` is what its slot says.
    pub(crate) fn trace(&self, done: Option<&Kept>, object: Making) -> Option<Trace> {
        if let Some(done) = done {
            return Some(done.trace);
        }
        let target = self.target.as_ref().filter(|_| self.once)?;
        let told = |one| self.writes.iter().flatten().any(|(_, copy)| *copy == one);
        let scratch = &*self.scratch;
        let bytes = if told(Copy::Struct) { &scratch.bytes[..] } else { scratch.bytes_read() };
        let params = if told(Copy::Params) { &scratch.params[..] } else { scratch.params_read() };
        Some(Trace {
            thread: target.thread,
            process: target.process,
            asked: self.asked(),
            before: self.read.unwrap_or_else(|| Print::of(&scratch.input, &[])),
            after: Print::of(bytes, params),
            object,
        })
    }

    /// What was done, to be told to who comes back.
    pub(crate) fn outcome(&mut self, reply: Reply, is_ok: bool) -> Outcome {
        let output = self.writes.into_iter().flatten();
        let output =
            output.map(|(address, copy)| (address, self.scratch.copy(copy).to_vec())).collect();
        let made = std::mem::take(&mut self.made);
        // What is kept keeps a client alive, so it is only where it's needed.
        let device = self.device.take().filter(|_| !made.is_empty());
        Outcome { output, reply, is_ok, device, made }
    }

    /// The answer waits for the thread to make the call again.
    pub(crate) fn keep(&self, trace: Trace, outcome: Outcome) {
        if let Some(oldest) = self.shared.unclaimed.keep(trace, Some(outcome)) {
            self.shared.undo(&self.shared.lane.enter(self.slot), &oldest);
        }
        self.shared.auditor.wake();
    }

    /// The caller is answered, and may not come to take it.
    pub(crate) fn has_answered(&self, trace: &Trace) {
        self.shared.journal.keep_answer(trace);
        if let Some(target) = &self.target {
            target.has_answered(*trace);
        }
    }

    /// What the thread was answered last, if it may not have come to take it. The next worker
    /// finds it until there is another answer.
    pub(crate) fn takes_answer(&self) -> Option<Trace> {
        self.target.as_ref()?.takes_answer(self.shared.journal)
    }

    /// Whether the driver has done it, as far as it says.
    pub(crate) fn is_ok(&self) -> bool {
        self.said.is_some_and(|(head, _)| self.status(head) == NV_OK)
    }

    /// Whether the driver says of the call that it has been done.
    pub(crate) fn was_done_already(&self) -> bool {
        self.said.is_some_and(|(head, already)| already.contains(&self.status(head)))
    }
}
