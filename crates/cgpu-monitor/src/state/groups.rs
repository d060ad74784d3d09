//! Channel groups: how many the container has on each of its GPUs, and how many it may have.
//!
//! For each group the driver takes memory for context buffers, 8 MiB on an H100. This memory is in no process's driver
//! usage and in no quota (`kchangrpapiConstruct_IMPL` reserves it, kernel_channel_group_api.c). A channel outside a
//! group has a group of its own (`kchannelConstruct_IMPL`, kernel_channel.c). So the number of groups is limited. A
//! group is entered before the driver makes it, or when the driver has made it, and forgotten when it is freed. At the
//! limit the monitor searches for groups that ended without a call of their own.

use std::collections::{BTreeMap, BTreeSet};

use crate::snapshot::{Reach, Record};
use cgpu_core::ledger::Process;
use cgpu_core::sched::{DEFAULT_SLICE_US, Period, slice_us};
use nvrm::channel::ENGINE_GRAPHICS;

/// The most groups of a container, on all its GPUs together.
pub(crate) const MOST_GROUPS: usize = 32768;

/// The slice in microseconds that CUDA asks for, for each group that computes.
const COMPUTE_SLICE_US: u64 = 2048;

/// Whether groups for this engine compute: their kernels wait for each other's.
pub(crate) fn computes(engine: u32) -> bool {
    engine <= ENGINE_GRAPHICS
}

/// A channel group, or a channel outside groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Group {
    gpu: usize,
    parent: u32,
    /// Whether the driver is known to have made it. Otherwise its call was only passed through.
    pub(crate) certain: bool,
    pub(crate) reach: Option<Reach>,
    /// The slice in microseconds that the monitor has set; `None` where it set none or doesn't know.
    slice_us: Option<u64>,
    /// The slice in microseconds that the program asked for and that the reply said it has.
    asked_us: Option<u64>,
}

/// A slice that is to be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScheduledSlice {
    pub(crate) client: u32,
    pub(crate) handle: u32,
    pub(crate) reach: Reach,
    pub(crate) us: u64,
}

/// The groups that are known.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    /// By client and handle.
    all: BTreeMap<(u32, u32), Group>,
}

impl Groups {
    pub(crate) fn contains(&self, client: u32, handle: u32) -> bool {
        self.all.contains_key(&(client, handle))
    }

    /// The GPU of a group; `None` where the group isn't known.
    pub(crate) fn gpu(&self, client: u32, handle: u32) -> Option<usize> {
        self.all.get(&(client, handle)).map(|group| group.gpu)
    }

    /// The GPU and the engine of a group that was certainly made. The engine is 0 where it isn't known.
    pub(crate) fn engine(&self, client: u32, handle: u32) -> Option<(usize, u32)> {
        let group = self.all.get(&(client, handle)).filter(|group| group.certain)?;
        Some((group.gpu, group.reach.map_or(0, |reach| reach.engine)))
    }

    /// How many groups a GPU has.
    pub(crate) fn count(&self, gpu: usize) -> usize {
        self.all.values().filter(|group| group.gpu == gpu).count()
    }

    /// Whether one more group can be known.
    pub(crate) fn has_capacity(&self) -> bool {
        self.all.len() < MOST_GROUPS
    }

    /// The groups that are freed with an object: with a client all its groups, with a device those below it.
    pub(crate) fn freed(&self, client: u32, handle: u32) -> Vec<(u32, u32)> {
        let of_client = self.all.range((client, 0)..=(client, u32::MAX));
        let is_freed = |(own, group): (&(u32, u32), &Group)| {
            handle == client || own.1 == handle || group.parent == handle
        };
        of_client.filter(|of| is_freed(*of)).map(|(own, _)| *own).collect()
    }

    pub(crate) fn replay(&mut self, record: Record) {
        match record {
            Record::Group { gpu, client, parent, handle, certain, reach } => {
                let (slice_us, asked_us) = (None, None);
                let group = Group { gpu, parent, certain, reach, slice_us, asked_us };
                self.all.insert((client, handle), group);
            }
            Record::Ungroup { client, handle } => {
                self.all.remove(&(client, handle));
            }
            _ => {}
        }
    }

    /// The records that make these groups from nothing.
    pub(crate) fn records(&self) -> impl Iterator<Item = Record> {
        let all = self.all.iter();
        all.map(|((client, handle), group)| Record::Group {
            gpu: group.gpu,
            client: *client,
            parent: group.parent,
            handle: *handle,
            certain: group.certain,
            reach: group.reach,
        })
    }

    /// How many groups on a GPU compute, of those whose process `counts`.
    fn computing(&self, gpu: usize, counts: impl Fn(Process) -> bool) -> usize {
        let computes = |group: &&Group| {
            let reach = group.reach.filter(|reach| counts(reach.process));
            group.gpu == gpu && reach.is_some_and(|reach| computes(reach.engine))
        };
        self.all.values().filter(computes).count()
    }

    /// The groups on a GPU that compute, of processes that live and don't rest, in order.
    pub(crate) fn busy(
        &self,
        gpu: usize,
        living: &BTreeSet<Process>,
        resting: &BTreeSet<Process>,
    ) -> Vec<(u32, u32)> {
        let is_busy = |(_, group): &(&(u32, u32), &Group)| {
            let is_busy = |reach: Reach| {
                computes(reach.engine)
                    && living.contains(&reach.process)
                    && !resting.contains(&reach.process)
            };
            group.gpu == gpu && group.reach.is_some_and(is_busy)
        };
        self.all.iter().filter(is_busy).map(|(name, _)| *name).collect()
    }

