//! The container's turns on GPUs whose time is divided by turns: its channels are taken off, and brought back.
//!
//! The file of shares says when the container may run, as spans of a frame on the host's clock: monitors need not speak
//! to each other. Each call is made as much early as it takes. The container whose turn begins comes on while the one
//! before it goes off, so that the GPU isn't idle between, and no sooner: if none was before it, it would get more than
//! its time.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::compute::last_turn::{LastTurn, Numbered, SwitchTimes, now_us};
use crate::compute::slices::{
    find_resting_processes, note_share_tried, period_of_groups, read_shares, set_slices,
};
use crate::compute::switch::switch_channels;
use crate::compute::unsupervised_turns::{
    end_unsupervised_turns, report_channels, take_turns_of_unsupervised,
};
use crate::shared::Monitor;
use crate::snapshot::Record;
use crate::state::ChannelName;
use crate::sync::spawn;
use cgpu_core::sched::{Span, batch_windows, batches};

/// How often a monitor that ends tries to end turns, and how long it waits in between.
const ENDING_TRIES: u32 = 20;

const ENDING_WAIT: Duration = Duration::from_millis(5);

/// How soon a call that the driver refused is made again, in microseconds.
const RETRY_US: u64 = 1_000_000;

/// How soon the monitor tries again to set a slice for which it had no file, in milliseconds; twice as long each
/// time, up to the longest.
const RETRY_MS: u16 = 1000;

const LONGEST_RETRY_MS: u16 = 32_000;

/// Which channels of a GPU run at times only, and when.
#[derive(Debug, Default)]
struct Timetable {
    /// Each part has a frame's length in microseconds, the spans in which its channels run, and these channels.
    parts: Vec<(u64, Vec<Span>, Vec<ChannelName>)>,
}

impl Timetable {
    /// The channels that are to be off at `now_us`, allowing for the time of calls that are made then; and when to
    /// check again.
    fn off(&self, times: SwitchTimes, now_us: u64) -> (BTreeSet<ChannelName>, Option<u64>) {
        let (mut off, mut checks) = (BTreeSet::new(), None);
        for (frame_us, spans, channels) in &self.parts {
            let (on, next) = times.turn(*frame_us, spans, now_us);
            if !on {
                off.extend(channels);
            }
            checks = checks.into_iter().chain(next).min();
        }
        (off, checks)
    }
}

/// The turns and the channels of each batch of busy groups; empty if all groups are in one.
fn in_cohorts(
    channels: &BTreeMap<ChannelName, ChannelName>,
    busy: &[ChannelName],
    batches: usize,
) -> Vec<(u64, Vec<Span>, Vec<ChannelName>)> {
    if batches < 2 {
        return Vec::new();
    }
    let batch = |(number, groups): (usize, &[ChannelName])| {
        let (frame_us, span) = batch_windows(number, batches);
        let is_in = |(_, group): &(&ChannelName, &ChannelName)| groups.contains(group);
        let channels = channels.iter().filter(is_in).map(|(channel, _)| *channel);
        (frame_us, vec![span], channels.collect())
    };
    busy.chunks(busy.len().div_ceil(batches).max(1)).enumerate().map(batch).collect()
}

/// Sets slices when shares, groups or processes change.
pub(crate) fn set_slices_forever(monitor: &Arc<Monitor>) {
    let mut retry_ms = RETRY_MS;
    let mut is_resumed = false;
    loop {
        let at_work = monitor.work.begin();
        read_shares(monitor);
        monitor.turns_thread.wake();
        is_resumed = is_resumed || end_turns_of_before(monitor);
        let poll_ms = find_resting_processes(monitor);
        let is_whole = set_slices(monitor) && is_resumed;
        // The number of groups may divide them into batches.
        begin_turns(monitor);
        let again_ms = (!is_whole).then_some(retry_ms);
        retry_ms = if is_whole { RETRY_MS } else { (2 * retry_ms).min(LONGEST_RETRY_MS) };
        let timeout = poll_ms.into_iter().chain(again_ms).min();
        drop(at_work);
        monitor.shares.changed.wait(timeout.map(|ms| Duration::from_millis(ms.into())));
    }
}

