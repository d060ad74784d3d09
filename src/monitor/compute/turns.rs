//! The container's turns on its GPUs, where each has its time: its channels off and on.
//!
//! When it may run is in the file of shares, as spans of a frame on the host's clock: monitors need not
//! speak to each other. Each call is asked for as much early as it takes. Whose turn begins comes on while
//! the one before it goes off, so that the GPU isn't idle between; not sooner, for its time is longer
//! where nobody was before it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, clock_gettime};

use crate::monitor::calls::serve::{Case, Over};
use crate::monitor::compute::off_channels::{Name, Off, schedules_a_channel};
use crate::monitor::driver::device::Failure;
use crate::monitor::driver::monitor_client::{MonitorClient, Presence};
use crate::monitor::state::journal::Record;
use crate::monitor::worker::Shared;
use crate::rm::Layout;
use crate::rm::channel::MOST_CHANNELS;
use crate::rm::number::NVA06C_CTRL_CMD_GPFIFO_SCHEDULE;
use crate::sched::{Span, cohort_turns, cohorts, turn_at};

/// What a call takes until it was measured, in microseconds: off and on (H100).
const OFF_US: u64 = 670;

const ON_US: u64 = 360;

/// No call is asked for earlier than this: half of the shortest slot.
const MOST_EARLY_US: u64 = 8000;

/// How often a worker that ends tries to end turns, and how long it waits in between.
const ENDING_TRIES: u32 = 20;

const ENDING_WAIT: Duration = Duration::from_millis(5);

/// For how long a channel that isn't there may be on its way.
const ON_ITS_WAY: Duration = Duration::from_secs(1);

/// How soon what the driver refused is tried again.
const RETRY_US: u64 = 1_000_000;

/// How long it takes to have all channels of a GPU off and on, in microseconds, as it took before.
#[derive(Debug, Clone, Copy)]
struct Means {
    off_us: u64,
    on_us: u64,
}

impl Default for Means {
    fn default() -> Self {
        Means { off_us: OFF_US, on_us: ON_US }
    }
}

impl Means {
    fn took(&mut self, disable: bool, took: Duration) {
        let took_us = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).min(MOST_EARLY_US);
        let mean = if disable { &mut self.off_us } else { &mut self.on_us };
        *mean = (3 * *mean + took_us) / 4;
    }

    /// Whether who has these spans is to be on at a time, as calls that are asked for then will have it; and
    /// when to look again.
    fn turn(self, frame_us: u64, spans: &[Span], now_us: u64) -> (bool, Option<u64>) {
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
struct Done {
    /// Channels that are off.
    off: BTreeSet<Name>,
    /// How often groups had been scheduled then; `None` where nothing is known, as of a worker before.
    scheduled: Option<u64>,
    retry_us: Option<u64>,
    means: Means,
    /// Channels that were not there, since when.
    missing: BTreeMap<Name, Instant>,
}

/// Which channels of a GPU run at times, and when.
#[derive(Debug, Default)]
struct Parts {
    /// Each with a frame's length in microseconds, and its spans of that.
    parts: Vec<(u64, Vec<Span>, Vec<Name>)>,
}

impl Parts {
    /// Those that are to be off at a time, as calls that are asked for then will have it; and when to look
    /// again.
    fn off(&self, means: Means, now_us: u64) -> (BTreeSet<Name>, Option<u64>) {
        let (mut off, mut looks) = (BTreeSet::new(), None);
        for (frame_us, spans, channels) in &self.parts {
            let (on, next) = means.turn(*frame_us, spans, now_us);
            if !on {
                off.extend(channels);
            }
            looks = looks.into_iter().chain(next).min();
        }
        (off, looks)
    }
}

/// Microseconds of the host's clock.
fn now_us() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).unwrap_or_else(|_| TimeSpec::new(0, 0));
    u64::try_from(Duration::from(now).as_micros()).unwrap_or(0)
}

