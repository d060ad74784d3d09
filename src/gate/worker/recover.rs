//! Calls that a worker before had received and didn't live to answer, and undoing what
//! was done for callers that didn't take it.
//!
//! Such a call may still be in the driver, which no signal ends. It's neither made again nor
//! undone before that is over: what comes of it is known only then.

use std::sync::Arc;
use std::time::Duration;

use super::books::Books;
use super::desk::Desk;
use super::device::{Device, Failure, Rm};
use super::memory::Slot;
use super::own::Presence;
use super::serve::{Case, Made};
use super::stash::{Doubtful, Outcome};
use super::{Shared, serve, waiting};
use crate::gate::journal::{SLOTS, Stage};
use crate::gate::syscall::{self, Syscall};
use crate::ledger::{Client, Entry, Handle};
use crate::process::ProcessId;
use crate::rm::number::NV_ERR_OBJECT_NOT_FOUND;

/// How often is looked whether a thread of a worker before is gone: soon, then less often.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LAST_LOOK: Duration = Duration::from_millis(100);

impl Shared {
    /// Whether the slot's call is still in the driver, made by a thread of a worker before: that
    /// was killed, and comes back to none of its own code, but the driver may do what it asked.
    pub(super) fn is_haunted(slot: Slot<'_>) -> bool {
        slot.occupant().is_some_and(ProcessId::alive)
    }

    /// Waits until the driver has let go of a slot's call, and takes the slot for this thread.
    /// Its caller waits as long, and what it set aside counts.
    pub(super) fn move_in(slot: Slot<'_>) {
        let mut pause = FIRST_LOOK;
        while Self::is_haunted(slot) {
            std::thread::sleep(pause);
            pause = LAST_LOOK.min(pause * 2);
        }
        if let Some(thread) = ProcessId::of(waiting::this_thread().as_raw()) {
            slot.occupy(thread);
        }
    }

    /// What is left to be undone comes before all that its threads ask for by now.
    pub(super) fn queue_what_is_left(&self) {
        for slot in (0..SLOTS).map(|slot| self.memory.slot(slot)) {
            let executing = slot.notice().id != 0 && slot.stage() == Stage::Executing;
            if let Some(thread) = slot.thread().filter(|_| executing) {
                self.turns.queue(slot.number(), thread);
            }
        }
    }

    /// Finishes what is left in a slot.
    pub(super) fn recover(&self, slot: Slot<'_>, desk: &mut Desk) {
        self.finish_call(slot, desk);
        self.turns.leave(slot.number());
        self.books().disinherit(slot);
    }

    fn finish_call(&self, slot: Slot<'_>, desk: &mut Desk) {
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

    /// A call made nothing that could be undone: it may have freed what was there, or exported it.
    /// If its thread makes it again, it is the same.
    fn doubt(&self, slot: Slot<'_>) {
        let (client, (handle, was_there)) = (slot.client(), slot.executed());
        if handle != 0
            && let Some(own) = self.auditor.own(self)
            && own.can_tell(&self.release)
            && own.presence(&self.release, client, handle) != Presence::There
        {
            let handle = Handle(handle);
            self.books().enter(Entry::Free { client: Client(client), handle });
        }
        if let Some(thread) = slot.thread() {
            let (asked, object) = (serve::asked(&slot.notice()), (client, handle));
            self.stash.doubt(Doubtful { thread, asked, object, was_there });
        }
    }

    /// Frees what a call may have made whose caller doesn't wait any more.
    fn undo_unknown(&self, slot: Slot<'_>) {
        let notice = slot.notice();
        let (handle, was_there) = slot.executed();
        let data = notice.data;
        let Some(Syscall::Ioctl { descriptor, .. }) = syscall::of(data.arch, data.nr, &data.args)
        else {
            return;
        };
        if was_there || handle == 0 {
            self.doubt(slot);
            return;
        }
        let Ok((target, file)) = self.targets.duplicate(notice.pid.cast_signed(), descriptor)
        else {
            return;
        };
        // The number may be a stranger's by now, and its descriptor's file and client his.
        if slot.thread() != Some(target.thread) {
            return;
        }
        let Ok(device) = Device::of(&self.settings.nodes, file) else { return };
        let client = slot.client();
        self.unmake(&device, Made { client, parent: client, handle });
    }
}

impl Shared {
    /// The next worker isn't to undo it.
    pub(super) fn unmark(&self, outcome: &Outcome) {
        let (slot, id) = outcome.mark;
        self.memory.slot(slot).forget(id);
    }

    /// Undoes what was done for a caller that didn't take it.
    pub(super) fn undo(&self, outcome: Outcome) {
        self.unmark(&outcome);
        let Some(device) = outcome.device else { return };
        for made in outcome.made {
            self.unmake(&device, made);
        }
    }

    /// Frees an object that a call made, or may have made, and that nobody is to have. What
    /// can't be freed counts on.
    pub(super) fn unmake(&self, device: &Device, made: Made) {
        let Made { client, parent, handle } = made;
        let (of, object) = (Client(client), Handle(handle));
        let charge = |books: &Books| {
            books.ledger.contains(of, object).then(|| books.ledger.charge_of(of, object))
        };
        let before = charge(&self.books());
        self.begin_free();
        let freed = Rm { release: &self.release, device }.free(client, parent, handle);
        let is_gone = matches!(freed, Ok(()) | Err(Failure::Status(NV_ERR_OBJECT_NOT_FOUND)));
        let mut books = self.books();
        books.end_free();
        let after = charge(&books);
        // Another thread may have made an object of the same handle since.
        if is_gone && after.is_some() && after == before {
            books.enter(Entry::Free { client: of, handle: object });
        }
    }
}