    /// The living processes that have groups on a GPU that compute.
    pub(crate) fn computing_processes(
        &self,
        gpu: usize,
        living: &BTreeSet<Process>,
    ) -> BTreeSet<Process> {
        let on_gpu = self.all.values().filter(|group| group.gpu == gpu);
        let reaches = on_gpu.filter_map(|group| group.reach);
        let computing = reaches.filter(|reach| computes(reach.engine));
        computing.map(|reach| reach.process).filter(|process| living.contains(process)).collect()
    }

    /// The slice in microseconds that a group is to have. Without a round the monitor sets no slices: then it is the
    /// slice that the program asked for, or the one that the group had at first.
    fn wanted_us(group: &Group, reach: Reach, round: Option<Period>, computing: usize) -> u64 {
        match round {
            Some(round) if computes(reach.engine) => slice_us(round, computing),
            Some(round) => slice_us(round, 1),
            None if computes(reach.engine) => group.asked_us.unwrap_or(COMPUTE_SLICE_US),
            None => group.asked_us.unwrap_or(DEFAULT_SLICE_US),
        }
    }

    /// The groups on a GPU whose slice has to be set again. Groups of idle processes don't count for the slices of
    /// others. Their own slices count all groups: so a process that wakes has the slice that each has while all are
    /// busy.
    pub(crate) fn scheduled_slices(
        &self,
        gpu: usize,
        round: Option<Period>,
        living: &BTreeSet<Process>,
        resting: &BTreeSet<Process>,
    ) -> Vec<ScheduledSlice> {
        let all = self.computing(gpu, |process| living.contains(&process));
        let busy =
            self.computing(gpu, |process| living.contains(&process) && !resting.contains(&process));
        let on_gpu = self.all.iter().filter(|(_, group)| group.gpu == gpu);
        let due = on_gpu.filter_map(|((client, handle), group)| {
            let reach = group.reach.filter(|reach| living.contains(&reach.process))?;
            // A slice that the monitor never set is as the program has it.
            let is_ours = round.is_some() || group.slice_us.is_some();
            let computing = if resting.contains(&reach.process) { all } else { busy };
            let us = Self::wanted_us(group, reach, round, computing);
            let is_due = is_ours && group.slice_us != Some(us);
            is_due.then_some(ScheduledSlice { client: *client, handle: *handle, reach, us })
        });
        due.collect()
    }

    /// The groups on a GPU, by client and handle.
    pub(crate) fn on(&self, gpu: usize) -> Vec<((u32, u32), Group)> {
        let on_gpu = self.all.iter().filter(|(_, group)| group.gpu == gpu);
        on_gpu.map(|(name, group)| (*name, *group)).collect()
    }

    /// The group with this name.
    pub(crate) fn named(&self, name: (u32, u32)) -> Option<Group> {
        self.all.get(&name).copied()
    }

    /// Notes that a slice was set, or can't be set.
    pub(crate) fn note_slice(&mut self, due: &ScheduledSlice) {
        if let Some(group) = self.all.get_mut(&(due.client, due.handle)) {
            group.slice_us = Some(due.us);
        }
    }

    /// Notes the slice in microseconds that the program asked for.
    pub(crate) fn note_asked_slice(&mut self, client: u32, handle: u32, us: u64) {
        if let Some(group) = self.all.get_mut(&(client, handle)) {
            group.asked_us = Some(us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(gpu: usize, client: u32, parent: u32, handle: u32) -> Record {
        let reach = Reach { process: Process(client.into()), descriptor: 3, engine: 1 };
        let certain = handle != 12;
        Record::Group { gpu, client, parent, handle, certain, reach: Some(reach) }
    }

    /// On whichever GPUs.
    #[test]
    fn a_container_has_no_more_than_the_most() {
        let mut groups = Groups::default();
        for number in 0..u32::try_from(MOST_GROUPS).unwrap() {
            assert!(groups.has_capacity());
            let (gpu, client, parent, handle) = ((number % 64) as usize, 1, 2, number);
            groups.replay(Record::Group {
                gpu,
                client,
                parent,
                handle,
                certain: true,
                reach: None,
            });
        }
        assert!(!groups.has_capacity());
        groups.replay(Record::Ungroup { client: 1, handle: 7 });
        assert!(groups.has_capacity());
    }

    /// Channel groups are counted by GPU, and are freed with the objects above them.
    #[test]
    fn groups_count_per_gpu_and_free_with_parents() {
        let mut groups = Groups::default();
        for record in
            [group(0, 1, 10, 11), group(0, 1, 10, 12), group(1, 1, 20, 21), group(0, 2, 10, 11)]
        {
            groups.replay(record);
        }
        assert_eq!((groups.count(0), groups.count(1), groups.count(2)), (3, 1, 0));
        assert_eq!(groups.gpu(1, 21), Some(1));
        assert_eq!(groups.freed(1, 11), [(1, 11)]);
        assert_eq!(groups.freed(1, 10), [(1, 11), (1, 12)]);
        assert_eq!(groups.freed(1, 1), [(1, 11), (1, 12), (1, 21)]);
        assert_eq!(groups.freed(3, 3), []);
        let mut again = Groups::default();
        groups.records().for_each(|record| again.replay(record));
        assert_eq!(again.all, groups.all);
        again.replay(Record::Ungroup { client: 2, handle: 11 });
        assert_eq!(again.count(0), 2);
    }
}
