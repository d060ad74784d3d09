//! Calls that a worker before had received and didn't live to answer.

use std::sync::Arc;

use super::Shared;
use super::device::Device;
use super::memory::Slot;
use super::serve::{Case, Desk};
use crate::gate::journal::Stage;
use crate::gate::syscall::{self, Syscall};
use crate::rm::{self, Call, Command};

impl Shared {
    /// Finishes what is left in a slot.
    pub(super) fn recover(&self, slot: Slot<'_>, desk: &mut Desk) {
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
            Stage::Received if waits => {
                Case::new(self, desk, slot, &Arc::clone(&listener), notice, false).serve();
            }
            Stage::Executing if waits => {
                Case::new(self, desk, slot, &Arc::clone(&listener), notice, true).serve();
            }
            // Interrupted or dead, and maybe it was made: if the thread is there, it's undone.
            Stage::Executing => self.undo_unknown(slot),
            Stage::Received => {}
        }
        slot.clear(0);
    }

    /// Frees what a call may have made whose caller doesn't wait any more.
    fn undo_unknown(&self, slot: Slot<'_>) {
        let notice = slot.notice();
        let (handle, was_there) = slot.executed();
        let data = notice.data;
        let Some(Syscall::Ioctl { descriptor, request, argument }) =
            syscall::of(data.arch, data.nr, &data.args)
        else {
            return;
        };
        if was_there || handle == 0 {
            return;
        }
        let Ok((target, file)) = self.targets.duplicate(notice.pid.cast_signed(), descriptor)
        else {
            return;
        };
        let Ok(device) = Device::of(&self.settings.nodes, file) else { return };
        let command = Command::of_ioctl(request);
        let mut bytes = vec![0; command.size()];
        if target.read(argument, &mut bytes).is_err() {
            return;
        }
        let client = match rm::decode(&self.release, command, &bytes).map(|decoded| decoded.call) {
            Ok(Call::Alloc(alloc)) => alloc.object.client,
            Ok(Call::Dup { object, .. }) => object.client,
            Ok(Call::VidHeap { client, .. }) => client,
            _ => return,
        };
        self.unmake(&device, client, handle);
    }
}
