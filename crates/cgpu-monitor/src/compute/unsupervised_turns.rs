//! Takes the turns of containers whose monitors have exited: see [`unsupervised`](crate::compute::unsupervised).

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::compute::last_turn::{LastTurn, now_us};
use crate::compute::switch::switch_channels;
use crate::compute::unsupervised::{
    NeighbourState, Unsupervised, UnsupervisedContainers, read_channels, rest_of_ring,
    write_channels,
};
use crate::gate::launch::MonitorDir;
use crate::gate::settings::{Gpu, Settings};
use crate::processes::end_if_taken;
use crate::shared::Monitor;
use crate::state::ChannelName;
use cgpu_host::events::{Event, EventSink};
use cgpu_host::process::pidfd;
use cgpu_host::registry::{Record, Registry};

/// How soon monitors are checked again if the state of one can't be determined, in microseconds.
const RETRY_US: u64 = 1_000_000;

/// Writes which channels the container has on a GPU, if they differ from those that were written last.
pub(crate) fn report_channels(
    monitor: &Monitor,
    gpu: usize,
    channels: &[ChannelName],
    last: &mut LastTurn,
) {
    if monitor.settings.place.as_os_str().is_empty() || last.reported.as_deref() == Some(channels) {
        return;
    }
    let Some(of) = monitor.settings.gpus.get(gpu) else { return };
    match write_channels(&monitor.settings.place, &of.uuid, channels) {
        Ok(()) => last.reported = Some(channels.to_vec()),
        Err(error) => tracing::debug!(%error, "channels can't be reported to other monitors"),
    }
}

/// Takes the turns of containers on a GPU whose monitors have exited. Returns when to check again, by [`now_us`].
pub(crate) fn take_turns_of_unsupervised(
    monitor: &Monitor,
    gpu: usize,
    unsupervised: &mut UnsupervisedContainers,
) -> Option<u64> {
    let now = now_us();
    let changed = monitor.shares.frame_if_not(gpu, unsupervised.turns.as_ref());
    if changed.is_some() || unsupervised.poll_us.is_some_and(|poll_us| poll_us <= now) {
        if let Some(turns) = changed {
            unsupervised.turns = turns;
        }
        find_unsupervised(monitor, gpu, unsupervised);
    }
    let mut poll_us = unsupervised.poll_us;
    let frame_us = unsupervised.turns.as_ref().map_or(0, |turns| turns.frame_us);
    for neighbour in unsupervised.all.values_mut() {
        let (on, next) = neighbour.last.times.turn(frame_us, &neighbour.spans, now);
        switch_unsupervised(monitor, gpu, neighbour, on);
        poll_us = poll_us.into_iter().chain(next).min();
    }
    poll_us
}

/// Brings the containers onto a GPU whose turns this monitor took, because this monitor ends.
pub(crate) fn end_unsupervised_turns(
    monitor: &Monitor,
    gpu: usize,
    unsupervised: &mut UnsupervisedContainers,
) {
    for neighbour in unsupervised.all.values_mut() {
        switch_unsupervised(monitor, gpu, neighbour, true);
    }
}

fn switch_unsupervised(monitor: &Monitor, gpu: usize, neighbour: &mut Unsupervised, on: bool) {
    // Channels that the unsupervised container makes are not reported to this monitor, so their numbers don't matter.
    let all = neighbour.channels.iter().map(|channel| (*channel, 0)).collect();
    let off = neighbour.channels.iter().copied().filter(|_| !on).collect();
    let done = switch_channels(monitor, gpu, &all, &off, &mut neighbour.last);
    let gone = std::mem::take(&mut neighbour.last.gone);
    neighbour.channels.retain(|channel| !gone.contains(channel));
    // If the driver refused, the next turn tries again.
    if done.is_none_or(|done| done.refused.is_some()) {
        tracing::debug!(gpu, on, "channels of a container whose monitor is gone aren't switched");
    }
}

