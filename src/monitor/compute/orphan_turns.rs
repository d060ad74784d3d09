//! Takes the turns of containers whose monitors are gone: see [`orphans`](crate::monitor::compute::orphans).

use std::collections::BTreeMap;
use std::sync::Arc;

use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::gate::launch::MonitorDir;
use crate::monitor::compute::last_turn::{LastTurn, now_us};
use crate::monitor::compute::orphans::{
    KeeperIs, Orphan, Orphans, read_channels, ring, write_channels,
};
use crate::monitor::compute::turns::Turns;
use crate::monitor::state::channels::ChannelName;

/// How soon it's looked again who is there, where that could not be told, in microseconds.
const RETRY_US: u64 = 1_000_000;

impl Turns {
    /// Writes the channels that the container has on a GPU, where they are others than were told.
    pub(crate) fn tell_channels(&self, gpu: usize, channels: &[ChannelName], last: &mut LastTurn) {
        if self.state.settings.place.as_os_str().is_empty()
            || last.told.as_deref() == Some(channels)
        {
            return;
        }
        let Some(of) = self.state.settings.gpus.get(gpu) else { return };
        match write_channels(&self.state.settings.place, &of.uuid, channels) {
            Ok(()) => last.told = Some(channels.to_vec()),
            Err(error) => tracing::debug!(%error, "channels can't be told to other monitors"),
        }
    }

    /// Takes the turns of those of a GPU whose monitors are gone; when to look again.
    pub(crate) fn take_turns_of_orphans(&self, gpu: usize, orphans: &mut Orphans) -> Option<u64> {
        let now = now_us();
        let changed = self.slices.shares.frame_if_not(gpu, orphans.turns.as_ref());
        if changed.is_some() || orphans.look_us.is_some_and(|look_us| look_us <= now) {
            if let Some(turns) = changed {
                orphans.turns = turns;
            }
            self.look_for_orphans(gpu, orphans);
        }
        let mut look_us = orphans.look_us;
        let frame_us = orphans.turns.as_ref().map_or(0, |turns| turns.frame_us);
        for orphan in orphans.all.values_mut() {
            let (on, next) = orphan.last.means.turn(frame_us, &orphan.spans, now);
            self.set_orphan(gpu, orphan, on);
            look_us = look_us.into_iter().chain(next).min();
        }
        look_us
    }

    /// Brings those onto their GPU whose turns this monitor took, as it ends.
    pub(crate) fn leave_orphans(&self, gpu: usize, orphans: &mut Orphans) {
        for orphan in orphans.all.values_mut() {
            self.set_orphan(gpu, orphan, true);
        }
    }

    fn set_orphan(&self, gpu: usize, orphan: &mut Orphan, on: bool) {
        // It makes no channels that this monitor hears of.
        let all = orphan.channels.iter().map(|channel| (*channel, 0)).collect();
        let off = orphan.channels.iter().copied().filter(|_| !on).collect();
        let done = self.have_off(gpu, &all, &off, &mut orphan.last);
        let gone = std::mem::take(&mut orphan.last.gone);
        orphan.channels.retain(|channel| !gone.contains(channel));
        // Where it was refused, the next turn tries again.
        if done.is_none_or(|done| done.refused.is_some()) {
            tracing::debug!(
                gpu,
                on,
                "channels of a container whose monitor is gone aren't switched"
            );
        }
    }

    fn look_for_orphans(&self, gpu: usize, orphans: &mut Orphans) {
        (orphans.watched, orphans.look_us) = (None, None);
        let mut before = std::mem::take(&mut orphans.all);
        let no_spans = BTreeMap::new();
        let spans = orphans.turns.as_ref().map_or(&no_spans, |turns| &turns.spans);
        let Some(of) = self.state.settings.gpus.get(gpu) else { return };
        for (name, spans) in ring(&self.state.settings.short_id, spans) {
            let place = MonitorDir::of(&self.state.settings.state_dir, name);
            match KeeperIs::of(&place, &of.uuid) {
                KeeperIs::Alive(keeper) => {
                    let pid = Pid::from_raw(keeper.pid);
                    let watched = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
                    // The pid may be another's by now.
                    orphans.watched = watched.filter(|_| keeper.alive()).map(Arc::new);
                    if orphans.watched.is_none() {
                        orphans.look_us = Some(now_us() + RETRY_US);
                    }
                    break;
                }
                KeeperIs::Gone => {
                    let known = before.remove(name);
                    let orphan = known.or_else(|| self.adopt(gpu, name, &place));
                    if let Some(orphan) = orphan {
                        let orphan = Orphan { spans: spans.clone(), ..orphan };
                        orphans.all.insert(name.to_owned(), orphan);
                    }
                }
                KeeperIs::Unknown => orphans.look_us = Some(now_us() + RETRY_US),
            }
        }
        // Nobody's turns any more, or gone: where they are there, they stay on.
        for orphan in before.values_mut() {
            self.set_orphan(gpu, orphan, true);
        }
    }

    fn adopt(&self, gpu: usize, name: &str, place: &MonitorDir) -> Option<Orphan> {
        match read_channels(place, &self.state.settings.gpus.get(gpu)?.uuid) {
            Ok(channels) => {
                tracing::warn!(
                    gpu,
                    container = name,
                    channels = channels.len(),
                    "the monitor of another container on the GPU is gone: this one takes its turns"
                );
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
}
