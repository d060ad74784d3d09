//! The container's turns on its GPUs, where each has its time: its channels off and on.
//!
//! When it may run is in the file of shares, as spans of a frame on the host's clock: monitors need not
//! speak to each other. Each call is asked for as much early as it takes. Whose turn begins comes on while
//! the one before it goes off, so that the GPU isn't idle between; not sooner, for its time is longer
//! where nobody was before it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::EventFd;
use nix::sys::time::TimeSpec;

use crate::monitor::compute::last_turn::{LastTurn, Means, Numbered, now_us};
use crate::monitor::compute::orphans::Orphans;
use crate::monitor::compute::slices::Slices;
use crate::monitor::compute::turns_thread::TurnsThread;
use crate::monitor::driver::access::DriverAccess;
use crate::monitor::driver::monitor_client::{MonitorClient, Presence};
use crate::monitor::journal::layout::Record;
use crate::monitor::lock::Lock;
use crate::monitor::node::device::Failure;
use crate::monitor::state::channels::ChannelName;
use crate::monitor::state::container_state::ContainerState;
use crate::monitor::thread::spawn;
use crate::rm::channel::MOST_CHANNELS;
use crate::sched::{Span, cohort_turns, cohorts};

/// How often a worker that ends tries to end turns, and how long it waits in between.
const ENDING_TRIES: u32 = 20;

const ENDING_WAIT: Duration = Duration::from_millis(5);

/// For how long a channel that isn't there may be on its way.
const ON_ITS_WAY: Duration = Duration::from_secs(1);

/// How soon what the driver refused is tried again.
const RETRY_US: u64 = 1_000_000;

/// How soon a slice is tried again that could not be set for want of a file, in milliseconds; twice as
/// long each time, up to the longest.
const RETRY_MS: u16 = 1000;

const LONGEST_RETRY_MS: u16 = 32_000;

/// What came of having channels off a GPU and on it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Switched {
    /// Whether the driver was asked for anything.
    pub(crate) is_asked: bool,
    pub(crate) refused: Option<Failure>,
}

/// Which channels of a GPU run at times, and when.
#[derive(Debug, Default)]
struct Timetable {
    /// Each with a frame's length in microseconds, and its spans of that.
    parts: Vec<(u64, Vec<Span>, Vec<ChannelName>)>,
}

