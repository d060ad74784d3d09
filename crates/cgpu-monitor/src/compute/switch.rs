//! Takes channels off a GPU, and brings others back.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::compute::last_turn::{LastTurn, Numbered};
use crate::driver::{MonitorClient, Presence, own_client};
use crate::node::Failure;
use crate::shared::Monitor;
use crate::state::ChannelName;
use nvrm::channel::MOST_CHANNELS;

/// For how long a channel that the driver doesn't have may still be pending.
const PENDING_TIMEOUT: Duration = Duration::from_secs(1);

/// What came of taking channels off a GPU and bringing others back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Switched {
    /// Whether the driver was asked for anything.
    pub(crate) is_asked: bool,
    pub(crate) refused: Option<Failure>,
}

/// Takes the channels `off` off a GPU, and brings all others of `all` back that exist. `None` if the driver can't be
/// asked.
pub(crate) fn switch_channels(
    monitor: &Monitor,
    gpu: usize,
    all: &Numbered,
    off: &BTreeSet<ChannelName>,
    last: &mut LastTurn,
) -> Option<Switched> {
    last.forget_others(all);
    let on = last.to_enable(all, off);
    let enabled = set_channels(monitor, gpu, false, &on, last)?;
    last.note_enabled_first();
    let goes = last.to_disable(all, off);
    let disabled = set_channels(monitor, gpu, true, &goes, last)?;
    let is_asked = !on.is_empty() || !goes.is_empty();
    Some(Switched { is_asked, refused: enabled.and(disabled).err() })
}

/// Takes channels off a GPU, or brings them back, all that exist. `None` if the driver can't be asked.
fn set_channels(
    monitor: &Monitor,
    gpu: usize,
    disable: bool,
    channels: &Numbered,
    last: &mut LastTurn,
) -> Option<Result<(), Failure>> {
    if channels.is_empty() {
        return Some(Ok(()));
    }
    let own = own_client(monitor)?;
    let set = |disable: bool, channels: &[ChannelName]| own.set_channels(gpu, disable, channels);
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
        // A channel doesn't exist, or not yet. How many of the others were disabled isn't known.
        let again = |channels: &[ChannelName]| {
            if disable {
                set(false, channels)?;
            }
            set(disable, channels)
        };
        let there = sort_out_missing(&own, some, last);
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
    last.times.note_duration(disable, asked.elapsed());
    Some(refused.map_or(Ok(()), Err))
}

/// Returns the channels that the driver has, and notes the others: in `last.gone` a channel whose client is gone, or
/// that is missing for longer than it can be pending; in `last.missing` any other.
fn sort_out_missing(
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
        if !own.can_report() {
            continue;
        }
        let since = last.missing.entry(*channel).or_insert_with(Instant::now);
        if presence == Presence::NoClient || since.elapsed() >= PENDING_TIMEOUT {
            last.missing.remove(channel);
            last.gone.push(*channel);
        }
    }
    there
}
