//! Undoes what was done for callers that didn't take the reply.

use std::sync::Arc;

use crate::ledger::{Client, Entry, Handle};
use crate::monitor::caller::{Interrupted, PidMaps, Targets, UnclaimedCall};
use crate::monitor::compute::Slices;
use crate::monitor::node::{Device, Failure, Rm};
use crate::monitor::state::{ContainerState, Lane, OnLane};
use crate::process::ProcessId;
use crate::rm::call::Object;
use crate::rm::number::NV_ERR_OBJECT_NOT_FOUND;

/// The threads that call, and what was done for callers that didn't take the reply.
#[derive(Debug)]
pub(crate) struct Callers {
    state: Arc<ContainerState>,
    lane: Arc<Lane>,
    slices: Arc<Slices>,
    pub(crate) targets: Arc<Targets>,
    /// `None` where no signal interrupts a caller.
    pub(crate) interrupted: Option<Interrupted>,
    pub(crate) pid_maps: PidMaps,
}

impl Callers {
    pub(crate) fn new(
        state: Arc<ContainerState>,
        lane: Arc<Lane>,
        slices: Arc<Slices>,
        targets: Arc<Targets>,
    ) -> Self {
        Callers {
            interrupted: state.settings.interruptible.then(Interrupted::default),
            state,
            lane,
            slices,
            targets,
            pid_maps: PidMaps::default(),
        }
    }

    /// Undoes what was done for a caller that didn't take the reply.
    pub(crate) fn undo(&self, lane: &OnLane<'_>, kept: &UnclaimedCall) {
        if let Some(device) = &kept.device {
            kept.made.iter().for_each(|made| self.unmake(lane, device, *made));
        }
    }

    /// Frees an object that a call made, and that nobody is to have. An object that can't be freed
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

    /// Whether replies wait for their threads.
    pub(crate) fn has_unclaimed(&self) -> bool {
        self.interrupted.as_ref().is_some_and(|calls| !calls.is_empty())
    }

    /// Undoes calls whose threads ended before they took the reply. Does nothing where a call hangs on the lane.
    pub(crate) fn undo_unclaimed(&self) {
        let Some(calls) = self.interrupted.as_ref().filter(|calls| !calls.is_empty()) else {
            return;
        };
        let Some(lane) = self.lane.enter_for_monitor() else { return };
        while let Some(kept) = calls.take_of_ended(ProcessId::alive) {
            self.undo(&lane, &kept);
        }
    }
}
