//! Calls that a worker before had received and didn't live to answer, and undoing what
//! was done for callers that didn't take it.
//!
//! Such a call may still be in the driver, which no signal ends. It's neither made again nor
//! undone before that is over: what comes of it is known only then.

use std::time::Duration;

use crate::ledger::{Client, Entry, Handle, Process};
use crate::monitor::caller::call_id::Trace;
use crate::monitor::caller::recv_wait;
use crate::monitor::caller::scratch::Scratch;
use crate::monitor::caller::target::process_id;
use crate::monitor::caller::unclaimed::Kept;
use crate::monitor::calls::lane::OnLane;
use crate::monitor::calls::serve::Case;
use crate::monitor::driver::device::{Device, Failure, Rm};
use crate::monitor::driver::monitor_client::Presence;
use crate::monitor::state::journal::{SLOTS, Stage};
use crate::monitor::state::journal_map::Slot;
use crate::monitor::worker::Shared;
use crate::process::ProcessId;
use crate::rm::call::Object;
use crate::rm::number::NV_ERR_OBJECT_NOT_FOUND;

/// How often is looked whether a thread of a worker before is gone: soon, then less often.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LAST_LOOK: Duration = Duration::from_millis(100);

impl Shared {
    /// Whether the slot's call is still in the driver, made by a thread of a worker before: that
    /// was killed, and comes back to none of its own code, but the driver may do what it asked.
    pub(crate) fn is_haunted(slot: Slot<'_>) -> bool {
        slot.occupant().is_some_and(ProcessId::alive)
    }

    /// Whether a slot's call of a worker before is still to be made, or in the driver.
    pub(crate) fn is_left(slot: Slot<'_>) -> bool {
        slot.notice().id != 0 && slot.stage() != Stage::Decided || Self::is_haunted(slot)
    }

    /// Waits until the driver has let go of a slot's call, and takes the slot for this thread.
    /// Its caller waits as long, and what it set aside counts.
    pub(crate) fn move_in(slot: Slot<'_>) {
        let mut pause = FIRST_LOOK;
        while Self::is_haunted(slot) {
            std::thread::sleep(pause);
            pause = LAST_LOOK.min(pause * 2);
        }
        if let Some(thread) = ProcessId::of(recv_wait::this_thread().as_raw()) {
            slot.occupy(thread);
        }
    }

    /// What is left to be undone comes before all that its threads ask for by now.
    pub(crate) fn queue_what_is_left(&self) {
        for slot in (0..SLOTS).map(|slot| self.journal.slot(slot)) {
            let executing = slot.notice().id != 0 && slot.stage() == Stage::Executing;
            if let Some(thread) = slot.thread().filter(|_| executing) {
                self.thread_order.queue(slot.number(), thread);
            }
        }
    }

    /// Finishes what is left in a slot, whose call may be on the lane already.
    pub(crate) fn recover(&self, slot: Slot<'_>, scratch: &mut Scratch) {
        let lane = self.lane.take_over(slot);
        let was_on_lane = lane.is_some();
        self.finish_call(slot, lane, scratch);
        self.thread_order.leave(slot.number());
        if was_on_lane {
            self.books().disinherit();
        }
    }

    fn finish_call(&self, slot: Slot<'_>, lane: Option<OnLane<'_>>, scratch: &mut Scratch) {
        let notice = slot.notice();
        let Some(listener) = self.listener(slot.listener()) else { return };
        if notice.id == 0 {
            return;
        }
        let waits = listener.is_valid(notice.id);
        match slot.stage() {
            Stage::Decided => {
                let _ = listener.send(notice.id, slot.decision());
            }
            stage @ (Stage::Received | Stage::Executing) if waits => {
                let again = stage == Stage::Executing;
                let mut case = Case::new(self, scratch, slot, &listener, notice, again);
                case.lane = lane;
                case.serve();
            }
            // Interrupted or dead, and maybe it was made: if the thread is there, it's undone.
            Stage::Executing => {
                let lane = lane.unwrap_or_else(|| self.lane.enter(slot));
                self.undo_unknown(&lane, slot);
            }
            Stage::Received => {}
        }
        slot.clear(0);
    }

    /// Undoes what a call may have made whose caller doesn't wait any more. One that made nothing
    /// which could be undone may have freed what was there, or exported it: if its thread makes
    /// it again, it is the same.
    fn undo_unknown(&self, lane: &OnLane<'_>, slot: Slot<'_>) {
        let Some(thread) = slot.thread() else { return };
        let (words, object) = (slot.words(), slot.making());
        let trace = Trace { thread, process: Process(0), words, object };
        if self.unclaimed.has(&trace) {
            // The worker before had come to keep it.
        } else if trace.may_have_made() {
            self.undo_trace(lane, &trace);
        } else {
            self.forget_if_gone(trace.object.client, trace.object.handle);
            if let Some(oldest) = self.unclaimed.keep(trace, None) {
                self.undo(lane, &oldest);
            }
        }
    }

    /// What the driver doesn't have any more, a call may have freed.
    fn forget_if_gone(&self, of: u32, object: u32) {
        if object != 0
            && object != of
            && let Some(own) = self.own_client()
            && own.can_tell(&self.release)
            && own.presence(&self.release, of, object) != Presence::There
        {
            self.books().enter(Entry::Free { client: Client(of), handle: Handle(object) });
        }
    }

    /// Frees what a call may have made.
    fn undo_trace(&self, lane: &OnLane<'_>, trace: &Trace) {
        let first = process_id(trace.process);
        // Descriptors are the process's, though the thread be gone; and the numbers may be a
        // stranger's by now, and its descriptor's file and client his.
        let file = [trace.thread, first].into_iter().find_map(|thread| {
            let (target, file) = self.targets.duplicate(thread.pid, trace.descriptor()).ok()?;
            (target.thread == thread).then_some(file)
        });
        let device = file.and_then(|file| Device::of(&self.settings.nodes, file).ok());
        if let Some(device) = device {
            let client = trace.object.client;
            for handle in trace.object.handles() {
                self.unmake(lane, &device, Object { client, parent: client, handle });
            }
        }
    }
}

impl Shared {
    /// Undoes what was done for a caller that didn't take it.
    ///
    /// Until that is done, the next worker would undo it, too: what is freed twice is gone, and
    /// handles that we choose are never used again.
    pub(crate) fn undo(&self, lane: &OnLane<'_>, kept: &Kept) {
        match &kept.outcome {
            Some(outcome) => {
                if let Some(device) = &outcome.device {
                    outcome.made.iter().for_each(|made| self.unmake(lane, device, *made));
                }
            }
            None if kept.trace.may_have_made() => self.undo_trace(lane, &kept.trace),
            None => {}
        }
        self.unclaimed.settle(kept);
    }

    /// Frees an object that a call made, or may have made, and that nobody is to have. What
    /// can't be freed counts on.
    pub(crate) fn unmake(&self, _: &OnLane<'_>, device: &Device, made: Object) {
        let Object { client, parent, handle } = made;
        let freed = Rm { release: &self.release, device }.free(client, parent, handle);
        if let Ok(()) | Err(Failure::Status(NV_ERR_OBJECT_NOT_FOUND)) = freed {
            self.books().enter(Entry::Free { client: Client(client), handle: Handle(handle) });
        }
    }
}
