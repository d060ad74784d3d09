//! What a monitor did last to have channels off a GPU or on it, and how long that took. Knows no driver.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};

use crate::monitor::compute::off_channels::Name;
use crate::sched::{Span, turn_at};

/// What a call takes until it was measured, in microseconds: off and on (H100).
const OFF_US: u64 = 670;

const ON_US: u64 = 360;

/// No call is asked for earlier than this: half of the shortest slot.
const MOST_EARLY_US: u64 = 8000;

/// How long it takes to have all channels of a GPU off and on, in microseconds, as it took before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Means {
    pub(crate) off_us: u64,
    pub(crate) on_us: u64,
}

impl Default for Means {
    fn default() -> Self {
        Means { off_us: OFF_US, on_us: ON_US }
    }
}

impl Means {
    pub(crate) fn took(&mut self, disable: bool, took: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).min(MOST_EARLY_US);
        let mean = if disable { &mut self.off_us } else { &mut self.on_us };
        *mean = (3 * *mean + took_us) / 4;
    }

    /// Whether who has these spans is to be on at a time, as calls that are asked for then will have it; and
    /// when to look again.
    pub(crate) fn turn(self, frame_us: u64, spans: &[Span], now_us: u64) -> (bool, Option<u64>) {
        let (off_early_us, on_early_us) = (self.off_us, self.on_us + self.off_us / 2);
        let look = |early_us| {
            let (on, next) = turn_at(frame_us, spans, now_us + early_us);
            (on, next.map(|next| next - early_us))
        };
        let ((begins, one), (ends_not, other)) = (look(on_early_us), look(off_early_us));
        let on = if on_early_us < off_early_us { begins && ends_not } else { begins || ends_not };
        (on, one.into_iter().chain(other).min())
    }
}

/// What was done last on a GPU.
#[derive(Debug, Default)]
pub(crate) struct LastTurn {
    /// Channels that are off.
    pub(crate) off: BTreeSet<Name>,
    /// How often groups had been scheduled then; `None` where nothing is known, as of a worker before.
    pub(crate) scheduled: Option<u64>,
    pub(crate) retry_us: Option<u64>,
    pub(crate) means: Means,
    /// Channels that were not there, since when.
    pub(crate) missing: BTreeMap<Name, Instant>,
    /// Those that were found to be gone, until somebody forgets them.
    pub(crate) gone: Vec<Name>,
    /// The channels that other monitors were told of.
    pub(crate) told: Option<Vec<Name>>,
}

/// Microseconds of the host's clock.
pub(crate) fn now_us() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap_or_else(|_| TimeSpec::new(0, 0));
    u64::try_from(Duration::from(now).as_micros()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_on_does_so_while_the_other_goes_off() {
        let means = Means { off_us: 600, on_us: 400 };
        let (one, other) =
            ([Span { from_us: 0, to_us: 20_000 }], [Span { from_us: 20_000, to_us: 40_000 }]);
        let turn = |spans: &[Span], now_us| means.turn(40_000, spans, now_us).0;
        // The one goes off from 19,400 on, and is off at 20,000; the other is on at 19,700.
        for (now_us, expected) in [
            (19_299, (true, false)),
            (19_300, (true, true)),
            (19_399, (true, true)),
            (19_400, (false, true)),
        ] {
            let now_us = now_us + 400_000;
            assert_eq!((turn(&one, now_us), turn(&other, now_us)), expected, "{now_us}");
        }
        // It looks again when something changes, and not in between.
        assert_eq!(means.turn(40_000, &one, 402_000).1, Some(419_300));
        assert_eq!(means.turn(40_000, &one, 419_300).1, Some(419_400));
        assert_eq!(means.turn(40_000, &[Span { from_us: 0, to_us: 40_000 }], 5), (true, None));
    }

    #[test]
    fn means_follow_what_calls_take_within_bounds() {
        let mut means = Means { off_us: 800, on_us: 400 };
        means.took(true, Duration::from_micros(1600));
        means.took(false, Duration::from_secs(10));
        assert_eq!((means.off_us, means.on_us), (1000, 2300));
        // Where it takes far longer to go off, nobody comes earlier than it goes, nor stays for longer.
        let means = Means { off_us: 2000, on_us: 400 };
        let spans = [Span { from_us: 20_000, to_us: 40_000 }];
        for (now_us, on) in [(18_599, false), (18_600, true), (37_999, true), (38_000, false)] {
            assert_eq!(means.turn(80_000, &spans, now_us).0, on, "{now_us}");
        }
    }
}
