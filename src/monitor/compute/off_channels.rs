//! Who is off which GPU now, and what wakes the thread that takes [`turns`](crate::monitor::compute::turns).

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::rm::number::NVA06F_CTRL_CMD_GPFIFO_SCHEDULE;

/// What wakes the thread that takes turns, which there is once there are turns.
#[derive(Debug)]
pub(crate) struct OffChannels {
    pub(crate) is_started: AtomicBool,
    /// There is one once somebody takes turns.
    changed: OnceLock<Arc<EventFd>>,
    /// Held while turns are taken; whether they are over, since the worker ends.
    pub(crate) over: Mutex<bool>,
    /// How often groups were scheduled, which enables their channels.
    pub(crate) scheduled: AtomicU64,
    /// By GPU.
    off: Mutex<Vec<Off>>,
}

/// Who is off a GPU now.
#[derive(Debug, Default)]
pub(crate) struct Off {
    /// Whether all are, and who comes.
    pub(crate) all: bool,
    pub(crate) channels: BTreeSet<Name>,
}

impl OffChannels {
    pub(crate) fn new(gpus: usize) -> Self {
        OffChannels {
            is_started: AtomicBool::new(false),
            changed: OnceLock::new(),
            over: Mutex::new(false),
            scheduled: AtomicU64::new(0),
            off: Mutex::new((0..gpus).map(|_| Off::default()).collect()),
        }
    }

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

    /// A group was scheduled.
    pub(crate) fn was_scheduled(&self) {
        self.scheduled.fetch_add(1, Ordering::AcqRel);
        self.wake();
    }

    /// Whether a channel is off a GPU, or all are.
    pub(crate) fn is_off(&self, gpu: usize, channel: Name) -> bool {
        let off = self.off.lock().unwrap_or_else(PoisonError::into_inner);
        off.get(gpu).is_some_and(|off| off.all || off.channels.contains(&channel))
    }

    pub(crate) fn set_off(&self, gpu: usize, off: Off) {
        let mut all = self.off.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get_mut(gpu) {
            *known = off;
        }
    }
}

/// A channel: its client, and its handle there.
pub(crate) type Name = (u32, u32);

/// Whether a control schedules a channel: `NVA06F_CTRL_CMD_GPFIFO_SCHEDULE`, and that of each later
/// generation's class.
pub(crate) fn schedules_a_channel(control: u32) -> bool {
    const ANY_GENERATION: u32 = 0xff << 24;
    control | ANY_GENERATION == NVA06F_CTRL_CMD_GPFIFO_SCHEDULE | ANY_GENERATION
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_of_each_generation_is_scheduled_by_the_same_control() {
        assert!([0xa06f_0103, 0xa16f_0103, 0xc36f_0103].into_iter().all(schedules_a_channel));
        assert!(![0xa06c_0101, 0xc36f_0104, 0xa06f_0111].into_iter().any(schedules_a_channel));
    }
}