impl Timetable {
    /// Those that are to be off at a time, as calls that are asked for then will have it; and when to look
    /// again.
    fn off(&self, means: Means, now_us: u64) -> (BTreeSet<ChannelName>, Option<u64>) {
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

/// Each cohort of busy groups: its turns, and its channels.
fn in_cohorts(
    channels: &BTreeMap<ChannelName, ChannelName>,
    busy: &[ChannelName],
    cohorts: usize,
) -> Vec<(u64, Vec<Span>, Vec<ChannelName>)> {
    if cohorts < 2 {
        return Vec::new();
    }
    let cohort = |(number, groups): (usize, &[ChannelName])| {
        let (frame_us, span) = cohort_turns(number, cohorts);
        let is_in = |(_, group): &(&ChannelName, &ChannelName)| groups.contains(group);
        let channels = channels.iter().filter(is_in).map(|(channel, _)| *channel);
        (frame_us, vec![span], channels.collect())
    };
    busy.chunks(busy.len().div_ceil(cohorts).max(1)).enumerate().map(cohort).collect()
}

/// The container's turns on its GPUs, and those of containers whose monitors are gone.
#[derive(Debug)]
pub(crate) struct Turns {
    pub(crate) state: Arc<ContainerState>,
    driver: Arc<DriverAccess>,
    pub(crate) slices: Arc<Slices>,
    pub(crate) thread: TurnsThread,
    /// By GPU: other containers, whose turns this monitor takes. Held while it does.
    orphans: Lock<Vec<Orphans>>,
}

impl Turns {
    pub(crate) fn new(slices: Arc<Slices>) -> Self {
        let (state, driver) = (Arc::clone(&slices.state), Arc::clone(&slices.driver));
        let gpu_count = state.uuids.len();
        let orphans = Lock::new((0..gpu_count).map(|_| Orphans::default()).collect());
        Turns { state, driver, slices, thread: TurnsThread::default(), orphans }
    }

    /// Sets slices when shares, groups or processes change.
    pub(crate) fn share_forever(self: &Arc<Self>) {
        let mut retry_ms = RETRY_MS;
        let mut is_resumed = false;
        loop {
            self.slices.read_shares();
            self.thread.wake();
            is_resumed = is_resumed || self.end_turns_of_before();
            let look_ms = self.slices.look_who_rests();
            let is_whole = self.slices.set_slices() && is_resumed;
            // How many groups there are may divide them into cohorts.
            self.begin_turns();
            let again_ms = (!is_whole).then_some(retry_ms);
            retry_ms = if is_whole { RETRY_MS } else { (2 * retry_ms).min(LONGEST_RETRY_MS) };
            let patience = look_ms.into_iter().chain(again_ms).min();
            self.slices.shares.changed.wait(patience.map(|ms| Duration::from_millis(ms.into())));
        }
    }

    /// Has somebody take turns, if there are any.
    pub(crate) fn begin_turns(self: &Arc<Self>) {
        let has_turns =
            |gpu| self.slices.shares.has_frame(gpu) || !self.timetable(gpu).0.parts.is_empty();
        if self.thread.is_started.load(Ordering::Acquire) {
            return self.thread.wake();
        }
        if !(0..self.state.uuids.len()).any(has_turns)
            || self.thread.is_started.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let (turns, started) = (Arc::clone(self), self.thread.hear_of_changes());
        let started =
            started.and_then(|changed| spawn("turns", move || turns.take_turns_forever(&changed)));
        if let Err(error) = started {
            self.thread.is_started.store(false, Ordering::Release);
            tracing::warn!(%error, "turns on GPUs can't be taken: no thread");
        }
    }

    /// Brings back what a worker before took off GPUs, and nobody is to take off now; whether that is done.
    pub(crate) fn end_turns_of_before(&self) -> bool {
        let mut is_whole = true;
        for gpu in 0..self.state.uuids.len() {
            let (parts, all) = self.timetable(gpu);
            if parts.parts.is_empty() {
                is_whole &=
                    self.have_own_off(gpu, &all, &BTreeSet::new(), &mut LastTurn::default());
            }
        }
        is_whole
    }

    /// Brings everybody back before this worker ends: there may be none after it. The next one, if there is,
    /// goes on. Where the driver has hung up who takes turns, nothing is done.
    pub(crate) fn end_turns(&self) {
        if !self.thread.is_started.load(Ordering::Acquire) {
            return;
        }
        let wait = || {
            std::thread::sleep(ENDING_WAIT);
            None
        };
        let over = (0..ENDING_TRIES).find_map(|_| self.thread.over.try_lock().or_else(wait));
        let Some(mut over) = over else { return };
        *over = true;
        for gpu in 0..self.state.uuids.len() {
            let (_, all) = self.timetable(gpu);
            self.have_own_off(gpu, &all, &BTreeSet::new(), &mut LastTurn::default());
        }
        let mut orphans = self.orphans.lock();
        for (gpu, orphans) in orphans.iter_mut().enumerate() {
            self.leave_orphans(gpu, orphans);
        }
    }

    fn take_turns_forever(&self, changed: &EventFd) {
        let mut all: Vec<LastTurn> = self.state.uuids.iter().map(|_| LastTurn::default()).collect();
        loop {
            let over = self.thread.over.lock();
            if *over {
                return;
            }
            let mut orphans = self.orphans.lock();
            let each = all.iter_mut().zip(orphans.iter_mut()).enumerate();
            let wakes = each.flat_map(|(gpu, (last, orphans))| {
                [self.take_turn(gpu, last), self.take_turns_of_orphans(gpu, orphans)]
            });
            let wake_us = wakes.flatten().min();
            let watched: Vec<_> = orphans.iter().map(|of| of.watched.clone()).collect();
            drop((orphans, over));
            self.wait_for_turn(wake_us, changed, &watched);
        }
    }

    /// Waits until something changes, the monitor that is watched on a GPU ends, or that time comes.
    fn wait_for_turn(
        &self,
        wake_us: Option<u64>,
        changed: &EventFd,
        watched: &[Option<Arc<OwnedFd>>],
    ) {
        let wait = wake_us
            .map(|wake_us| TimeSpec::from(Duration::from_micros(wake_us.saturating_sub(now_us()))));
        let watched = || (0..).zip(watched).filter_map(|(gpu, pidfd)| Some((gpu, pidfd.as_ref()?)));
        let mut asked = vec![PollFd::new(changed.as_fd(), PollFlags::POLLIN)];
        asked.extend(watched().map(|(_, pidfd)| PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)));
        if !ppoll(&mut asked, wait, None).is_ok_and(|ready| ready > 0) {
            return;
        }
        let is_ready = |of: &PollFd<'_>| of.revents().is_some_and(|revents| !revents.is_empty());
        let mut ready = asked.iter().map(is_ready);
        if ready.next() == Some(true) {
            let _ = changed.read();
        }
        let mut orphans = self.orphans.lock();
        for ((gpu, _), _) in watched().zip(ready).filter(|(_, ready)| *ready) {
            if let Some(of) = orphans.get_mut::<usize>(gpu) {
                of.look_now();
            }
        }
    }

    /// The channels of a GPU that run at times, and all that there are: in the container's turns, or, where
    /// it may run always and has more groups than can run at once, each cohort of these in its own.
    fn timetable(&self, gpu: usize) -> (Timetable, Numbered) {
        let (turns, round) = (self.slices.shares.turns(gpu), self.slices.round_of_groups(gpu));
        let resting = self.slices.shares.resting(gpu);
        let (channels, all, busy) = {
            let books = self.state.books();
            let living = &books.processes;
            let channels = &books.channels;
            let busy = books.groups.busy(gpu, living, &resting);
            (channels.on(gpu, living), channels.numbered(gpu, living), busy)
        };
        let mut parts = match (turns, round) {
            _ if all.is_empty() => Vec::new(),
            (Some((frame_us, spans)), _) => vec![(frame_us, spans, all.keys().copied().collect())],
            (None, Some(round)) => in_cohorts(&channels, &busy, cohorts(round, busy.len())),
            (None, None) => Vec::new(),
        };
        // Who can't be given its share has none.
        let out_of_reach = round.map(|_| self.slices.shares.out_of_reach(gpu)).unwrap_or_default();
        let lost = channels.iter().filter(|(_, group)| out_of_reach.contains(group));
        let lost: Vec<ChannelName> = lost.map(|(channel, _)| *channel).collect();
        if !lost.is_empty() {
            parts.push((1, Vec::new(), lost));
        }
        (Timetable { parts }, all)
    }

    /// Has the container on a GPU or off it, as its turn is; when to look again.
    fn take_turn(&self, gpu: usize, last: &mut LastTurn) -> Option<u64> {
        let (parts, all) = self.timetable(gpu);
        if self.slices.shares.has_frame(gpu) {
            self.tell_channels(gpu, &all.keys().copied().collect::<Vec<_>>(), last);
        }
        let now = now_us();
        let (off, next) = parts.off(last.means, now);
        let is_whole = self.have_own_off(gpu, &all, &off, last);
        next.into_iter().chain((!is_whole).then_some(now + RETRY_US)).min()
    }

    /// Has these of the container's channels off a GPU and all others on it; whether that is done for all that
    /// there are.
    fn have_own_off(
        &self,
        gpu: usize,
        all: &Numbered,
        off: &BTreeSet<ChannelName>,
        last: &mut LastTurn,
    ) -> bool {
        let done = self.have_off(gpu, all, off, last);
        for (client, handle) in std::mem::take(&mut last.gone) {
            self.state.books().write(Record::Ungroup { client, handle });
        }
        let Some(done) = done else { return false };
        if done.is_asked {
            let done = done.refused.map_or(Ok(()), Err);
            self.slices.note_share_tried(gpu, "FIFO_DISABLE_CHANNELS", done);
        }
        done.refused.is_none()
    }

    /// Has these of all channels off a GPU and the others on it, all that there are: `None` where the driver
    /// can't be asked.
    pub(crate) fn have_off(
        &self,
        gpu: usize,
        all: &Numbered,
        off: &BTreeSet<ChannelName>,
        last: &mut LastTurn,
    ) -> Option<Switched> {
        last.forget_others(all);
        let on = last.to_enable(all, off);
        let enabled = self.set_channels(gpu, false, &on, last)?;
        last.note_enabled_first();
        let goes = last.to_disable(all, off);
        let disabled = self.set_channels(gpu, true, &goes, last)?;
        let is_asked = !on.is_empty() || !goes.is_empty();
        Some(Switched { is_asked, refused: enabled.and(disabled).err() })
    }

    /// Takes channels off a GPU, or back onto it, all that there are: `None` where the driver can't be asked.
    fn set_channels(
        &self,
        gpu: usize,
        disable: bool,
        channels: &Numbered,
        last: &mut LastTurn,
    ) -> Option<Result<(), Failure>> {
        if channels.is_empty() {
            return Some(Ok(()));
        }
        let own = self.driver.own_client()?;
        let set =
            |disable: bool, channels: &[ChannelName]| own.set_channels(gpu, disable, channels);
        let asked = Instant::now();
        let mut refused = None;
        let names: Vec<ChannelName> = channels.keys().copied().collect();
        for some in names.chunks(MOST_CHANNELS) {
            let numbered = |some: &[ChannelName]| {
                some.iter().filter_map(|name| Some((*name, *channels.get(name)?))).collect()
            };
            let is_done = set(disable, some).is_ok();
            last.note_call(disable, &numbered(some), is_done);
            if is_done {
                continue;
            }
            // One of them isn't there, or not yet. How many of the others were disabled isn't known.
            let again = |channels: &[ChannelName]| {
                if disable {
                    set(false, channels)?;
                }
                set(disable, channels)
            };
            let there = self.those_there(&own, some, last);
            let is_done = !there.is_empty() && again(&there).is_ok();
            last.note_call(disable, &numbered(&there), is_done);
            if is_done {
                continue;
            }
            for channel in &there {
                let done = again(&[*channel]);
                last.note_call(disable, &numbered(&[*channel]), done.is_ok());
                refused = refused.or(done.err());
            }
        }
        last.means.took(disable, asked.elapsed());
        Some(refused.map_or(Ok(()), Err))
    }

    /// Those of these channels that there are. One whose client is gone is gone; one that is missing for
    /// longer than it can be on its way, too.
    fn those_there(
        &self,
        own: &MonitorClient,
        channels: &[ChannelName],
        last: &mut LastTurn,
    ) -> Vec<ChannelName> {
        let mut there = Vec::new();
        for channel in channels {
            let presence = own.presence(channel.0, channel.1);
            if presence == Presence::There {
                last.missing.remove(channel);
                there.push(*channel);
                continue;
            }
            if !own.can_tell() {
                continue;
            }
            let since = last.missing.entry(*channel).or_insert_with(Instant::now);
            if presence == Presence::NoClient || since.elapsed() >= ON_ITS_WAY {
                last.missing.remove(channel);
                last.gone.push(*channel);
            }
        }
        there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_groups_a_cohort_at_a_time_is_on() {
        let channels: BTreeMap<ChannelName, ChannelName> =
            (0..20).map(|number| ((1, 100 + number), (1, number / 2))).collect();
        let busy: Vec<ChannelName> = (0..9).map(|group| (1, group)).collect();
        assert!(in_cohorts(&channels, &busy, 1).is_empty());
        let parts = Timetable { parts: in_cohorts(&channels, &busy, 3) };
        let means = Means { off_us: 0, on_us: 0 };
        for (now_us, on) in [(50_000, 0..3), (150_000, 3..6), (250_000, 6..9), (350_000, 0..3)] {
            let (off, next) = parts.off(means, now_us);
            let expected = (0..9).filter(|group| !on.contains(group));
            let expected = expected.flat_map(|group| [2 * group, 2 * group + 1]);
            assert_eq!(off, expected.map(|number| (1, 100 + number)).collect(), "{now_us}");
            assert_eq!(next, Some(now_us + 50_000));
        }
    }
}
