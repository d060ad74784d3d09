//! The thread that takes [`turns`](crate::monitor::compute::turns): whether there is one, what wakes it, and
//! when it has to end.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::monitor::lock::Lock;

/// That thread, which there is once there are turns.
#[derive(Debug, Default)]
pub(crate) struct TurnsThread {
    pub(crate) is_started: AtomicBool,
    /// There is one once somebody takes turns.
    changed: OnceLock<Arc<EventFd>>,
    /// Held while turns are taken; whether they are over, since the worker ends.
    pub(crate) over: Lock<bool>,
}

impl TurnsThread {
    /// What is readable when something has changed, from now on.
    pub(crate) fn hear_of_changes(&self) -> std::io::Result<Arc<EventFd>> {
        if let Some(changed) = self.changed.get() {
            return Ok(Arc::clone(changed));
        }
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let changed = Arc::new(EventFd::from_flags(flags)?);
        Ok(Arc::clone(self.changed.get_or_init(|| changed)))
    }

    /// Turns, channels or processes have come or gone.
    pub(crate) fn wake(&self) {
        if let Some(changed) = self.changed.get() {
            // At its largest number it is awake anyway.
            let _ = changed.write(1);
        }
    }
}
