//! Calls that a worker before had received and didn't live to answer.
//!
//! Such a call may still be in the driver, which no signal ends. It's neither made again nor
//! undone before that is over: what comes of it is known only then.

use std::time::Duration;

use crate::monitor::caller::recv_wait;
use crate::monitor::journal::layout::Stage;
use crate::monitor::journal::map::Slot;
use crate::process::ProcessId;

/// How often is looked whether a thread of a worker before is gone: soon, then less often.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LAST_LOOK: Duration = Duration::from_millis(100);

/// Whether the slot's call is still in the driver, made by a thread of a worker before: that
/// was killed, and comes back to none of its own code, but the driver may do what it asked.
pub(crate) fn is_haunted(slot: Slot<'_>) -> bool {
    slot.worker_thread().is_some_and(ProcessId::alive)
}

/// Whether a slot's call of a worker before is still to be made, or in the driver.
pub(crate) fn is_left(slot: Slot<'_>) -> bool {
    slot.notice().id != 0 && slot.stage() != Stage::Decided || is_haunted(slot)
}

/// Waits until the driver has let go of a slot's call, and takes the slot for this thread.
/// Its caller waits as long, and what it set aside counts.
pub(crate) fn move_in(slot: Slot<'_>) {
    let mut pause = FIRST_LOOK;
    while is_haunted(slot) {
        std::thread::sleep(pause);
        pause = LAST_LOOK.min(pause * 2);
    }
    if let Some(thread) = ProcessId::of(recv_wait::this_thread().as_raw()) {
        slot.set_worker_thread(thread);
    }
}

#[cfg(test)]
mod tests {
    use nix::libc::seccomp_notif;

    use super::*;
    use crate::monitor::journal::call_id::CallObject;
    use crate::monitor::journal::map::JournalMap;
    use crate::monitor::journal::map::tests::journal;

    #[test]
    fn a_call_is_left_until_it_is_decided_or_as_long_as_the_driver_has_its_thread() {
        let memory = JournalMap::map(&journal()).unwrap();
        let slot = memory.slot(2);
        assert!(!is_left(slot));
        // A slot without a call has the id 0.
        slot.receive_of_model(1, seccomp_notif { id: 9, ..slot.notice() });
        assert!(is_left(slot), "it was received");
        slot.set_executing(CallObject::one(1, 2, false));
        assert!(is_left(slot), "the driver was asked");
        slot.set_decided((0, 0));
        assert!(!is_left(slot), "it is to be sent alone");
        // This thread lives, as one does that hangs in the driver.
        let thread = ProcessId::of(recv_wait::this_thread().as_raw()).unwrap();
        slot.set_worker_thread(thread);
        assert!(is_left(slot) && is_haunted(slot));
        slot.set_worker_thread(ProcessId { start_ticks: thread.start_ticks + 1, ..thread });
        assert!(!is_haunted(slot), "another thread has its number");
        move_in(slot);
        assert_eq!(slot.worker_thread(), Some(thread));
    }
}
