//! Callers whose wait a signal ends, and that make their call again.
//!
//! Before Linux 5.19 any signal ends a caller's wait, and the kernel makes the call again. What was
//! done for such a caller is kept until its thread calls again ([`unclaimed`](crate::monitor::caller::Unclaimed)).
//!
//! A reply that was sent may be lost, too: the kernel looks for signals before it looks for the reply
//! (`seccomp_do_user_notification`, `wait_for_completion_interruptible` and then the lock). Of 5,000
//! signals that come in the middle of a call, about one does that. The caller then makes the call
//! again, with the answer in its memory. The monitor makes such a call once more. Where the driver says that the call
//! was done already, the caller is told that it is done. The books have the result of the first time, and believe
//! the driver the second time: any program can make a call twice.

use super::{Case, EarlyReply, INTERRUPTED};
use crate::monitor::caller::{Copy, Fingerprint, Match, Reply, Target, UnclaimedCall};
use crate::monitor::snapshot::Count;
use crate::monitor::state::OnLane;
use crate::process::ProcessId;

/// What is known of a call whose caller may be interrupted, and may make the call again.
#[derive(Debug, Default)]
pub(crate) struct Retry {
    /// Whether the call must not be done twice: where nobody takes its reply, the reply is kept.
    pub(crate) is_begun: bool,
    /// Whether the call is in its thread's queue, where later calls of the thread wait for it.
    pub(crate) is_queued: bool,
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

/// Waits for the earlier calls of the same thread, where signals interrupt calls: otherwise a thread that has left a
/// call to the monitor is dead, and makes no other call.
///
/// A call joins its thread's queue before it asks whether its caller still waits. So a later call waits
/// for an earlier one, or the earlier one finds that its caller is gone.
pub(crate) fn wait_for_turn(case: &mut Case<'_>) -> Result<(), EarlyReply> {
    let Target { thread, .. } = *case.target()?;
    if !case.parts.state.settings.interruptible {
        return case.still_waits();
    }
    let (turns, server) = (&case.parts.callers.thread_order, case.server);
    turns.queue(server, thread);
    case.retry.is_queued = true;
    case.still_waits()?;
    if !turns.wait(server, thread, || case.is_valid()) {
        return Err(INTERRUPTED);
    }
    Ok(())
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
    if !parts.state.settings.interruptible && parts.callers.unclaimed.is_empty() {
        return Ok(());
    }
    let read = as_read(case);
    let target = case.target()?;
    let thread = target.thread;
    case.retry.repeats = target.take_answered() == Some(read);
    match parts.callers.unclaimed.take(thread, read) {
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
    if let Some(target) = case.target.as_ref().filter(|_| case.retry.is_begun) {
        let kept = case.retry.kept.as_ref().map(|kept| kept.seen[1]);
        target.set_answered(kept.unwrap_or_else(|| as_answered(case)));
    }
}

/// Keeps what was done for a caller that didn't take the reply.
pub(crate) fn keep(case: &mut Case<'_>, (reply, is_ok): (Reply, bool)) {
    let call = match case.retry.kept.take() {
        Some(kept) => kept,
        // A caller that stopped waiting before the driver was asked is answered when it makes the call again.
        None if !case.retry.is_begun || reply == INTERRUPTED => return,
        None => {
            let Some(thread) = case.target.as_ref().map(|target| target.thread) else { return };
            unclaimed(case, thread, (reply, is_ok))
        }
    };
    if let Some(oldest) = case.parts.callers.unclaimed.keep(call) {
        case.parts.callers.undo(&case.parts.lane.enter(), &oldest);
    }
    case.parts.audit.wake();
}

fn unclaimed(
    case: &mut Case<'_>,
    thread: ProcessId,
    (reply, is_ok): (Reply, bool),
) -> UnclaimedCall {
    let seen = [as_read(case), as_answered(case)];
    let output = case.effects.writes.output(case.scratch);
    let made = std::mem::take(&mut case.effects.made);
    // A file that is kept keeps its client alive, so it is kept only where objects may have to be freed by it.
    let device = case.device.take().filter(|_| !made.is_empty());
    UnclaimedCall { thread, seen, output, reply, is_ok, device, made }
}
