//! Finishes calls that a former worker had received and did not live to answer.
//!
//! The journal has what outlives a worker. The log has all changes of the books. The slot of a call has the
//! notification, how far the call came ([`Stage`]), the object that the call makes or frees, and what it has reserved.
//! The next worker counts that reservation from its start ([`Books::open`](crate::monitor::state::Books::open)). The
//! thread of the slot waits until the driver has returned from the call
//! ([`take_over_slot`](crate::monitor::calls::left_calls::take_over_slot)), and finishes the call:
//!
//! | stage | the caller waits | the caller is gone |
//! |---|---|---|
//! | received: the driver wasn't asked | the call is served as a new one; it cancels the reservation before it makes its own | nothing is to be done |
//! | executing: the driver may have done the call | what the former worker may have made is freed ([`undo_left_call`]); the call is served again, and finds by `asked_before` what else may be done already | what the former worker may have made is freed ([`undo_unknown`](crate::monitor::calls::callers::Callers::undo_unknown)) |
//! | decided | the reply is sent | the caller may have the reply: nothing is undone |
//!
//! At last the reservation is cancelled. What couldn't be freed is found by the audit.
//!
//! A call with which [`MOST_CRASHES`] workers crashed may be what crashed them. It isn't served again: what they may have
//! made is freed, and the caller gets `EIO`. If that crashes a worker too, the next one only replies. A worker that was
//! killed from outside, or was ordered to end, has not crashed.

use nix::errno::Errno;

use crate::monitor::caller::{Listeners, Reply, Scratch};
use crate::monitor::calls::case::Case;
use crate::monitor::calls::parts::Parts;
use crate::monitor::calls::serve::serve;
use crate::monitor::journal::{CallObject, SLOTS, Slot, Stage, Trace};
use crate::monitor::state::OnLane;

/// After so many workers that crashed while they had a call, the call isn't served again.
const MOST_CRASHES: u32 = 2;

/// Notes that the former worker crashed, in the calls that it left.
pub(crate) fn count_crash(parts: &Parts) {
    let left = |slot: &Slot<'_>| slot.notice().id != 0 && slot.stage() != Stage::Decided;
    (0..SLOTS).map(|slot| parts.state.journal.slot(slot)).filter(left).for_each(Slot::count_crash);
}

/// Puts the calls of former workers that may have to be undone before all later calls of their threads.
pub(crate) fn queue_left_calls(parts: &Parts) {
    for slot in (0..SLOTS).map(|slot| parts.state.journal.slot(slot)) {
        let executing = slot.notice().id != 0 && slot.stage() == Stage::Executing;
        if let Some(thread) = slot.thread().filter(|_| executing) {
            parts.callers.thread_order.queue(slot.number(), thread);
        }
    }
}

/// Finishes a former worker's call in the slot. That call may be on the lane already.
pub(crate) fn recover(parts: &Parts, listeners: &Listeners, slot: Slot<'_>, scratch: &mut Scratch) {
    let lane = parts.lane.take_over(slot);
    let was_on_lane = lane.is_some();
    finish_call(parts, listeners, (slot, lane), scratch);
    parts.callers.thread_order.leave(slot.number());
    if was_on_lane {
        parts.state.books().cancel_former_reservation();
    }
}

/// Frees what a former worker may have made for the slot's call, which is about to be made anew. The program may have
/// changed the call's struct since: the slot says what was made. `lane` is the call's place on the lane, where it has
/// one: otherwise the lane is left at once, since the call's next step may wait for the program.
fn undo_left_call(parts: &Parts, slot: Slot<'_>, lane: Option<&OnLane<'_>>) {
    let Some(trace) = slot.trace().filter(Trace::may_have_made) else { return };
    match lane {
        Some(lane) => parts.callers.undo_trace(lane, &trace),
        None => parts.callers.undo_trace(&parts.lane.enter(slot), &trace),
    }
    // The next worker has nothing to undo. It knows that a worker before may have asked for more than it noted.
    slot.set_executing(CallObject::default());
}

/// Logs that a left call is answered with an error.
fn log_refused(parts: &Parts, slot: Slot<'_>, crashes: u32) {
    if parts.state.log.limit.take_line() {
        let (request, pid) = (slot.registers().0 & 0xffff_ffff, slot.notice().pid);
        tracing::error!(
            pid,
            request = format_args!("{request:#x}"),
            "a driver call is refused with EIO: the monitor crashed {crashes} times while it served \
             the call; report it"
        );
    }
}

fn finish_call(
    parts: &Parts,
    listeners: &Listeners,
    (slot, lane): (Slot<'_>, Option<OnLane<'_>>),
    scratch: &mut Scratch,
) {
    let notice = slot.notice();
    let Some(listener) = listeners.get(slot.listener()) else { return };
    if notice.id == 0 {
        return;
    }
    let waits = listener.is_valid(notice.id);
    let crashes = slot.crashes();
    match slot.stage() {
        Stage::Decided => {
            let _ = listener.send(notice.id, slot.decision());
        }
        stage @ (Stage::Received | Stage::Executing) if crashes >= MOST_CRASHES => {
            if stage == Stage::Executing && crashes == MOST_CRASHES {
                undo_left_call(parts, slot, lane.as_ref());
            }
            log_refused(parts, slot, crashes);
            let _ = listener.send(notice.id, Reply::from(Errno::EIO).parts());
        }
        stage @ (Stage::Received | Stage::Executing) if waits => {
            let asked_before = stage == Stage::Executing;
            if asked_before {
                undo_left_call(parts, slot, lane.as_ref());
            }
            let mut case = Case::new(parts, scratch, slot, &listener, notice, asked_before);
            case.lane = lane;
            serve(&mut case);
        }
        Stage::Executing => {
            let lane = lane.unwrap_or_else(|| parts.lane.enter(slot));
            parts.callers.undo_unknown(&lane, slot);
        }
        Stage::Received => {}
    }
    slot.clear(0);
}