/// Each cohort of busy groups: its turns, and its channels.
fn in_cohorts(
    channels: &BTreeMap<Name, Name>,
    busy: &[Name],
    cohorts: usize,
) -> Vec<(u64, Vec<Span>, Vec<Name>)> {
    if cohorts < 2 {
        return Vec::new();
    }
    let cohort = |(number, groups): (usize, &[Name])| {
        let (frame_us, span) = cohort_turns(number, cohorts);
        let is_in = |(_, group): &(&Name, &Name)| groups.contains(group);
        let channels = channels.iter().filter(is_in).map(|(channel, _)| *channel);
        (frame_us, vec![span], channels.collect())
    };
    busy.chunks(busy.len().div_ceil(cohorts).max(1)).enumerate().map(cohort).collect()
}

impl Case<'_> {
    /// A control was made of an object, and done or refused: who is off the GPU may have been enabled by it.
    /// Its program finds in its parameters what it has asked.
    pub(crate) fn steered(
        &mut self,
        of: Name,
        control: u32,
        asked: Option<[u8; 3]>,
        is_done: bool,
    ) {
        if control == NVA06C_CTRL_CMD_GPFIFO_SCHEDULE || schedules_a_channel(control) {
            if is_done && schedules_a_channel(control) && !self.shared.books().knows_channel(of) {
                self.enter_unseen_channel(of);
            }
            if let (Some(params), Some(asked)) = (self.scratch.params.first_chunk_mut(), asked) {
                *params = asked;
            }
            self.shared.off_channels.was_scheduled();
            // Its channels may be the first that take turns.
            self.shared.shares.wake();
        }
    }

    /// A group that is to be scheduled while it's off the GPU isn't enabled with it: it will be when its turn
    /// comes. Who isn't known to take turns is enabled by nobody else.
    pub(crate) fn schedules_group(&mut self, (client, group): Name) {
        let channels = self.shared.books().channels.of_group(client, group);
        self.schedules(&channels);
    }

    /// The same of a channel. One that nobody was seen to make is one outside a group.
    pub(crate) fn schedules_channel(
        &mut self,
        channel: Name,
        layout: &'static Layout,
    ) -> Result<(), Over> {
        let (is_seen, channels) = {
            let books = self.shared.books();
            (books.knows_channel(channel), books.channels.named(channel))
        };
        if !is_seen && let Some(gpu) = self.gpu_of_unseen(channel.0, channel.1) {
            self.room_outside_groups(gpu, layout)?;
        }
        self.schedules(&channels);
        Ok(())
    }

    fn schedules(&mut self, channels: &[(Name, usize)]) {
        let is_off = |(name, gpu): &(Name, usize)| self.shared.off_channels.is_off(*gpu, *name);
        // `NVA06F_CTRL_GPFIFO_SCHEDULE_PARAMS` (ctrla06fgpfifo.h): bEnable, bSkipSubmit, bSkipEnable, of which
        // the last two aren't taken together. Drivers before 575 don't have the third: there whoever is enabled
        // goes off again.
        let is_off = channels.iter().any(is_off);
        if let [enable, skip_submit, skip_enable, ..] = &mut self.scratch.params[..]
            && *enable != 0
            && is_off
        {
            (*skip_submit, *skip_enable) = (0, 1);
        }
    }
}

impl Shared {
    /// Has somebody take turns, if there are any.
    pub(crate) fn begin_turns(&'static self) {
        let has_turns = || (0..self.uuids.len()).any(|gpu| !self.parts(gpu).0.parts.is_empty());
        if self.off_channels.is_started.load(Ordering::Acquire) {
            return self.off_channels.wake();
        }
        if !has_turns() || self.off_channels.is_started.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Err(error) = self.spawn("turns", || self.take_turns_forever()) {
            self.off_channels.is_started.store(false, Ordering::Release);
            tracing::warn!(%error, "turns on GPUs can't be taken: no thread");
        }
    }

    /// Brings back what a worker before took off GPUs, and nobody is to take off now; whether that is done.
    pub(crate) fn end_turns_of_before(&self) -> bool {
        let mut is_whole = true;
        for gpu in 0..self.uuids.len() {
            let (parts, all) = self.parts(gpu);
            if parts.parts.is_empty() {
                is_whole &= self.set_channels(gpu, false, &all, &mut Done::default());
            }
        }
        is_whole
    }