fn find_unsupervised(monitor: &Monitor, gpu: usize, unsupervised: &mut UnsupervisedContainers) {
    (unsupervised.watched, unsupervised.poll_us) = (None, None);
    let mut before = std::mem::take(&mut unsupervised.all);
    let no_spans = BTreeMap::new();
    let spans = unsupervised.turns.as_ref().map_or(&no_spans, |turns| &turns.spans);
    let Some(of) = monitor.settings.gpus.get(gpu) else { return };
    for (name, spans) in rest_of_ring(&monitor.settings.short_id, spans) {
        let place = MonitorDir::of(&monitor.settings.state_dir, name);
        match NeighbourState::of(&place, &of.uuid) {
            NeighbourState::Alive(process) => {
                let watched = pidfd(process.pid).ok();
                // The pid may belong to another process by now.
                unsupervised.watched = watched.filter(|_| process.alive()).map(Arc::new);
                if unsupervised.watched.is_none() {
                    unsupervised.poll_us = Some(now_us() + RETRY_US);
                }
                break;
            }
            NeighbourState::Gone => {
                let known = before.remove(name);
                let neighbour = known.or_else(|| new_unsupervised(monitor, gpu, name, &place));
                if let Some(neighbour) = neighbour {
                    let neighbour = Unsupervised { spans: spans.clone(), ..neighbour };
                    unsupervised.all.insert(name.to_owned(), neighbour);
                }
            }
            NeighbourState::Unknown => unsupervised.poll_us = Some(now_us() + RETRY_US),
        }
    }
    // These containers have no turns any more, or are gone. Those that are there stay on the GPU.
    for neighbour in before.values_mut() {
        switch_unsupervised(monitor, gpu, neighbour, true);
    }
}

/// Reports a neighbour whose monitor has exited before it, unless that was reported already.
fn report_loss(monitor: &Monitor, name: &str, place: &MonitorDir) {
    let state_dir = &monitor.settings.state_dir;
    let records = Registry::open_read_only(state_dir, String::new()).and_then(|all| all.records());
    let neighbour = records.ok().and_then(|all| all.into_iter().find(|of| of.short_id == name));
    // A container that has ended ends its monitor.
    let Some(Record { key, holder, plan, .. }) = neighbour else { return };
    let Some(first) = holder.init().filter(|first| first.alive()) else { return };
    let report =
        |event: Event| EventSink::of_host(state_dir).report(event.of(&key.id, None, &key.root));
    let Settings { nodes, gpus, .. } = &*monitor.settings;
    let theirs = |gpu: &Gpu| {
        let of = plan.gpus.iter().find(|of| of.uuid == gpu.uuid)?;
        Some(Gpu { limit_bytes: of.memory_limit_bytes.unwrap_or(u64::MAX), ..gpu.clone() })
    };
    let gpus: Vec<Gpu> = gpus.iter().filter_map(theirs).collect();
    let check = || match gpus.len() == plan.gpus.len() {
        true => end_if_taken(first, nodes, &monitor.release, &gpus).map_err(drop),
        // It has GPUs that this container doesn't have.
        false => Err(()),
    };
    // Otherwise the next container creation or `cgpu gc` checks.
    let _ = place.handle_closed(report, check);
}

fn new_unsupervised(
    monitor: &Monitor,
    gpu: usize,
    name: &str,
    place: &MonitorDir,
) -> Option<Unsupervised> {
    match read_channels(place, &monitor.settings.gpus.get(gpu)?.uuid) {
        Ok(channels) => {
            report_loss(monitor, name, place);
            Some(Unsupervised { channels, ..Unsupervised::default() })
        }
        Err(error) => {
            tracing::warn!(
                gpu,
                container = name,
                %error,
                "the monitor of another container on the GPU is gone, and what it wrote can't be read: \
                 that container stays on the GPU or off it"
            );
            None
        }
    }
}