/// Starts or wakes the thread that takes turns, if there are any.
fn begin_turns(monitor: &Arc<Monitor>) {
    let has_turns =
        |gpu| monitor.shares.has_frame(gpu) || !timetable(monitor, gpu).0.parts.is_empty();
    if monitor.turns_thread.is_started.load(Ordering::Acquire) {
        return monitor.turns_thread.wake();
    }
    if !(0..monitor.uuids.len()).any(has_turns)
        || monitor.turns_thread.is_started.swap(true, Ordering::AcqRel)
    {
        return;
    }
    let (of, started) = (Arc::clone(monitor), monitor.turns_thread.open_event());
    let started =
        started.and_then(|changed| spawn("turns", move || take_turns_forever(&of, &changed)));
    if let Err(error) = started {
        monitor.turns_thread.is_started.store(false, Ordering::Release);
        tracing::warn!(%error, "turns on GPUs can't be taken: no thread");
    }
}

/// Brings back channels that were taken off before an update, on a GPU that has no turns now. `true` if that is done.
fn end_turns_of_before(monitor: &Monitor) -> bool {
    let mut is_whole = true;
    for gpu in 0..monitor.uuids.len() {
        let (parts, all) = timetable(monitor, gpu);
        if parts.parts.is_empty() {
            is_whole &=
                switch_own_channels(monitor, gpu, &all, &BTreeSet::new(), &mut LastTurn::default());
        }
    }
    is_whole
}

/// Brings all channels back before the monitor ends. Does nothing if the thread that takes turns hangs in the driver.
pub(crate) fn end_turns(monitor: &Monitor) {
    if !monitor.turns_thread.is_started.load(Ordering::Acquire) {
        return;
    }
    let wait = || {
        std::thread::sleep(ENDING_WAIT);
        None
    };
    let over = (0..ENDING_TRIES).find_map(|_| monitor.turns_thread.over.try_lock().or_else(wait));
    let Some(mut over) = over else { return };
    *over = true;
    for gpu in 0..monitor.uuids.len() {
        let (_, all) = timetable(monitor, gpu);
        switch_own_channels(monitor, gpu, &all, &BTreeSet::new(), &mut LastTurn::default());
    }
    let mut unsupervised = monitor.unsupervised.lock();
    for (gpu, unsupervised) in unsupervised.iter_mut().enumerate() {
        end_unsupervised_turns(monitor, gpu, unsupervised);
    }
}

fn take_turns_forever(monitor: &Monitor, changed: &OwnedFd) {
    let mut all: Vec<LastTurn> = monitor.uuids.iter().map(|_| LastTurn::default()).collect();
    loop {
        let at_work = monitor.work.begin();
        let over = monitor.turns_thread.over.lock();
        if *over {
            return;
        }
        let mut unsupervised = monitor.unsupervised.lock();
        let each = all.iter_mut().zip(unsupervised.iter_mut()).enumerate();
        let wakes = each.flat_map(|(gpu, (last, unsupervised))| {
            [take_turn(monitor, gpu, last), take_turns_of_unsupervised(monitor, gpu, unsupervised)]
        });
        let wake_us = wakes.flatten().min();
        let watched: Vec<_> = unsupervised.iter().map(|of| of.watched.clone()).collect();
        drop((unsupervised, over, at_work));
        wait_for_next_turn(monitor, wake_us, changed, &watched);
    }
}

/// Waits until something changes, a watched monitor ends, or the time `wake_us` comes.
fn wait_for_next_turn(
    monitor: &Monitor,
    wake_us: Option<u64>,
    changed: &OwnedFd,
    watched: &[Option<Arc<OwnedFd>>],
) {
    let wait = wake_us.and_then(|wake_us| {
        Timespec::try_from(Duration::from_micros(wake_us.saturating_sub(now_us()))).ok()
    });
    let watched = || (0..).zip(watched).filter_map(|(gpu, pidfd)| Some((gpu, pidfd.as_ref()?)));
    let mut asked = vec![PollFd::new(changed, PollFlags::IN)];
    asked.extend(watched().map(|(_, pidfd)| PollFd::new(pidfd, PollFlags::IN)));
    if !poll(&mut asked, wait.as_ref()).is_ok_and(|ready| ready > 0) {
        return;
    }
    let is_ready = |of: &PollFd<'_>| !of.revents().is_empty();
    let mut ready = asked.iter().map(is_ready);
    if ready.next() == Some(true) {
        let _ = rustix::io::read(changed, &mut [0; 8]);
    }
    let mut unsupervised = monitor.unsupervised.lock();
    for ((gpu, _), _) in watched().zip(ready).filter(|(_, ready)| *ready) {
        if let Some(of) = unsupervised.get_mut::<usize>(gpu) {
            of.poll_now();
        }
    }
}