    /// Brings everybody back before this worker ends: there may be none after it. The next one, if there is,
    /// goes on. Where the driver has hung up who takes turns, nothing is done.
    pub(crate) fn end_turns(&self) {
        if !self.off_channels.is_started.load(Ordering::Acquire) {
            return;
        }
        let mut tries = (0..ENDING_TRIES).map(|_| self.off_channels.over.try_lock());
        let over =
            tries.find_map(|tried| tried.inspect_err(|_| std::thread::sleep(ENDING_WAIT)).ok());
        let Some(mut over) = over else { return };
        *over = true;
        for gpu in 0..self.uuids.len() {
            let (_, all) = self.parts(gpu);
            self.set_channels(gpu, false, &all, &mut Done::default());
        }
    }

    fn take_turns_forever(&self) {
        let mut done: Vec<Done> = self.uuids.iter().map(|_| Done::default()).collect();
        loop {
            let over = self.off_channels.over.lock().unwrap_or_else(PoisonError::into_inner);
            if *over {
                return;
            }
            let wakes = done.iter_mut().enumerate();
            let wakes = wakes.filter_map(|(gpu, done)| self.take_turn(gpu, done)).min();
            drop(over);
            let wait = wakes.map(|wake_us| {
                TimeSpec::from(Duration::from_micros(wake_us.saturating_sub(now_us())))
            });
            let mut changed = [PollFd::new(self.off_channels.changed.as_fd(), PollFlags::POLLIN)];
            if ppoll(&mut changed, wait, None).is_ok_and(|ready| ready > 0) {
                let _ = self.off_channels.changed.read();
            }
        }
    }

    /// The channels of a GPU that run at times, and all that there are: in the container's turns, or, where
    /// it may run always and has more groups than can run at once, each cohort of these in its own.
    fn parts(&self, gpu: usize) -> (Parts, Vec<Name>) {
        let (turns, round) = (self.shares.turns(gpu), self.round_of_groups(gpu));
        let resting = self.shares.resting(gpu);
        let (channels, busy) = {
            let books = self.books();
            let living = &books.processes;
            (books.channels.on(gpu, living), books.groups.busy(gpu, living, &resting))
        };
        let all: Vec<Name> = channels.keys().copied().collect();
        let mut parts = match (turns, round) {
            _ if all.is_empty() => Vec::new(),
            (Some((frame_us, spans)), _) => vec![(frame_us, spans, all.clone())],
            (None, Some(round)) => in_cohorts(&channels, &busy, cohorts(round, busy.len())),
            (None, None) => Vec::new(),
        };
        // Who can't be given its share has none.
        let out_of_reach = round.map(|_| self.shares.out_of_reach(gpu)).unwrap_or_default();
        let lost = channels.iter().filter(|(_, group)| out_of_reach.contains(group));
        let lost: Vec<Name> = lost.map(|(channel, _)| *channel).collect();
        if !lost.is_empty() {
            parts.push((1, Vec::new(), lost));
        }
        (Parts { parts }, all)
    }

    /// Has the container on a GPU or off it, as its turn is; when to look again.
    fn take_turn(&self, gpu: usize, done: &mut Done) -> Option<u64> {
        let (parts, all) = self.parts(gpu);
        let now = now_us();
        let (off, next) = parts.off(done.means, now);
        // Before it is looked at: who is scheduled from now on is heard of.
        let is_all_off = !all.is_empty() && off.len() == all.len();
        self.off_channels.set_off(gpu, Off { all: is_all_off, channels: off.clone() });
        let scheduled = self.off_channels.scheduled.load(Ordering::Acquire);
        let is_all = done.scheduled != Some(scheduled)
            || done.retry_us.is_some_and(|retry_us| retry_us <= now);
        let (on, goes): (Vec<Name>, Vec<Name>) = if is_all {
            all.into_iter().partition(|name| !off.contains(name))
        } else {
            let back =
                all.into_iter().filter(|name| done.off.contains(name) && !off.contains(name));
            (back.collect(), off.difference(&done.off).copied().collect())
        };
        let mut is_whole = true;
        for (disable, channels) in [(false, on), (true, goes)] {
            is_whole &= self.set_channels(gpu, disable, &channels, done);
        }
        if !is_whole {
            done.retry_us = Some(now + RETRY_US);
        } else if is_all {
            done.retry_us = None;
        }
        (done.off, done.scheduled) = (off, Some(scheduled));
        next.into_iter().chain(done.retry_us).min()
    }

