//! What is done for calls whose callers a signal interrupts. It is entered only if the kernel lets signals do that
//! ([`Interrupted`]).
//!
//! A call that was done already, and whose reply was lost, is made once more. If the driver answers that it was done
//! already, the caller gets the reply of a call that succeeded. The state has the result of the first time, and the
//! driver's answer is believed the second time: any program can make a call twice.

use super::{Case, EarlyReply, INTERRUPTED, unmake_object};
use crate::caller::{Copy, Fingerprint, Interrupted, Match, Reply, UnclaimedCall};
use crate::shared::Monitor;
use crate::snapshot::Count;
use crate::state::UnderRmLock;
use cgpu_host::process::ProcessId;

/// What is known of a call whose caller may be interrupted, and may make the call again.
#[derive(Debug, Default)]
pub(crate) struct Retry {
    /// The thread whose later calls wait for this one.
    pub(crate) entered: Option<ProcessId>,
    /// Whether the thread makes its last call again, and the struct that was read has the answer to the last call:
    /// the thread may not have received that reply.
    pub(crate) repeats: bool,
    /// The call that was made in place of this one, and whose reply the caller is given.
    pub(crate) retained: Option<UnclaimedCall>,
}

/// Waits for the earlier call of the same thread.
pub(super) fn wait_for_earlier_call(
    case: &mut Case<'_>,
    calls: &Interrupted,
) -> Result<(), EarlyReply> {
    if case.retry.entered.is_none() {
        let thread = case.target()?.thread;
        if !calls.enter(thread, || case.is_valid()) {
            return Err(INTERRUPTED);
        }
        case.retry.entered = Some(thread);
    }
    Ok(())
}

/// Ends the call with the reply that is retained for it, if it was made already. Undoes another call of the thread
/// whose reply the thread didn't take.
pub(super) fn take_retained_reply(
    case: &mut Case<'_>,
    calls: &Interrupted,
    rm_lock: Option<&UnderRmLock<'_>>,
) -> Result<(), EarlyReply> {
    let monitor = case.monitor;
    let (read, thread) = (as_read(case), case.target()?.thread);
    case.retry.repeats = calls.take_answered(thread) == Some(read);
    match calls.take(thread, read) {
        Match::Nothing => Ok(()),
        Match::Undo(retained) => {
            match rm_lock {
                Some(rm_lock) => undo(monitor, rm_lock, &retained),
                None => undo(monitor, &monitor.rm_lock.enter(), &retained),
            }
            Ok(())
        }
        Match::Same(retained) => {
            // The copies have what was read, which is no answer.
            case.write_nothing();
            case.effects.counted = Count::Executed;
            let reply = retained.reply;
            case.retry.retained = Some(retained);
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

/// Remembers the fingerprint of a call that the driver has done, just before its caller gets the reply.
pub(crate) fn remember_answer(case: &Case<'_>, calls: &Interrupted) {
    let target = case.target.as_ref().filter(|_| case.is_begun);
    if let Some(target) = target {
        let retained = case.retry.retained.as_ref().map(|retained| retained.seen[1]);
        calls.set_answered(target.thread, retained.unwrap_or_else(|| as_answered(case)));
    }
}

/// Ends a call. Retains what was done for a caller that didn't take the reply.
pub(crate) fn keep_if_unclaimed(
    case: &mut Case<'_>,
    calls: &Interrupted,
    taken: bool,
    outcome: (Reply, bool),
) {
    if let Some(call) = (!taken).then(|| unclaimed(case, outcome)).flatten() {
        if let Some(oldest) = calls.keep(call) {
            undo(case.monitor, &case.monitor.rm_lock.enter(), &oldest);
        }
        case.monitor.audit_wait.wake();
    }
    if let Some(thread) = case.retry.entered {
        calls.leave(thread);
    }
}

/// What is retained of the call. `None` for one whose caller stopped waiting before the driver was asked: it is
/// answered when it makes the call again.
fn unclaimed(case: &mut Case<'_>, (reply, is_ok): (Reply, bool)) -> Option<UnclaimedCall> {
    if let Some(retained) = case.retry.retained.take() {
        return Some(retained);
    }
    let thread = case.target.as_ref()?.thread;
    if !case.is_begun || reply == INTERRUPTED {
        return None;
    }
    let seen = [as_read(case), as_answered(case)];
    let output = case.effects.writes.output(case.scratch);
    let made = std::mem::take(&mut case.effects.made);
    // A retained file keeps its client alive, so it is retained only if objects may have to be freed by it.
    let device = case.device.take().filter(|_| !made.is_empty());
    Some(UnclaimedCall { thread, seen, output, reply, is_ok, device, made })
}

/// Undoes what was done for a caller that didn't take the reply.
pub(crate) fn undo(monitor: &Monitor, rm_lock: &UnderRmLock<'_>, retained: &UnclaimedCall) {
    if let Some(device) = &retained.device {
        retained.made.iter().for_each(|made| unmake_object(monitor, rm_lock, device, *made));
    }
}

/// Whether replies wait for their threads.
pub(crate) fn has_unclaimed(monitor: &Monitor) -> bool {
    monitor.interrupted.as_ref().is_some_and(|calls| !calls.is_empty())
}

/// Undoes calls whose threads ended before they took the reply. Does nothing if a call that holds the RM lock hangs.
pub(crate) fn undo_unclaimed(monitor: &Monitor) {
    let Some(calls) = monitor.interrupted.as_ref().filter(|calls| !calls.is_empty()) else {
        return;
    };
    let Some(rm_lock) = monitor.rm_lock.enter_for_monitor() else { return };
    while let Some(retained) = calls.take_of_ended(ProcessId::alive) {
        undo(monitor, &rm_lock, &retained);
    }
}