/// The channels of a GPU that run at times only, and all its channels. The container's channels run in its turns; if it
/// may always run and has more groups than can run at once, each batch of groups runs in its own turns.
fn timetable(monitor: &Monitor, gpu: usize) -> (Timetable, Numbered) {
    let (turns, round) = (monitor.shares.turns(gpu), period_of_groups(monitor, gpu));
    let resting = monitor.shares.resting(gpu);
    let (channels, all, busy) = {
        let state = monitor.state();
        let living = &state.processes;
        let channels = &state.channels;
        let busy = state.groups.busy(gpu, living, &resting);
        (channels.on(gpu, living), channels.numbered(gpu, living), busy)
    };
    let mut parts = match (turns, round) {
        _ if all.is_empty() => Vec::new(),
        (Some((frame_us, spans)), _) => vec![(frame_us, spans, all.keys().copied().collect())],
        (None, Some(round)) => in_cohorts(&channels, &busy, batches(round, busy.len())),
        (None, None) => Vec::new(),
    };
    // A group whose share can't be set never runs.
    let out_of_reach = round.map(|_| monitor.shares.out_of_reach(gpu)).unwrap_or_default();
    let lost = channels.iter().filter(|(_, group)| out_of_reach.contains(group));
    let lost: Vec<ChannelName> = lost.map(|(channel, _)| *channel).collect();
    if !lost.is_empty() {
        parts.push((1, Vec::new(), lost));
    }
    (Timetable { parts }, all)
}

/// Takes the container off a GPU or brings it back, as its turn is. Returns when to check again.
fn take_turn(monitor: &Monitor, gpu: usize, last: &mut LastTurn) -> Option<u64> {
    let (parts, all) = timetable(monitor, gpu);
    if monitor.shares.has_frame(gpu) {
        report_channels(monitor, gpu, &all.keys().copied().collect::<Vec<_>>(), last);
    }
    let now = now_us();
    let (off, next) = parts.off(last.times, now);
    let is_whole = switch_own_channels(monitor, gpu, &all, &off, last);
    next.into_iter().chain((!is_whole).then_some(now + RETRY_US)).min()
}

/// Takes the container's channels `off` off a GPU, and brings all others back. `true` if that is done for all channels
/// that exist.
fn switch_own_channels(
    monitor: &Monitor,
    gpu: usize,
    all: &Numbered,
    off: &BTreeSet<ChannelName>,
    last: &mut LastTurn,
) -> bool {
    let done = switch_channels(monitor, gpu, all, off, last);
    for (client, handle) in std::mem::take(&mut last.gone) {
        monitor.state().write(Record::Ungroup { client, handle });
    }
    let Some(done) = done else { return false };
    if done.is_asked {
        let done = done.refused.map_or(Ok(()), Err);
        note_share_tried(monitor, gpu, "FIFO_DISABLE_CHANNELS", done);
    }
    done.refused.is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channel_groups_run_one_batch_at_a_time() {
        let channels: BTreeMap<ChannelName, ChannelName> =
            (0..20).map(|number| ((1, 100 + number), (1, number / 2))).collect();
        let busy: Vec<ChannelName> = (0..9).map(|group| (1, group)).collect();
        assert!(in_cohorts(&channels, &busy, 1).is_empty());
        let parts = Timetable { parts: in_cohorts(&channels, &busy, 3) };
        let times = SwitchTimes { off_us: 0, on_us: 0 };
        for (now_us, on) in [(50_000, 0..3), (150_000, 3..6), (250_000, 6..9), (350_000, 0..3)] {
            let (off, next) = parts.off(times, now_us);
            let expected = (0..9).filter(|group| !on.contains(group));
            let expected = expected.flat_map(|group| [2 * group, 2 * group + 1]);
            assert_eq!(off, expected.map(|number| (1, 100 + number)).collect(), "{now_us}");
            assert_eq!(next, Some(now_us + 50_000));
        }
    }
}
