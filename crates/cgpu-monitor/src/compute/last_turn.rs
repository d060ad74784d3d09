//! Which channels a monitor has taken off a GPU, and how long that took. Knows no driver.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::state::ChannelName;
use cgpu_core::sched::{Span, turn_at};

/// The time of a call before one was measured, in microseconds: to take channels off, and to bring them back (H100).
const OFF_US: u64 = 670;

const ON_US: u64 = 360;

/// The most microseconds that one call counts for in the mean: half of the shortest slot. A call to bring channels back
/// can be made earlier by half as much again, see [`SwitchTimes::turn`].
const MOST_EARLY_US: u64 = 8000;

/// How many microseconds it took on average to take all channels of a GPU off, and to bring them back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SwitchTimes {
    pub(crate) off_us: u64,
    pub(crate) on_us: u64,
}

impl Default for SwitchTimes {
    fn default() -> Self {
        SwitchTimes { off_us: OFF_US, on_us: ON_US }
    }
}

impl SwitchTimes {
    pub(crate) fn note_duration(&mut self, disable: bool, took: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).min(MOST_EARLY_US);
        let mean = if disable { &mut self.off_us } else { &mut self.on_us };
        *mean = (3 * *mean + took_us) / 4;
    }

    /// Whether a container with these spans is to be on at `now_us`, allowing for the time of calls that are made then;
    /// and when to check again.
    pub(crate) fn turn(self, frame_us: u64, spans: &[Span], now_us: u64) -> (bool, Option<u64>) {
        let (off_early_us, on_early_us) = (self.off_us, self.on_us + self.off_us / 2);
        let check = |early_us| {
            let (on, next) = turn_at(frame_us, spans, now_us + early_us);
            (on, next.map(|next| next - early_us))
        };
        let ((begins, one), (ends_not, other)) = (check(on_early_us), check(off_early_us));
        let on = if on_early_us < off_early_us { begins && ends_not } else { begins || ends_not };
        (on, one.into_iter().chain(other).min())
    }
}

/// Channels, each with its number: a channel that is recreated under the same name has another one.
pub(crate) type Numbered = BTreeMap<ChannelName, u64>;

/// What was done last on a GPU.
///
/// The driver counts how often a channel was disabled, and the channel has to be enabled as often; a channel that
/// isn't disabled may be enabled without effect (H100, `tests/gpu/results`, 2026-11-27). So no channel is disabled
/// twice, and a channel of which the state isn't known is enabled before.
#[derive(Debug, Default)]
pub(crate) struct LastTurn {
    /// Channels that are disabled.
    off: Numbered,
    /// Channels that may be disabled or not, because a call failed.
    unsure: Numbered,
    /// Whether all other channels are known to be enabled: before an update some may have been disabled.
    is_sure: bool,
    pub(crate) times: SwitchTimes,
    /// Channels that the driver didn't have, and since when.
    pub(crate) missing: BTreeMap<ChannelName, Instant>,
    /// Channels that were found to be gone, until the caller forgets them.
    pub(crate) gone: Vec<ChannelName>,
    /// The channels that were reported last to other monitors.
    pub(crate) reported: Option<Vec<ChannelName>>,
}

impl LastTurn {
    /// The channels of `all` to be enabled first, so that then `off` and no others are disabled.
    pub(crate) fn to_enable(&self, all: &Numbered, off: &BTreeSet<ChannelName>) -> Numbered {
        let is_due = |channel: &(&ChannelName, &u64)| {
            !self.is_sure
                || has(&self.unsure, *channel)
                || has(&self.off, *channel) && !off.contains(channel.0)
        };
        all.iter().filter(is_due).map(|(name, number)| (*name, *number)).collect()
    }

    /// The channels of `all` to be disabled after that. A channel that could not be enabled stays as it is.
    pub(crate) fn to_disable(&self, all: &Numbered, off: &BTreeSet<ChannelName>) -> Numbered {
        let is_due = |channel: &(&ChannelName, &u64)| {
            off.contains(channel.0) && !has(&self.off, *channel) && !has(&self.unsure, *channel)
        };
        all.iter().filter(is_due).map(|(name, number)| (*name, *number)).collect()
    }

    /// Notes that all channels were enabled that had to be, but for those whose call failed.
    pub(crate) fn note_enabled_first(&mut self) {
        self.is_sure = true;
    }

    /// Notes a call for these channels. A call that failed may have been done in part.
    pub(crate) fn note_call(&mut self, disable: bool, channels: &Numbered, is_done: bool) {
        for (name, number) in channels {
            self.off.remove(name);
            self.unsure.remove(name);
            if !is_done {
                self.unsure.insert(*name, *number);
            } else if disable {
                self.off.insert(*name, *number);
            }
        }
    }

    /// Forgets all channels but these.
    pub(crate) fn forget_others(&mut self, all: &Numbered) {
        self.off.retain(|name, number| has(all, (name, number)));
        self.unsure.retain(|name, number| has(all, (name, number)));
    }
}

