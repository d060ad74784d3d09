//! Whether a container is at rest: the longer it calls nothing, the less often it is looked at. Pure.

use std::time::{Duration, Instant};

/// A container that has called nothing for this long is at rest.
const AFTER: Duration = Duration::from_secs(5);

/// A container that has called nothing for this long is at rest for long.
const LONG_AFTER: Duration = Duration::from_secs(60);

/// How often a container is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    /// How often the driver is asked what the container's processes have, and what is in use.
    pub(crate) tick: Duration,
    /// How often all processes of the host are checked although no figure has changed: one process may have taken what
    /// another gave back.
    pub(crate) full_look: Duration,
}

/// The pace while the container calls.
const CALLS: Pace = pace_ms(250, 600);

/// The paces at rest: a call would be noticed, so only processes that the monitor doesn't know could have taken memory.
const RESTS: Pace = pace_ms(500, 5_000);
const RESTS_LONG: Pace = pace_ms(2_000, 60_000);

/// The paces while no process of the container has ever used the driver: an unknown process could have a descriptor
/// that was never used.
const UNUSED: Pace = pace_ms(4_000, 60_000);
const UNUSED_LONG: Pace = pace_ms(60_000, 300_000);

const fn pace_ms(tick: u64, full_look: u64) -> Pace {
    Pace { tick: Duration::from_millis(tick), full_look: Duration::from_millis(full_look) }
}

/// The number of calls of a container, and since when it has not changed.
#[derive(Debug)]
pub(crate) struct Rest {
    calls: u64,
    since: Instant,
}

impl Rest {
    /// Begins with the number of calls until now.
    pub(crate) fn new(calls: u64, now: Instant) -> Self {
        Rest { calls, since: now }
    }

    /// Takes the number of calls until `now`.
    pub(crate) fn note(&mut self, calls: u64, now: Instant) {
        if calls != self.calls {
            *self = Rest { calls, since: now };
        }
    }

    /// Whether the container is at rest.
    pub(crate) fn is_at_rest(&self, now: Instant) -> bool {
        self.length(now) >= AFTER
    }

    /// How often the container is to be looked at; `was_used`: whether any of its processes has used the driver.
    pub(crate) fn pace(&self, was_used: bool, now: Instant) -> Pace {
        let length = self.length(now);
        match (was_used, length >= AFTER, length >= LONG_AFTER) {
            (true, false, _) => CALLS,
            (true, true, false) => RESTS,
            (true, true, true) => RESTS_LONG,
            (false, _, false) => UNUSED,
            (false, _, true) => UNUSED_LONG,
        }
    }

    fn length(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_calls_does_not_rest_for_a_while() {
        let start = Instant::now();
        let mut rest = Rest::new(7, start);
        assert!(!rest.is_at_rest(start));
        rest.note(7, start + AFTER);
        assert!(rest.is_at_rest(start + AFTER));
        rest.note(8, start + AFTER);
        assert!(!rest.is_at_rest(start + AFTER));
        assert!(!rest.is_at_rest(start), "a clock that goes back");
        assert!(rest.is_at_rest(start + 2 * AFTER));
    }

    #[test]
    fn the_longer_nothing_is_called_the_less_often_it_is_looked() {
        let start = Instant::now();
        let mut rest = Rest::new(0, start);
        let at =
            |rest: &Rest, after: Duration| [true, false].map(|used| rest.pace(used, start + after));
        assert_eq!(at(&rest, Duration::ZERO), [CALLS, UNUSED]);
        assert_eq!(at(&rest, AFTER), [RESTS, UNUSED]);
        assert_eq!(at(&rest, LONG_AFTER), [RESTS_LONG, UNUSED_LONG]);
        rest.note(1, start + LONG_AFTER);
        assert_eq!(at(&rest, LONG_AFTER), [CALLS, UNUSED], "a call begins it anew");
    }
}
