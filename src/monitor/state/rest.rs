//! Whether a container rests: while it calls nothing, it is looked at less often. Pure.

use std::time::{Duration, Instant};

/// For how long it called nothing, then.
const AFTER: Duration = Duration::from_secs(5);

/// The calls of a container, and since when they are as many.
#[derive(Debug)]
pub(crate) struct Rest {
    calls: u64,
    since: Instant,
}

impl Rest {
    /// It has called so often until now.
    pub(crate) fn new(calls: u64, now: Instant) -> Self {
        Rest { calls, since: now }
    }

    /// Takes note of how often it has called.
    pub(crate) fn note(&mut self, calls: u64, now: Instant) {
        if calls != self.calls {
            *self = Rest { calls, since: now };
        }
    }

    /// Whether it rests.
    pub(crate) fn is_long(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_calls_does_not_rest_for_a_while() {
        let start = Instant::now();
        let mut rest = Rest::new(7, start);
        assert!(!rest.is_long(start));
        rest.note(7, start + AFTER);
        assert!(rest.is_long(start + AFTER));
        rest.note(8, start + AFTER);
        assert!(!rest.is_long(start + AFTER));
        assert!(!rest.is_long(start), "a clock that goes back");
        assert!(rest.is_long(start + 2 * AFTER));
    }
}