fn has(channels: &Numbered, (name, number): (&ChannelName, &u64)) -> bool {
    channels.get(name) == Some(number)
}

/// Microseconds of the host's clock.
pub(crate) fn now_us() -> u64 {
    let now = Duration::try_from(clock_gettime(ClockId::Monotonic));
    now.map_or(0, |now| u64::try_from(now.as_micros()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn container_switches_on_while_the_other_goes_off() {
        let times = SwitchTimes { off_us: 600, on_us: 400 };
        let (one, other) =
            ([Span { from_us: 0, to_us: 20_000 }], [Span { from_us: 20_000, to_us: 40_000 }]);
        let turn = |spans: &[Span], now_us| times.turn(40_000, spans, now_us).0;
        // The first one goes off from 19,400 on, and is off at 20,000; the second one is on at 19,700.
        for (now_us, expected) in [
            (19_299, (true, false)),
            (19_300, (true, true)),
            (19_399, (true, true)),
            (19_400, (false, true)),
        ] {
            let now_us = now_us + 400_000;
            assert_eq!((turn(&one, now_us), turn(&other, now_us)), expected, "{now_us}");
        }
        // The next check is when something changes, and not before.
        assert_eq!(times.turn(40_000, &one, 402_000).1, Some(419_300));
        assert_eq!(times.turn(40_000, &one, 419_300).1, Some(419_400));
        assert_eq!(times.turn(40_000, &[Span { from_us: 0, to_us: 40_000 }], 5), (true, None));
    }

    /// A driver that counts how often each channel was disabled.
    #[derive(Default)]
    struct Counts(BTreeMap<ChannelName, u32>);

    impl Counts {
        /// Enables or disables the first `most` channels. `true` if those are all.
        fn set(&mut self, disable: bool, channels: &Numbered, most: usize) -> bool {
            for name in channels.keys().take(most) {
                let count = self.0.entry(*name).or_default();
                *count = if disable { *count + 1 } else { count.saturating_sub(1) };
            }
            channels.len() <= most
        }

        fn switch_channels(
            &mut self,
            last: &mut LastTurn,
            (all, off): (&Numbered, &BTreeSet<ChannelName>),
            most: usize,
        ) {
            last.forget_others(all);
            let on = last.to_enable(all, off);
            let is_done = self.set(false, &on, most);
            last.note_call(false, &on, is_done);
            last.note_enabled_first();
            let goes = last.to_disable(all, off);
            let is_done = self.set(true, &goes, most);
            last.note_call(true, &goes, is_done);
        }
    }

    proptest! {
        /// Whatever fails, entirely or in part, whichever channels are recreated, and whichever were disabled before an
        /// update: once calls succeed, the right channels are off, and one call brings each of them back.
        #[test]
        fn no_channel_is_disabled_twice(
            before in prop::collection::btree_set(0..8_u32, 0..8),
            turns in prop::collection::vec(
                (prop::collection::btree_set(0..8_u32, 0..8), 0..10_usize, 0..8_u32),
                0..20,
            ),
        ) {
            let mut driver = Counts(before.into_iter().map(|handle| ((1, handle), 1)).collect());
            let mut all: Numbered = (0..8).map(|handle| ((1, handle), 0)).collect();
            let mut last = LastTurn::default();
            for (number, (off, most, recreated)) in (1..).zip(turns) {
                // A channel is freed and recreated under its name.
                driver.0.remove(&(1, recreated));
                all.insert((1, recreated), number);
                let off = off.into_iter().map(|handle| (1, handle)).collect();
                driver.switch_channels(&mut last, (&all, &off), most);
                prop_assert!(driver.0.values().all(|count| *count <= 1), "{:?}", driver.0);
                driver.switch_channels(&mut last, (&all, &off), usize::MAX);
                for name in all.keys() {
                    let count = driver.0.get(name).copied().unwrap_or(0);
                    prop_assert_eq!(count, u32::from(off.contains(name)));
                }
            }
        }
    }

    #[test]
    fn means_follow_what_calls_take_within_bounds() {
        let mut times = SwitchTimes { off_us: 800, on_us: 400 };
        times.note_duration(true, Duration::from_micros(1600));
        times.note_duration(false, Duration::from_secs(10));
        assert_eq!((times.off_us, times.on_us), (1000, 2300));
        // If it takes far longer to go off, a container comes on no earlier than the other one goes off, and stays no
        // longer.
        let times = SwitchTimes { off_us: 2000, on_us: 400 };
        let spans = [Span { from_us: 20_000, to_us: 40_000 }];
        for (now_us, on) in [(18_599, false), (18_600, true), (37_999, true), (38_000, false)] {
            assert_eq!(times.turn(80_000, &spans, now_us).0, on, "{now_us}");
        }
    }
}
