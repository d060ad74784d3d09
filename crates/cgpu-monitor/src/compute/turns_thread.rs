//! The thread that takes [`turns`](crate::compute::turns): whether it is started, what wakes it, and when it
//! has to end.

use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use rustix::event::{EventfdFlags, eventfd};

use crate::sync::Lock;

/// The thread that takes turns, which is started once there are turns.
#[derive(Debug, Default)]
pub(crate) struct TurnsThread {
    pub(crate) is_started: AtomicBool,
    /// Readable when something has changed. Made before the thread is started.
    changed: OnceLock<Arc<OwnedFd>>,
    /// Locked while turns are taken. `true` if no more are taken, because the monitor ends.
    pub(crate) over: Lock<bool>,
}

impl TurnsThread {
    /// The event that is readable when something has changed from now on. The first call makes it.
    pub(crate) fn open_event(&self) -> std::io::Result<Arc<OwnedFd>> {
        if let Some(changed) = self.changed.get() {
            return Ok(Arc::clone(changed));
        }
        let changed = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Arc::clone(self.changed.get_or_init(|| changed)))
    }

    /// Wakes the thread, because turns, channels or processes have come or gone.
    pub(crate) fn wake(&self) {
        if let Some(changed) = self.changed.get() {
            // If the event's counter is full, the thread is awake anyway.
            let _ = rustix::io::write(changed, &1_u64.to_ne_bytes());
        }
    }
}
