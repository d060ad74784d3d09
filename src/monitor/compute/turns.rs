//! The container's turns on its GPUs, where each has its time: its channels off and on.
//!
//! When it may run is in the file of shares, as spans of a frame on the host's clock: monitors need not
//! speak to each other. Each call is asked for as much early as it takes. Whose turn begins comes on while
//! the one before it goes off, so that the GPU isn't idle between; not sooner, for its time is longer
//! where nobody was before it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::EventFd;
use nix::sys::time::TimeSpec;

use crate::monitor::compute::last_turn::{LastTurn, Means, now_us};
use crate::monitor::compute::off_channels::{Name, Off, OffChannels};
use crate::monitor::compute::orphans::Orphans;
use crate::monitor::compute::slices::Slices;
use crate::monitor::driver::access::DriverAccess;
use crate::monitor::driver::device::Failure;
use crate::monitor::driver::monitor_client::{MonitorClient, Presence};
use crate::monitor::state::container_state::ContainerState;
use crate::monitor::state::journal::Record;
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

/// Which channels of a GPU run at times, and when.
#[derive(Debug, Default)]
struct Timetable {
    /// Each with a frame's length in microseconds, and its spans of that.
    parts: Vec<(u64, Vec<Span>, Vec<Name>)>,
}

impl Timetable {
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

/// The container's turns on its GPUs, and those of containers whose monitors are gone.
#[derive(Debug)]
pub(crate) struct Turns {
    pub(crate) state: Arc<ContainerState>,
    driver: Arc<DriverAccess>,
    pub(crate) slices: Arc<Slices>,
    pub(crate) off_channels: OffChannels,
    /// By GPU: other containers, whose turns this monitor takes. Held while it does.
    orphans: Mutex<Vec<Orphans>>,
}

impl Turns {
    pub(crate) fn new(slices: Arc<Slices>) -> Self {
        let (state, driver) = (Arc::clone(&slices.state), Arc::clone(&slices.driver));
        let gpu_count = state.uuids.len();
        let orphans = Mutex::new((0..gpu_count).map(|_| Orphans::default()).collect());
        Turns { state, driver, slices, off_channels: OffChannels::new(gpu_count), orphans }
    }

