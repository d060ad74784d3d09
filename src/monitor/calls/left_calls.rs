//! Calls that a worker before had received and didn't live to answer.
//!
//! Such a call may still be in the driver, which no signal ends. It's neither made again nor
//! undone before that is over: what comes of it is known only then.

use std::time::Duration;

use crate::monitor::caller::recv_wait;
use crate::monitor::state::journal::Stage;
use crate::monitor::state::journal_map::Slot;
use crate::process::ProcessId;

/// How often is looked whether a thread of a worker before is gone: soon, then less often.
const FIRST_LOOK: Duration = Duration::from_millis(1);
const LAST_LOOK: Duration = Duration::from_millis(100);

/// Whether the slot's call is still in the driver, made by a thread of a worker before: that
/// was killed, and comes back to none of its own code, but the driver may do what it asked.
pub(crate) fn is_haunted(slot: Slot<'_>) -> bool {
    slot.occupant().is_some_and(ProcessId::alive)
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
        slot.occupy(thread);
    }
}