    /// Takes channels off a GPU, or back onto it; whether that is done for all that there are.
    fn set_channels(&self, gpu: usize, disable: bool, channels: &[Name], done: &mut Done) -> bool {
        if channels.is_empty() {
            return true;
        }
        let Some(own) = self.own_client() else { return false };
        let set = |channels: &[Name]| own.set_channels(&self.release, gpu, disable, channels);
        let asked = Instant::now();
        let mut refused = None;
        for some in channels.chunks(MOST_CHANNELS) {
            // All or none: one of them isn't there, or not yet.
            if set(some).is_err() {
                let there = self.those_there(&own, some, done);
                if !there.is_empty() && set(&there).is_err() {
                    refused = there.iter().find_map(|channel| set(&[*channel]).err()).or(refused);
                }
            }
        }
        done.means.took(disable, asked.elapsed());
        self.tried_turn(gpu, refused.map_or(Ok(()), Err));
        refused.is_none()
    }

    /// Those of these channels that there are. One whose client is gone is forgotten; one that is missing for
    /// longer than it can be on its way, too.
    fn those_there(&self, own: &MonitorClient, channels: &[Name], done: &mut Done) -> Vec<Name> {
        let forget =
            |(client, handle): Name| self.books().write(Record::Ungroup { client, handle });
        let mut there = Vec::new();
        for channel in channels {
            let presence = own.presence(&self.release, channel.0, channel.1);
            if presence == Presence::There {
                done.missing.remove(channel);
                there.push(*channel);
                continue;
            }
            if !own.can_tell(&self.release) {
                continue;
            }
            let since = done.missing.entry(*channel).or_insert_with(Instant::now);
            if presence == Presence::NoClient || since.elapsed() >= ON_ITS_WAY {
                done.missing.remove(channel);
                forget(*channel);
            }
        }
        there
    }

    fn tried_turn(&self, gpu: usize, done: Result<(), Failure>) {
        self.tried_share(gpu, "FIFO_DISABLE_CHANNELS", done);
    }
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
    fn a_channel_of_each_generation_is_scheduled_by_the_same_control() {
        assert!([0xa06f_0103, 0xa16f_0103, 0xc36f_0103].into_iter().all(schedules_a_channel));
        assert!(![0xa06c_0101, 0xc36f_0104, 0xa06f_0111].into_iter().any(schedules_a_channel));
    }

    #[test]
    fn of_many_groups_a_cohort_at_a_time_is_on() {
        let channels: BTreeMap<Name, Name> =
            (0..20).map(|number| ((1, 100 + number), (1, number / 2))).collect();
        let busy: Vec<Name> = (0..9).map(|group| (1, group)).collect();
        assert!(in_cohorts(&channels, &busy, 1).is_empty());
        let parts = Parts { parts: in_cohorts(&channels, &busy, 3) };
        let means = Means { off_us: 0, on_us: 0 };
        for (now_us, on) in [(50_000, 0..3), (150_000, 3..6), (250_000, 6..9), (350_000, 0..3)] {
            let (off, next) = parts.off(means, now_us);
            let expected = (0..9).filter(|group| !on.contains(group));
            let expected = expected.flat_map(|group| [2 * group, 2 * group + 1]);
            assert_eq!(off, expected.map(|number| (1, 100 + number)).collect(), "{now_us}");
            assert_eq!(next, Some(now_us + 50_000));
        }
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
