//! Whether a container is idle, and how often it is audited then. Pure.

use std::time::{Duration, Instant};

/// A container that has called nothing for this long is idle.
const IDLE_AFTER: Duration = Duration::from_secs(5);

/// How often a container is audited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    /// How often the driver is asked what the container's processes have, and what is in use.
    pub(crate) interval: Duration,
    /// How often all processes of the host are checked although no figure has changed: one process may have taken what
    /// another gave back.
    pub(crate) scan_interval: Duration,
}

/// The pace while the container calls.
const BUSY: Pace = pace_ms(250, 600);

/// The pace while the container is idle: a call would be noticed, so only processes that the monitor doesn't know could
/// have taken memory.
const IDLE: Pace = pace_ms(2_000, 60_000);

/// The pace while no process of the container has ever called: a process outside could have a descriptor that was never
/// used.
const UNCALLED: Pace = pace_ms(30_000, 300_000);

const fn pace_ms(interval: u64, scan_interval: u64) -> Pace {
    Pace {
        interval: Duration::from_millis(interval),
        scan_interval: Duration::from_millis(scan_interval),
    }
}

/// The number of calls of a container, and since when it has not changed.
#[derive(Debug)]
pub(crate) struct Idleness {
    calls: u64,
    since: Instant,
}

impl Idleness {
    /// Begins with the number of calls until now.
    pub(crate) fn new(calls: u64, now: Instant) -> Self {
        Idleness { calls, since: now }
    }

    /// Takes the number of calls until `now`.
    pub(crate) fn note(&mut self, calls: u64, now: Instant) {
        if calls != self.calls {
            *self = Idleness { calls, since: now };
        }
    }

    /// Whether the container is idle.
    pub(crate) fn is_idle(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= IDLE_AFTER
    }

    /// How often the container is audited; `has_called`: whether any of its processes has ever called.
    pub(crate) fn pace(&self, has_called: bool, now: Instant) -> Pace {
        match has_called {
            false => UNCALLED,
            true if self.is_idle(now) => IDLE,
            true => BUSY,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_ends_idleness() {
        let start = Instant::now();
        let mut idleness = Idleness::new(7, start);
        assert!(!idleness.is_idle(start));
        idleness.note(7, start + IDLE_AFTER);
        assert!(idleness.is_idle(start + IDLE_AFTER));
        idleness.note(8, start + IDLE_AFTER);
        assert!(!idleness.is_idle(start + IDLE_AFTER));
        assert!(!idleness.is_idle(start), "a clock that goes back");
        assert!(idleness.is_idle(start + 2 * IDLE_AFTER));
    }

    #[test]
    fn an_idle_container_is_audited_less_often() {
        let start = Instant::now();
        let idleness = Idleness::new(0, start);
        let after = |after: Duration| [true, false].map(|has| idleness.pace(has, start + after));
        assert_eq!(after(Duration::ZERO), [BUSY, UNCALLED]);
        assert_eq!(after(IDLE_AFTER), [IDLE, UNCALLED]);
    }
}
