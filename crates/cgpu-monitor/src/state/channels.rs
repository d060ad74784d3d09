//! Channels that compute. The monitor takes them off the GPU while it isn't the container's turn.
//!
//! A channel is entered before the driver makes it, when its call is passed through. It is forgotten when it is freed,
//! or when its client is found to be gone. A channel that asks for no handle isn't known, because the driver chooses
//! its handle; CUDA names all its channels.

use std::collections::{BTreeMap, BTreeSet};

use crate::snapshot::Record;
use crate::state::groups::Groups;
use cgpu_core::ledger::Process;

/// A channel's client, and its handle there.
pub(crate) type ChannelName = (u32, u32);

/// The most channels that are known. CUDA makes eight of a kind for a program.
pub(crate) const MOST_CHANNELS: u32 = 4096;

/// A channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Channel {
    gpu: usize,
    /// The channel's group; for a channel outside groups, the object that it hangs below.
    parent: u32,
    process: Process,
    /// A number that no other channel has, not even a later one of the same name.
    number: u64,
}

/// The channels that are known.
#[derive(Debug, Default)]
pub(crate) struct Channels {
    all: BTreeMap<ChannelName, Channel>,
    made: u64,
}

impl Channels {
    pub(crate) fn replay(&mut self, record: Record) {
        match record {
            Record::Channel { gpu, client, parent, handle, process } => {
                self.made += 1;
                let channel = Channel { gpu, parent, process, number: self.made };
                self.all.insert((client, handle), channel);
            }
            Record::Ungroup { client, handle } => {
                self.all.remove(&(client, handle));
            }
            _ => {}
        }
    }

    /// The records that make these channels from nothing.
    pub(crate) fn records(&self) -> impl Iterator<Item = Record> {
        let all = self.all.iter();
        all.map(|((client, handle), channel)| Record::Channel {
            gpu: channel.gpu,
            client: *client,
            parent: channel.parent,
            handle: *handle,
            process: channel.process,
        })
    }

    /// The channels on a GPU that living processes made.
    fn all_on(
        &self,
        gpu: usize,
        living: &BTreeSet<Process>,
    ) -> impl Iterator<Item = (&ChannelName, &Channel)> {
        let is_on =
            move |channel: &Channel| channel.gpu == gpu && living.contains(&channel.process);
        self.all.iter().filter(move |(_, channel)| is_on(channel))
    }

    /// The channels on a GPU that living processes made, each with the name of the object above it: its group, if it is
    /// in one.
    pub(crate) fn on(
        &self,
        gpu: usize,
        living: &BTreeSet<Process>,
    ) -> BTreeMap<ChannelName, (u32, u32)> {
        let all = self.all_on(gpu, living);
        all.map(|(name, channel)| (*name, (name.0, channel.parent))).collect()
    }

    /// The channels on a GPU that living processes made, each with its number: a new channel under an old name has
    /// another number.
    pub(crate) fn numbered(
        &self,
        gpu: usize,
        living: &BTreeSet<Process>,
    ) -> BTreeMap<ChannelName, u64> {
        self.all_on(gpu, living).map(|(name, channel)| (*name, channel.number)).collect()
    }

    /// The channels on a GPU that living processes made and that are in no known group.
    pub(crate) fn outside_groups(
        &self,
        gpu: usize,
        living: &BTreeSet<Process>,
        groups: &Groups,
    ) -> Vec<(u32, u32)> {
        let all = self.on(gpu, living).into_iter();
        let outside = all.filter(|(_, (client, group))| !groups.contains(*client, *group));
        outside.map(|(name, _)| name).collect()
    }

    /// Whether the channel is known.
    pub(crate) fn contains(&self, name: (u32, u32)) -> bool {
        self.all.contains_key(&name)
    }

    /// Forgets the channels of a process that has ended.
    pub(crate) fn forget(&mut self, process: Process) {
        self.all.retain(|_, channel| channel.process != process);
    }

    /// Whether one more channel can be known.
    pub(crate) fn has_capacity(&self) -> bool {
        self.all.len() < MOST_CHANNELS as usize
    }

    /// The channels that are freed with an object: with a client all its channels, with a group those in it. `groups`
    /// are the groups that are freed with the object.
    pub(crate) fn freed(&self, client: u32, handle: u32, groups: &[(u32, u32)]) -> Vec<(u32, u32)> {
        let of_client = self.all.range((client, 0)..=(client, u32::MAX));
        let is_freed = |(own, channel): &(&(u32, u32), &Channel)| {
            let above = channel.parent;
            handle == client
                || own.1 == handle
                || above == handle
                || groups.contains(&(client, above))
        };
        of_client.filter(is_freed).map(|(own, _)| *own).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Channels are those of a GPU, and are freed with the objects above them.
    #[test]
    fn channels_are_per_gpu_and_freed_with_parents() {
        let mut channels = Channels::default();
        let channel = |gpu, client, parent, handle| Record::Channel {
            gpu,
            client,
            parent,
            handle,
            process: Process(client.into()),
        };
        let all = [channel(0, 1, 10, 11), channel(0, 1, 10, 12), channel(1, 1, 20, 21)];
        all.into_iter().chain([channel(0, 2, 10, 11)]).for_each(|one| channels.replay(one));
        let living = |all: &[u64]| all.iter().map(|process| Process(*process)).collect();
        let on = |channels: &Channels, gpu, all: &[u64]| -> Vec<_> {
            channels.on(gpu, &living(all)).into_iter().collect()
        };
        let [one, other, third] = [((1, 11), (1, 10)), ((1, 12), (1, 10)), ((2, 11), (2, 10))];
        assert_eq!(on(&channels, 0, &[1, 2]), [one, other, third]);
        assert_eq!(on(&channels, 0, &[2]), [third]);
        let number = |channels: &Channels| channels.numbered(0, &living(&[2]))[&(2, 11)];
        let before = number(&channels);
        channels.replay(channel(0, 2, 10, 11));
        assert_ne!(number(&channels), before, "it was recreated");
        let mut groups = Groups::default();
        let outside = |groups: &Groups| channels.outside_groups(0, &living(&[1]), groups);
        assert_eq!(outside(&groups), [(1, 11), (1, 12)]);
        let (client, parent, handle) = (1, 1, 10);
        let group = Record::Group { gpu: 0, client, parent, handle, certain: true, reach: None };
        groups.replay(group);
        assert_eq!(outside(&groups), []);
        assert!(channels.contains((1, 12)) && !channels.contains((1, 10)));
        assert_eq!(channels.freed(1, 12, &[]), [(1, 12)]);
        assert_eq!(channels.freed(1, 10, &[]), [(1, 11), (1, 12)]);
        assert_eq!(channels.freed(1, 5, &[(1, 20)]), [(1, 21)], "below a device that is freed");
        assert_eq!(channels.freed(1, 1, &[]).len(), 3);
        let mut again = Channels::default();
        channels.records().for_each(|record| again.replay(record));
        again.replay(Record::Ungroup { client: 1, handle: 21 });
        assert_eq!(on(&again, 1, &[1]), []);
        for handle in 0..MOST_CHANNELS {
            again.replay(channel(0, 3, 1, handle));
        }
        assert!(!again.has_capacity());
        again.forget(Process(3));
        assert!(again.has_capacity());
        assert_eq!(on(&again, 0, &[1, 2, 3]).len(), 3);
    }
}