    /// Sets slices when shares, groups or processes change.
    pub(crate) fn share_forever(self: &Arc<Self>) {
        let mut retry_ms = RETRY_MS;
        let mut is_resumed = false;
        loop {
            self.slices.read_shares();
            self.off_channels.wake();
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
        if self.off_channels.is_started.load(Ordering::Acquire) {
            return self.off_channels.wake();
        }
        if !(0..self.state.uuids.len()).any(has_turns)
            || self.off_channels.is_started.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let (turns, started) = (Arc::clone(self), self.off_channels.hear_of_changes());
        let started =
            started.and_then(|changed| spawn("turns", move || turns.take_turns_forever(&changed)));
        if let Err(error) = started {
            self.off_channels.is_started.store(false, Ordering::Release);
            tracing::warn!(%error, "turns on GPUs can't be taken: no thread");
        }
    }

    /// Brings back what a worker before took off GPUs, and nobody is to take off now; whether that is done.
    pub(crate) fn end_turns_of_before(&self) -> bool {
        let mut is_whole = true;
        for gpu in 0..self.state.uuids.len() {
            let (parts, all) = self.timetable(gpu);
            if parts.parts.is_empty() {
                is_whole &= self.set_own_channels(gpu, false, &all, &mut LastTurn::default());
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
        for gpu in 0..self.state.uuids.len() {
            let (_, all) = self.timetable(gpu);
            self.set_own_channels(gpu, false, &all, &mut LastTurn::default());
        }
        let mut orphans = self.orphans.lock().unwrap_or_else(PoisonError::into_inner);
        for (gpu, orphans) in orphans.iter_mut().enumerate() {
            self.leave_orphans(gpu, orphans);
        }
    }

    fn take_turns_forever(&self, changed: &EventFd) {
        let mut all: Vec<LastTurn> = self.state.uuids.iter().map(|_| LastTurn::default()).collect();
        loop {
            let over = self.off_channels.over.lock().unwrap_or_else(PoisonError::into_inner);
            if *over {
                return;
            }
            let mut orphans = self.orphans.lock().unwrap_or_else(PoisonError::into_inner);
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
        let mut orphans = self.orphans.lock().unwrap_or_else(PoisonError::into_inner);
        for ((gpu, _), _) in watched().zip(ready).filter(|(_, ready)| *ready) {
            if let Some(of) = orphans.get_mut::<usize>(gpu) {
                of.look_now();
            }
        }
    }

    /// The channels of a GPU that run at times, and all that there are: in the container's turns, or, where
    /// it may run always and has more groups than can run at once, each cohort of these in its own.
    fn timetable(&self, gpu: usize) -> (Timetable, Vec<Name>) {
        let (turns, round) = (self.slices.shares.turns(gpu), self.slices.round_of_groups(gpu));
        let resting = self.slices.shares.resting(gpu);
        let (channels, busy) = {
            let books = self.state.books();
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
        let out_of_reach = round.map(|_| self.slices.shares.out_of_reach(gpu)).unwrap_or_default();
        let lost = channels.iter().filter(|(_, group)| out_of_reach.contains(group));
        let lost: Vec<Name> = lost.map(|(channel, _)| *channel).collect();
        if !lost.is_empty() {
            parts.push((1, Vec::new(), lost));
        }
        (Timetable { parts }, all)
    }

    /// Has the container on a GPU or off it, as its turn is; when to look again.
    fn take_turn(&self, gpu: usize, last: &mut LastTurn) -> Option<u64> {
        let (parts, all) = self.timetable(gpu);
        if self.slices.shares.has_frame(gpu) {
            self.tell_channels(gpu, &all, last);
        }
        let now = now_us();
        let (off, next) = parts.off(last.means, now);
        // Before it is looked at: who is scheduled from now on is heard of.
        let is_all_off = !all.is_empty() && off.len() == all.len();
        self.off_channels.set_off(gpu, Off { all: is_all_off, channels: off.clone() });
        let scheduled = self.off_channels.scheduled.load(Ordering::Acquire);
        let is_all = last.scheduled != Some(scheduled)
            || last.retry_us.is_some_and(|retry_us| retry_us <= now);
        let (on, goes): (Vec<Name>, Vec<Name>) = if is_all {
            all.into_iter().partition(|name| !off.contains(name))
        } else {
            let back =
                all.into_iter().filter(|name| last.off.contains(name) && !off.contains(name));
            (back.collect(), off.difference(&last.off).copied().collect())
        };
        let mut is_whole = true;
        for (disable, channels) in [(false, on), (true, goes)] {
            is_whole &= self.set_own_channels(gpu, disable, &channels, last);
        }
        if !is_whole {
            last.retry_us = Some(now + RETRY_US);
        } else if is_all {
            last.retry_us = None;
        }
        (last.off, last.scheduled) = (off, Some(scheduled));
        next.into_iter().chain(last.retry_us).min()
    }

    /// Takes channels of the container's off a GPU, or back onto it; whether that is done for all that there
    /// are.
    fn set_own_channels(
        &self,
        gpu: usize,
        disable: bool,
        channels: &[Name],
        last: &mut LastTurn,
    ) -> bool {
        let done = self.set_channels(gpu, disable, channels, last);
        for (client, handle) in std::mem::take(&mut last.gone) {
            self.state.books().write(Record::Ungroup { client, handle });
        }
        if let Some(done) = done.filter(|_| !channels.is_empty()) {
            self.slices.note_share_tried(gpu, "FIFO_DISABLE_CHANNELS", done);
        }
        done.is_some_and(|done| done.is_ok())
    }

    /// Takes channels off a GPU, or back onto it, all that there are: `None` where the driver can't be asked.
    pub(crate) fn set_channels(
        &self,
        gpu: usize,
        disable: bool,
        channels: &[Name],
        last: &mut LastTurn,
    ) -> Option<Result<(), Failure>> {
        if channels.is_empty() {
            return Some(Ok(()));
        }
        let own = self.driver.own_client()?;
        let set = |channels: &[Name]| own.set_channels(&self.state.release, gpu, disable, channels);
        let asked = Instant::now();
        let mut refused = None;
        for some in channels.chunks(MOST_CHANNELS) {
            // All or none: one of them isn't there, or not yet.
            if set(some).is_err() {
                let there = self.those_there(&own, some, last);
                if !there.is_empty() && set(&there).is_err() {
                    refused = there.iter().find_map(|channel| set(&[*channel]).err()).or(refused);
                }
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
        channels: &[Name],
        last: &mut LastTurn,
    ) -> Vec<Name> {
        let mut there = Vec::new();
        for channel in channels {
            let presence = own.presence(&self.state.release, channel.0, channel.1);
            if presence == Presence::There {
                last.missing.remove(channel);
                there.push(*channel);
                continue;
            }
            if !own.can_tell(&self.state.release) {
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
        let channels: BTreeMap<Name, Name> =
            (0..20).map(|number| ((1, 100 + number), (1, number / 2))).collect();
        let busy: Vec<Name> = (0..9).map(|group| (1, group)).collect();
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
