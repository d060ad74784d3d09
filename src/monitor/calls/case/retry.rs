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
use crate::monitor::caller::listener::Reply;
use crate::monitor::caller::scratch::Copy;
use crate::monitor::caller::unclaimed::{Match, Outcome, UnclaimedCall};
use crate::monitor::journal::call_id::{CallObject, Fingerprint, Trace};
use crate::monitor::journal::map::Count;
use crate::monitor::state::lane::OnLane;

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
    pub(crate) kept: Option<UnclaimedCall>,
}

impl Retry {
    /// The outcome of the call that was made in its place.
    pub(crate) fn outcome(&self) -> Option<&Outcome> {
        self.kept.as_ref()?.outcome.as_ref()
    }
}

/// Begins a call of which all is read. It is over where the caller doesn't wait, or has a reply
/// that it didn't take.
pub(crate) fn begin(case: &mut Case<'_>) -> Result<(), Over> {
    wait_for_turn(case)?;
    begin_in_turn(case, None)
}

/// The same, for a call that makes, names or frees objects: it's alone on the lane then.
pub(crate) fn begin_on_lane<'a>(case: &mut Case<'a>) -> Result<OnLane<'a>, Over> {
    wait_for_turn(case)?;
    begin_on_lane_in_turn(case)
}

/// Waits for what the same thread called before.
///
/// A call joins its thread's queue before it asks whether its caller still waits. So a later call waits
/// for an earlier one, or the earlier one finds its caller gone.
pub(crate) fn wait_for_turn(case: &mut Case<'_>) -> Result<(), Over> {
    let thread = case.target()?.thread;
    case.slot.set_thread(thread);
    let (turns, slot) = (&case.parts.callers.thread_order, case.slot.number());
    turns.queue(slot, thread);
    case.retry.is_queued = true;
    case.still_waits()?;
    if !turns.wait(slot, thread, || case.is_valid()) {
        return Err(INTERRUPTED);
    }
    Ok(())
}

/// Begins a call, when it's its turn, as soon as it is alone on the lane.
pub(crate) fn begin_on_lane_in_turn<'a>(case: &mut Case<'a>) -> Result<OnLane<'a>, Over> {
    let lane = match case.lane.take() {
        Some(lane) => lane,
        // A call that the worker before had made is made again whether or not its caller waits: it has to be undone.
        None if case.asked_before || case.retry.is_begun => case.parts.lane.enter(case.slot),
        None => match case.parts.lane.try_enter(case.slot) {
            Some(lane) => lane,
            None => {
                let lane = case.parts.lane.enter_while(case.slot, || case.is_valid());
                let lane = lane.ok_or(INTERRUPTED)?;
                case.still_waits()?;
                lane
            }
        },
    };
    if !case.retry.is_begun {
        begin_in_turn(case, Some(&lane))?;
    }
    Ok(lane)
}

/// The same for a call that isn't made on the lane, but does something that has to be.
pub(crate) fn enter_lane<'a>(case: &mut Case<'a>) -> OnLane<'a> {
    case.lane.take().unwrap_or_else(|| case.parts.lane.enter(case.slot))
}

/// From here on the call is made, unless it was already: then its caller is given the reply.
fn begin_in_turn(case: &mut Case<'_>, lane: Option<&OnLane<'_>>) -> Result<(), Over> {
    case.retry.is_begun = true;
    case.scratch.remember();
    let parts = case.parts;
    if !parts.state.settings.interruptible && parts.callers.unclaimed.is_empty() {
        return Ok(());
    }
    let (words, read) = (case.slot.words(), as_read(case));
    let target = case.target()?;
    let thread = target.thread;
    case.retry.repeats = target.take_answered() == Some(read);
    match parts.callers.unclaimed.take(thread, words, read) {
        Match::Nothing => Ok(()),
        Match::Other(kept) => {
            match lane {
                Some(lane) => parts.callers.undo(lane, &kept),
                None => parts.callers.undo(&enter_lane(case), &kept),
            }
            Ok(())
        }
        Match::Same(kept) => {
            // What the next worker is to know of it, it finds here from now on.
            case.slot.set_executing(kept.trace.object);
            parts.callers.unclaimed.forget_trace(&kept);
            let Some(outcome) = &kept.outcome else {
                case.asked_before = true;
                return Ok(());
            };
            // What was read is no answer.
            case.write_nothing();
            case.effects.counted = Count::Executed;
            let reply = outcome.reply;
            case.retry.kept = Some(kept);
            Err(reply)
        }
    }
}

/// The call as it was read.
fn as_read(case: &Case<'_>) -> Fingerprint {
    Fingerprint::of(case.slot.words(), &case.scratch.input, &[])
}

/// The call as its caller's memory has it, once it's answered.
fn as_answered(case: &Case<'_>) -> Fingerprint {
    let scratch = &*case.scratch;
    let has = |copy| case.effects.writes.has(copy);
    let bytes = if has(Copy::Struct) { &scratch.bytes[..] } else { scratch.bytes_read() };
    let params = if has(Copy::Params) { &scratch.params[..] } else { scratch.params_read() };
    Fingerprint::of(case.slot.words(), bytes, params)
}

/// The driver has done the call, as its caller is about to be told.
pub(crate) fn remember_answer(case: &Case<'_>) {
    if let Some(target) = case.target.as_ref().filter(|_| case.retry.is_begun) {
        let kept = case.retry.outcome().map(|outcome| outcome.seen[1]);
        target.set_answered(kept.unwrap_or_else(|| as_answered(case)));
    }
}

/// Keeps what was done for a caller that didn't take the reply. `object` is what the slot says.
pub(crate) fn keep(case: &mut Case<'_>, (reply, is_ok): (Reply, bool), object: CallObject) {
    let (trace, outcome) = match case.retry.kept.take() {
        Some(UnclaimedCall { trace, outcome, .. }) => (trace, outcome),
        // A caller that stopped waiting before the driver was asked is answered when it asks again.
        None if !case.retry.is_begun || reply == INTERRUPTED => return,
        None => {
            let Some(target) = &case.target else { return };
            let (thread, process) = (target.thread, target.process);
            let outcome = outcome(case, reply, is_ok);
            let mut trace = Trace { thread, process, words: case.slot.words(), object };
            // The call failed and made no object: the next worker is to free nothing.
            trace.object.was_there |= object.handle != 0 && outcome.made.is_empty();
            (trace, Some(outcome))
        }
    };
    if let Some(oldest) = case.parts.callers.unclaimed.keep(trace, outcome) {
        case.parts.callers.undo(&case.parts.lane.enter(case.slot), &oldest);
    }
    case.parts.audit.wake();
}

fn outcome(case: &mut Case<'_>, reply: Reply, is_ok: bool) -> Outcome {
    let seen = [as_read(case), as_answered(case)];
    let output = case.effects.writes.output(case.scratch);
    let made = std::mem::take(&mut case.effects.made);
    // What is kept keeps a client alive, so it is only where it's needed.
    let device = case.device.take().filter(|_| !made.is_empty());
    Outcome { seen, output, reply, is_ok, device, made }
}
