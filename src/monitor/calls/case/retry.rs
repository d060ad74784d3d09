//! Where a call passes the interrupted ones ([`Interrupted`](crate::monitor::caller::Interrupted)), and how it enters the
//! lane.
//!
//! A call that was done already, and whose reply was lost, is made once more. Where the driver says that it was done
//! already, the caller is told that it is done. The books have the result of the first time, and believe the driver the
//! second time: any program can make a call twice.

use super::{Case, EarlyReply, INTERRUPTED};
use crate::monitor::caller::{Copy, Fingerprint, Match, Reply, UnclaimedCall};
use crate::monitor::snapshot::Count;
use crate::monitor::state::OnLane;
use crate::process::ProcessId;

/// What is known of a call whose caller may be interrupted, and may make the call again.
#[derive(Debug, Default)]
pub(crate) struct Retry {
    /// Whether the call must not be done twice: where nobody takes its reply, the reply is kept.
    pub(crate) is_begun: bool,
    /// The thread whose later calls wait for this one.
    pub(crate) entered: Option<ProcessId>,
    /// Whether the thread makes its last call again, and the struct that was read has the answer to the last call:
    /// the thread may not have received that reply.
    pub(crate) repeats: bool,
    /// The call that was made in place of this one, and whose reply the caller is given.
    pub(crate) kept: Option<UnclaimedCall>,
}

/// Begins a call that is read completely, after the earlier calls of its thread. The call ends here where its caller
/// doesn't wait any more, or where a reply is kept that the caller didn't take.
pub(crate) fn begin(case: &mut Case<'_>) -> Result<(), EarlyReply> {
    wait_for_turn(case)?;
    begin_in_turn(case, None)
}

/// Begins a call that makes, names or frees objects, as [`begin`] does, and enters the lane for it.
pub(crate) fn begin_on_lane<'a>(case: &mut Case<'a>) -> Result<OnLane<'a>, EarlyReply> {
    wait_for_turn(case)?;
    begin_on_lane_in_turn(case)
}

/// Waits for the earlier call of the same thread, where signals interrupt calls: otherwise a thread that has left a
/// call to the monitor is dead, and makes no other call.
pub(crate) fn wait_for_turn(case: &mut Case<'_>) -> Result<(), EarlyReply> {
    if let (Some(calls), None) = (&case.parts.callers.interrupted, case.retry.entered) {
        let thread = case.target()?.thread;
        if !calls.enter(thread, || case.is_valid()) {
            return Err(INTERRUPTED);
        }
        case.retry.entered = Some(thread);
    }
    case.still_waits()
}

/// Begins a call after [`wait_for_turn`], as soon as the call is alone on the lane.
pub(crate) fn begin_on_lane_in_turn<'a>(case: &mut Case<'a>) -> Result<OnLane<'a>, EarlyReply> {
    let lane = match case.parts.lane.try_enter() {
        Some(lane) => lane,
        // It is made though its caller may be gone, and undone then.
        None if case.retry.is_begun => case.parts.lane.enter(),
        None => {
            let lane = case.parts.lane.enter_while(|| case.is_valid()).ok_or(INTERRUPTED)?;
            case.still_waits()?;
            lane
        }
    };
    if !case.retry.is_begun {
        begin_in_turn(case, Some(&lane))?;
    }
    Ok(lane)
}

/// Notes that the call is begun: from here on it is made, unless it was made already. Then its caller is given the
/// kept reply. Undoes another call of the thread whose reply the thread didn't take.
fn begin_in_turn(case: &mut Case<'_>, lane: Option<&OnLane<'_>>) -> Result<(), EarlyReply> {
    case.retry.is_begun = true;
    case.scratch.remember();
    let parts = case.parts;
    let Some(calls) = &parts.callers.interrupted else { return Ok(()) };
    let (read, thread) = (as_read(case), case.target()?.thread);
    case.retry.repeats = calls.take_answered(thread) == Some(read);
    match calls.take(thread, read) {
        Match::Nothing => Ok(()),
        Match::Undo(kept) => {
            match lane {
                Some(lane) => parts.callers.undo(lane, &kept),
                None => parts.callers.undo(&parts.lane.enter(), &kept),
            }
            Ok(())
        }
        Match::Same(kept) => {
            // The copies have what was read, which is no answer.
            case.write_nothing();
            case.effects.counted = Count::Executed;
            let reply = kept.reply;
            case.retry.kept = Some(kept);
            Err(reply)
        }
    }
}

/// The fingerprint of the call as it was read.
fn as_read(case: &Case<'_>) -> Fingerprint {
    Fingerprint::of(case.registers(), &case.scratch.input, &[])
}

/// The fingerprint of the call as its caller's memory has it once the call is answered.
fn as_answered(case: &Case<'_>) -> Fingerprint {
    let scratch = &*case.scratch;
    let has = |copy| case.effects.writes.has(copy);
    let bytes = if has(Copy::Struct) { &scratch.bytes[..] } else { scratch.bytes_read() };
    let params = if has(Copy::Params) { &scratch.params[..] } else { scratch.params_read() };
    Fingerprint::of(case.registers(), bytes, params)
}

/// Remembers the fingerprint of a call that the driver has done, just before its caller is told so.
pub(crate) fn remember_answer(case: &Case<'_>) {
    let target = case.target.as_ref().filter(|_| case.retry.is_begun);
    if let (Some(calls), Some(target)) = (&case.parts.callers.interrupted, target) {
        let kept = case.retry.kept.as_ref().map(|kept| kept.seen[1]);
        calls.set_answered(target.thread, kept.unwrap_or_else(|| as_answered(case)));
    }
}

/// Ends a call. Keeps what was done for a caller that didn't take the reply.
pub(crate) fn end(case: &mut Case<'_>, taken: bool, outcome: (Reply, bool)) {
    let Some(calls) = &case.parts.callers.interrupted else { return };
    if let Some(call) = (!taken).then(|| unclaimed(case, outcome)).flatten() {
        if let Some(oldest) = calls.keep(call) {
            case.parts.callers.undo(&case.parts.lane.enter(), &oldest);
        }
        case.parts.audit.wake();
    }
    if let Some(thread) = case.retry.entered {
        calls.leave(thread);
    }
}

/// What is kept of the call. `None` for one whose caller stopped waiting before the driver was asked: it is answered when
/// it makes the call again.
fn unclaimed(case: &mut Case<'_>, (reply, is_ok): (Reply, bool)) -> Option<UnclaimedCall> {
    if let Some(kept) = case.retry.kept.take() {
        return Some(kept);
    }
    let thread = case.target.as_ref()?.thread;
    if !case.retry.is_begun || reply == INTERRUPTED {
        return None;
    }
    let seen = [as_read(case), as_answered(case)];
    let output = case.effects.writes.output(case.scratch);
    let made = std::mem::take(&mut case.effects.made);
    // A file that is kept keeps its client alive, so it is kept only where objects may have to be freed by it.
    let device = case.device.take().filter(|_| !made.is_empty());
    Some(UnclaimedCall { thread, seen, output, reply, is_ok, device, made })
}
