//! Undoes what was done for callers that didn't take the reply: by this worker, or by a worker before that had received
//! the call and ended before it answered.

use std::sync::Arc;

use crate::ledger::{Client, Entry, Handle};
use crate::monitor::caller::{PidMaps, Targets, ThreadOrder, Unclaimed, UnclaimedCall};
use crate::monitor::compute::Slices;
use crate::monitor::driver::{DriverAccess, Presence};
use crate::monitor::journal::{CallObject, Slot, Trace};
use crate::monitor::node::{Device, Failure, Rm};
use crate::monitor::state::{ContainerState, Lane, OnLane};
use crate::process::ProcessId;
use crate::rm::call::Object;
use crate::rm::number::NV_ERR_OBJECT_NOT_FOUND;

/// The threads that call, and what was done for callers that didn't take the reply.
#[derive(Debug)]
pub(crate) struct Callers {
    state: Arc<ContainerState>,
    driver: Arc<DriverAccess>,
    lane: Arc<Lane>,
    slices: Arc<Slices>,
    pub(crate) targets: Arc<Targets>,
    pub(crate) unclaimed: Unclaimed,
    pub(crate) thread_order: ThreadOrder,
    pub(crate) pid_maps: PidMaps,
}

impl Callers {
    pub(crate) fn new(
        state: Arc<ContainerState>,
        driver: Arc<DriverAccess>,
        lane: Arc<Lane>,
        slices: Arc<Slices>,
        targets: Arc<Targets>,
    ) -> Self {
        let unclaimed = Unclaimed::open(state.journal);
        let (thread_order, pid_maps) = (ThreadOrder::default(), PidMaps::default());
        Callers { state, driver, lane, slices, targets, unclaimed, thread_order, pid_maps }
    }

    /// Undoes what a worker before may have made for the slot's call, whose caller doesn't wait any more. A call that
    /// made no object may have freed one, or exported one: such a call is kept, to be recognized if its thread makes
    /// it again.
    pub(crate) fn undo_unknown(&self, lane: &OnLane<'_>, slot: Slot<'_>) {
        // Without an object, what the call may have made is undone already.
        let is_left = |trace: &Trace| trace.object != CallObject::default();
        let Some(trace) = slot.trace().filter(is_left) else { return };
        if self.unclaimed.has(&trace) {
            // The worker before has kept the call already.
        } else if trace.may_have_made() {
            self.undo_trace(lane, &trace);
        } else {
            self.forget_if_gone(trace.object.client, trace.object.handle);
            if let Some(oldest) = self.unclaimed.keep(trace, None) {
                self.undo(lane, &oldest);
            }
        }
    }

    /// Takes an object out of the books that the driver doesn't have any more: a call may have freed it.
    fn forget_if_gone(&self, client: u32, handle: u32) {
        if handle != 0
            && handle != client
            && self.driver.presence(client, handle).is_some_and(|found| found != Presence::There)
        {
            let freed = Entry::Free { client: Client(client), handle: Handle(handle) };
            self.state.books().enter(freed);
        }
    }

    /// Frees the objects that a call may have made.
    pub(crate) fn undo_trace(&self, lane: &OnLane<'_>, trace: &Trace) {
        let first_process = ProcessId::from(trace.process);
        // Where the thread has ended, its process still has the descriptor. Another process may have the tid or the pid
        // by now: the descriptor would then name that process's file and client.
        let file = [trace.thread, first_process].into_iter().find_map(|thread| {
            let (target, file) = self.targets.duplicate(thread.pid, trace.descriptor()).ok()?;
            (target.thread == thread).then_some(file)
        });
        let device = file.and_then(|file| Device::of(&self.state.settings.nodes, file));
        if let Some(device) = device {
            let client = trace.object.client;
            for handle in trace.object.handles() {
                self.unmake(lane, &device, Object { client, parent: client, handle });
            }
        }
    }

    /// Undoes what was done for a caller that didn't take the reply.
    ///
    /// Until the trace is forgotten, the next worker would undo the call, too. An object that is freed twice is gone,
    /// and handles that the monitor chooses are never used again.
    pub(crate) fn undo(&self, lane: &OnLane<'_>, kept: &UnclaimedCall) {
        match &kept.outcome {
            Some(outcome) => {
                if let Some(device) = &outcome.device {
                    outcome.made.iter().for_each(|made| self.unmake(lane, device, *made));
                }
            }
            None if kept.trace.may_have_made() => self.undo_trace(lane, &kept.trace),
            None => {}
        }
        self.unclaimed.forget_trace(kept);
    }

    /// Frees an object that a call made, or may have made, and that nobody is to have. An object that can't be freed
    /// stays charged.
    pub(crate) fn unmake(&self, _: &OnLane<'_>, device: &Device, made: Object) {
        let Object { client, parent, handle } = made;
        let freed = Rm { release: &self.state.release, device }.free(client, parent, handle);
        if let Ok(()) | Err(Failure::Status(NV_ERR_OBJECT_NOT_FOUND)) = freed {
            self.state
                .books()
                .enter(Entry::Free { client: Client(client), handle: Handle(handle) });
            self.slices.forget_freed(client, handle);
        }
    }

    /// Undoes calls whose threads ended before they took the reply. Does nothing where a call hangs on the lane.
    pub(crate) fn undo_unclaimed(&self) {
        if self.unclaimed.is_empty() {
            return;
        }
        let Some(lane) = self.lane.enter_for_monitor() else { return };
        while let Some(kept) = self.unclaimed.take_of_ended(ProcessId::alive) {
            self.undo(&lane, &kept);
        }
    }
}
