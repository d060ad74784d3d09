//! Calls that a former worker had received and did not live to answer.
//!
//! Such a call may still be in the driver, where no signal ends it. It is neither made again nor undone before the
//! driver has returned from it: only then its result is known.

use std::time::Duration;

use nix::unistd::gettid;

use crate::monitor::journal::{Slot, Stage};
use crate::process::ProcessId;

/// The first and the longest pause between two looks whether a thread of a former worker is gone.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LAST_LOOK: Duration = Duration::from_millis(100);

/// Whether the slot's call is still in the driver, made by a thread of a former worker. That thread was killed and
/// runs no code of the worker's any more, but the driver may still do what the thread asked for.
pub(crate) fn is_in_driver(slot: Slot<'_>) -> bool {
    slot.worker_thread().is_some_and(ProcessId::alive)
}

/// Whether the slot has a former worker's call that is still to be decided, or is in the driver.
pub(crate) fn is_left(slot: Slot<'_>) -> bool {
    slot.notice().id != 0 && slot.stage() != Stage::Decided || is_in_driver(slot)
}

/// Waits until the slot's call of a former worker is out of the driver, and takes the slot for this thread. Until then
/// the call's caller waits, and what the call has reserved counts.
pub(crate) fn take_over_slot(slot: Slot<'_>) {
    let mut pause = FIRST_LOOK;
    while is_in_driver(slot) {
        std::thread::sleep(pause);
        pause = LAST_LOOK.min(pause * 2);
    }
    if let Some(thread) = ProcessId::of(gettid().as_raw()) {
        slot.set_worker_thread(thread);
    }
}

#[cfg(test)]
mod tests {
    use nix::libc::seccomp_notif;

    use super::*;
    use crate::monitor::journal::{CallObject, JournalMap, new_journal};

    #[test]
    fn a_call_is_left_until_it_is_decided_or_as_long_as_the_driver_has_its_thread() {
        let memory = JournalMap::map(&new_journal()).unwrap();
        let slot = memory.slot(2);
        assert!(!is_left(slot));
        // A slot without a call has the id 0.
        slot.receive_of_model(1, seccomp_notif { id: 9, ..slot.notice() });
        assert!(is_left(slot), "it was received");
        slot.set_executing(CallObject::one(1, 2, false));
        assert!(is_left(slot), "the driver was asked");
        slot.set_decided((0, 0));
        assert!(!is_left(slot), "it is to be sent alone");
        // This thread lives, as a thread does that hangs in the driver.
        let thread = ProcessId::of(gettid().as_raw()).unwrap();
        slot.set_worker_thread(thread);
        assert!(is_left(slot) && is_in_driver(slot));
        slot.set_worker_thread(ProcessId { start_ticks: thread.start_ticks + 1, ..thread });
        assert!(!is_in_driver(slot), "another thread has its number");
        take_over_slot(slot);
        assert_eq!(slot.worker_thread(), Some(thread));
    }
}
