//! Takes the turns of containers whose monitors are gone: see [`orphans`](crate::compute::orphans).

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::compute::last_turn::{LastTurn, now_us};
use crate::compute::orphans::{
    NeighbourState, Orphan, Orphans, read_channels, rest_of_ring, write_channels,
};
use crate::compute::switch::switch_channels;
use crate::gate::launch::MonitorDir;
use crate::gate::settings::{Gpu, Settings};
use crate::processes::end_if_taken;
use crate::shared::Monitor;
use crate::state::ChannelName;
use cgpu_host::events::{Event, EventSink};
use cgpu_host::process::pidfd;
use cgpu_host::registry::{Record, Registry};

/// How soon monitors are looked at again where the state of one can't be told, in microseconds.
const RETRY_US: u64 = 1_000_000;

/// Writes which channels the container has on a GPU, where they differ from those that were written last.
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
        Err(error) => tracing::debug!(%error, "channels can't be told to other monitors"),
    }
}

/// Takes the turns of containers on a GPU whose monitors are gone. Returns when to look again, by [`now_us`].
pub(crate) fn take_turns_of_orphans(
    monitor: &Monitor,
    gpu: usize,
    orphans: &mut Orphans,
) -> Option<u64> {
    let now = now_us();
    let changed = monitor.shares.frame_if_not(gpu, orphans.turns.as_ref());
    if changed.is_some() || orphans.look_us.is_some_and(|look_us| look_us <= now) {
        if let Some(turns) = changed {
            orphans.turns = turns;
        }
        look_for_orphans(monitor, gpu, orphans);
    }
    let mut look_us = orphans.look_us;
    let frame_us = orphans.turns.as_ref().map_or(0, |turns| turns.frame_us);
    for orphan in orphans.all.values_mut() {
        let (on, next) = orphan.last.times.turn(frame_us, &orphan.spans, now);
        switch_orphan(monitor, gpu, orphan, on);
        look_us = look_us.into_iter().chain(next).min();
    }
    look_us
}

/// Brings the containers onto a GPU whose turns this monitor took, because this monitor ends.
pub(crate) fn end_orphan_turns(monitor: &Monitor, gpu: usize, orphans: &mut Orphans) {
    for orphan in orphans.all.values_mut() {
        switch_orphan(monitor, gpu, orphan, true);
    }
}

fn switch_orphan(monitor: &Monitor, gpu: usize, orphan: &mut Orphan, on: bool) {
    // This monitor doesn't hear of channels that the orphan makes, so their numbers don't matter.
    let all = orphan.channels.iter().map(|channel| (*channel, 0)).collect();
    let off = orphan.channels.iter().copied().filter(|_| !on).collect();
    let done = switch_channels(monitor, gpu, &all, &off, &mut orphan.last);
    let gone = std::mem::take(&mut orphan.last.gone);
    orphan.channels.retain(|channel| !gone.contains(channel));
    // Where the driver refused, the next turn tries again.
    if done.is_none_or(|done| done.refused.is_some()) {
        tracing::debug!(gpu, on, "channels of a container whose monitor is gone aren't switched");
    }
}

fn look_for_orphans(monitor: &Monitor, gpu: usize, orphans: &mut Orphans) {
    (orphans.watched, orphans.look_us) = (None, None);
    let mut before = std::mem::take(&mut orphans.all);
    let no_spans = BTreeMap::new();
    let spans = orphans.turns.as_ref().map_or(&no_spans, |turns| &turns.spans);
    let Some(of) = monitor.settings.gpus.get(gpu) else { return };
    for (name, spans) in rest_of_ring(&monitor.settings.short_id, spans) {
        let place = MonitorDir::of(&monitor.settings.state_dir, name);
        match NeighbourState::of(&place, &of.uuid) {
            NeighbourState::Alive(process) => {
                let watched = pidfd(process.pid).ok();
                // The pid may belong to another process by now.
                orphans.watched = watched.filter(|_| process.alive()).map(Arc::new);
                if orphans.watched.is_none() {
                    orphans.look_us = Some(now_us() + RETRY_US);
                }
                break;
            }
            NeighbourState::Gone => {
                let known = before.remove(name);
                let orphan = known.or_else(|| new_orphan(monitor, gpu, name, &place));
                if let Some(orphan) = orphan {
                    let orphan = Orphan { spans: spans.clone(), ..orphan };
                    orphans.all.insert(name.to_owned(), orphan);
                }
            }
            NeighbourState::Unknown => orphans.look_us = Some(now_us() + RETRY_US),
        }
    }
    // These containers have no turns any more, or are gone. Those that are there stay on the GPU.
    for orphan in before.values_mut() {
        switch_orphan(monitor, gpu, orphan, true);
    }
}

/// Tells of a neighbour whose monitor has ended before it, unless somebody has told of it.
fn report_loss(monitor: &Monitor, name: &str, place: &MonitorDir) {
    let state_dir = &monitor.settings.state_dir;
    let records = Registry::look(state_dir, String::new()).and_then(|all| all.records());
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
    let look = || match gpus.len() == plan.gpus.len() {
        true => end_if_taken(first, nodes, &monitor.release, &gpus).map_err(drop),
        // It has GPUs that this container doesn't have.
        false => Err(()),
    };
    // Otherwise the next create or `cgpu gc` looks.
    let _ = place.look_after_lost(report, look);
}

fn new_orphan(monitor: &Monitor, gpu: usize, name: &str, place: &MonitorDir) -> Option<Orphan> {
    match read_channels(place, &monitor.settings.gpus.get(gpu)?.uuid) {
        Ok(channels) => {
            report_loss(monitor, name, place);
            Some(Orphan { channels, ..Orphan::default() })
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
