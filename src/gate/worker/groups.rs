//! Channel groups: how many the container has on each of its GPUs, and may have.
//!
//! For each the driver takes memory for context buffers, 8 MiB on an H100, which is in no process's
//! figure and in no quota (`kchangrpapiConstruct_IMPL` reserves it, kernel_channel_group_api.c). A
//! channel outside a group has one of its own (`kchannelConstruct_IMPL`, kernel_channel.c). So their
//! number has a bound. One is entered before the driver makes it, or when it has, and forgotten when it's
//! freed; what went without a call that says so is looked for when the bound is met.

use std::collections::{BTreeMap, BTreeSet};

use super::Shared;
use super::books::Books;
use super::lane::OnLane;
use super::own::Presence;
use super::serve::{Case, Over};
use crate::gate::journal::{Reach, Record};
use crate::ledger::Process;
use crate::rm::call::{Alloc, Object};
use crate::rm::number::{KEPLER_CHANNEL_GROUP_A, NV_ERR_INSUFFICIENT_RESOURCES};
use crate::rm::{Answer, Layout};
use crate::sched::{Round, slice_us};

/// What the classes of all channels end in, and no other class above these: `GF100_CHANNEL_GPFIFO`
/// 0x906f, and so on.
const ANY_CHANNEL: u32 = 0x6f;
const HIGHEST_OBJECT: u32 = 0xff;

/// `NV2080_ENGINE_TYPE_GRAPHICS` (cl2080_notification.h), which also computes.
pub(super) const ENGINE_GRAPHICS: u32 = 1;

/// What a new group has, in microseconds: `kfifoChannelGroupGetDefaultTimeslice_GV100`
/// (kernel_fifo_gv100.c).
const DEFAULT_SLICE_US: u64 = 1024;

/// What CUDA asks for, for each group that computes, in microseconds.
const COMPUTE_SLICE_US: u64 = 2048;

/// Whether a group for that engine is one whose kernels wait for the others'.
fn computes(engine: u32) -> bool {
    engine <= ENGINE_GRAPHICS
}

/// A group, or a channel that is outside one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Group {
    gpu: usize,
    parent: u32,
    /// It was made, and not only let go on.
    certain: bool,
    reach: Option<Reach>,
    /// The slice that we have set, in microseconds; `None` where we have set none, or don't know.
    slice_us: Option<u64>,
    /// The slice that its program asked for, and was told that it has.
    asked_us: Option<u64>,
}

/// A slice that is to be set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DueSlice {
    pub(super) client: u32,
    pub(super) handle: u32,
    pub(super) reach: Reach,
    pub(super) us: u64,
}

/// Those that are known.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// By client and handle.
    all: BTreeMap<(u32, u32), Group>,
}

impl Groups {
    pub(super) fn contains(&self, client: u32, handle: u32) -> bool {
        self.all.contains_key(&(client, handle))
    }

    /// The GPU of a group.
    pub(super) fn gpu(&self, client: u32, handle: u32) -> Option<usize> {
        self.all.get(&(client, handle)).map(|group| group.gpu)
    }

    /// The GPU of a group, and the engine that it is for; 0 where that isn't known.
    fn engine(&self, client: u32, handle: u32) -> Option<(usize, u32)> {
        let group = self.all.get(&(client, handle))?;
        Some((group.gpu, group.reach.map_or(0, |reach| reach.engine)))
    }

    /// How many a GPU has.
    fn count(&self, gpu: usize) -> usize {
        self.all.values().filter(|group| group.gpu == gpu).count()
    }

    /// What freeing an object frees: with a client all that it has, with a device those below it.
    fn freed(&self, client: u32, handle: u32) -> Vec<(u32, u32)> {
        let of_client = self.all.range((client, 0)..=(client, u32::MAX));
        let is_freed = |(own, group): (&(u32, u32), &Group)| {
            handle == client || own.1 == handle || group.parent == handle
        };
        of_client.filter(|of| is_freed(*of)).map(|(own, _)| *own).collect()
    }

    pub(super) fn replay(&mut self, record: Record) {
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

    /// What makes them from nothing.
    pub(super) fn records(&self) -> impl Iterator<Item = Record> {
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

    /// How many groups of a GPU compute, of processes that are counted.
    fn computing(&self, gpu: usize, counts: impl Fn(Process) -> bool) -> usize {
        let computes = |group: &&Group| {
            let reach = group.reach.filter(|reach| counts(reach.process));
            group.gpu == gpu && reach.is_some_and(|reach| computes(reach.engine))
        };
        self.all.values().filter(computes).count()
    }

    /// The groups of a GPU that compute, of processes that live and don't rest, in order.
    pub(super) fn busy(
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

    /// The processes that have groups of a GPU that compute.
    pub(super) fn computing_processes(
        &self,
        gpu: usize,
        living: &BTreeSet<Process>,
    ) -> BTreeSet<Process> {
        let on_gpu = self.all.values().filter(|group| group.gpu == gpu);
        let reaches = on_gpu.filter_map(|group| group.reach);
        let computing = reaches.filter(|reach| computes(reach.engine));
        computing.map(|reach| reach.process).filter(|process| living.contains(process)).collect()
    }

    /// The slice that each group of a GPU is to have where the container has that round, or where
    /// nobody sets slices: what its program asked for, or what it had at first.
    fn wanted_us(group: &Group, reach: Reach, round: Option<Round>, computing: usize) -> u64 {
        match round {
            Some(round) if computes(reach.engine) => slice_us(round, computing),
            Some(round) => slice_us(round, 1),
            None if computes(reach.engine) => group.asked_us.unwrap_or(COMPUTE_SLICE_US),
            None => group.asked_us.unwrap_or(DEFAULT_SLICE_US),
        }
    }

    /// The slices of a GPU's groups that are other than they are to be. Those of processes that rest count
    /// for their own alone: whoever of them wakes has what each has while all work.
    pub(super) fn due_slices(
        &self,
        gpu: usize,
        round: Option<Round>,
        living: &BTreeSet<Process>,
        resting: &BTreeSet<Process>,
    ) -> Vec<DueSlice> {
        let all = self.computing(gpu, |process| living.contains(&process));
        let busy =
            self.computing(gpu, |process| living.contains(&process) && !resting.contains(&process));
        let on_gpu = self.all.iter().filter(|(_, group)| group.gpu == gpu);
        let due = on_gpu.filter_map(|((client, handle), group)| {
            let reach = group.reach.filter(|reach| living.contains(&reach.process))?;
            // What nobody has set is as its program has it.
            let is_ours = round.is_some() || group.slice_us.is_some();
            let computing = if resting.contains(&reach.process) { all } else { busy };
            let us = Self::wanted_us(group, reach, round, computing);
            let is_due = is_ours && group.slice_us != Some(us);
            is_due.then_some(DueSlice { client: *client, handle: *handle, reach, us })
        });
        due.collect()
    }

    /// A slice was set, or can't be.
    pub(super) fn has_slice(&mut self, due: &DueSlice) {
        if let Some(group) = self.all.get_mut(&(due.client, due.handle)) {
            group.slice_us = Some(due.us);
        }
    }

    /// The program asked for a slice.
    pub(super) fn asked_slice(&mut self, client: u32, handle: u32, us: u64) {
        if let Some(group) = self.all.get_mut(&(client, handle)) {
            group.asked_us = Some(us);
        }
    }
}

impl Case<'_> {
    /// The GPU of a group that is to be made, where one is: it has room for that.
    pub(super) fn room_for_group(
        &mut self,
        lane: &OnLane<'_>,
        alloc: &Alloc,
        layout: &'static Layout,
    ) -> Result<Option<usize>, Over> {
        if alloc.class != KEPLER_CHANNEL_GROUP_A {
            return Ok(None);
        }
        // One that the worker before had made for this call doesn't count.
        self.start_over(lane, alloc.object);
        let Object { client, parent, .. } = alloc.object;
        match self.only_gpu().or_else(|| self.gpu_on(lane, client, parent)) {
            Some(gpu) => self.room_on(gpu, layout).map(Some),
            None => Err(self.on_no_gpu(alloc.object, layout)),
        }
    }

    /// The same, for a name of one that there is: it keeps the group when that is freed.
    pub(super) fn room_for_name(
        &mut self,
        (client, handle): (u32, u32),
        layout: &'static Layout,
    ) -> Result<Option<usize>, Over> {
        let gpu = self.books().groups.gpu(client, handle);
        gpu.map(|gpu| self.room_on(gpu, layout)).transpose()
    }

    /// A channel that is let go on outside a group is entered as one, made or not. Whose handle the
    /// driver chooses is known by none, and counts until its client ends.
    pub(super) fn passes_channel(
        &mut self,
        alloc: &Alloc,
        layout: Option<&'static Layout>,
    ) -> Result<(), Over> {
        let Alloc { object, class, .. } = *alloc;
        let is_channel = class > HIGHEST_OBJECT && class & 0xff == ANY_CHANNEL;
        let Some(layout) = layout.filter(|_| is_channel) else { return Ok(()) };
        let of = self.books().groups.engine(object.client, object.parent);
        if let Some((gpu, engine)) = of {
            return match computes(engine) {
                true => self.passes_computing_channel(gpu, object, layout),
                false => Ok(()),
            };
        }
        // One below a group that a worker before knew nothing of isn't on its own.
        let gpu = self.only_gpu().or_else(|| self.gpu(object.client, object.parent));
        let Some(gpu) = gpu else { return Ok(()) };
        let handle = match object.handle {
            0 => self.next_handles(1),
            handle => handle,
        };
        let group = group(gpu, object, handle, false, None);
        self.with_room_on(gpu, layout, |books| books.write(group))?;
        self.passes_computing_channel(gpu, object, layout)
    }

    /// A channel that computes is let go on.
    fn passes_computing_channel(
        &mut self,
        gpu: usize,
        object: Object,
        layout: &'static Layout,
    ) -> Result<(), Over> {
        let Object { client, parent, handle } = object;
        let process = self.target()?.process;
        let has_room = {
            let mut books = self.books();
            let has_room = books.channels.has_room();
            if handle != 0 && has_room {
                books.write(Record::Channel { gpu, client, parent, handle, process });
            }
            has_room
        };
        if has_room {
            return Ok(());
        }
        self.log("a channel more than can be known is refused");
        Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(layout)))
    }

    pub(super) fn only_gpu(&self) -> Option<usize> {
        (self.shared.uuids.len() == 1).then_some(0)
    }

    /// A group was made.
    pub(super) fn enter_group(&self, gpu: usize, object: Object, handle: u32, engine: u32) {
        let reach = self.reach(engine);
        self.books().write(group(gpu, object, handle, true, reach));
        self.shared.shares.wake();
    }

    /// Another name of a group was made: it outlives the first, and counts as one more.
    pub(super) fn enter_name_of_group(
        &self,
        gpu: usize,
        object: Object,
        handle: u32,
        source: (u32, u32),
    ) {
        let of = self.books().groups.all.get(&source).and_then(|group| group.reach);
        let reach = of.and_then(|of| self.reach(of.engine));
        self.books().write(group(gpu, object, handle, true, reach));
        self.shared.shares.wake();
    }

    /// A group that nobody was seen to make is about to run: it counts from now on as one that
    /// computes.
    pub(super) fn enter_unseen_group(
        &mut self,
        gpu: usize,
        object: Object,
        layout: &'static Layout,
    ) -> Result<(), Over> {
        let record = group(gpu, object, object.handle, true, self.reach(ENGINE_GRAPHICS));
        self.with_room_on(gpu, layout, |books| books.write(record))?;
        self.shared.shares.wake();
        Ok(())
    }

    /// How an object that this call makes is reached.
    fn reach(&self, engine: u32) -> Option<Reach> {
        let process = self.target().ok()?.process;
        Some(Reach { process, descriptor: self.descriptor(), engine })
    }

    /// The GPU, where it has room for one more group.
    fn room_on(&mut self, gpu: usize, layout: &'static Layout) -> Result<usize, Over> {
        self.with_room_on(gpu, layout, |_| ()).map(|()| gpu)
    }

    /// Enters what takes room for one more group on a GPU, where there is some.
    fn with_room_on(
        &mut self,
        gpu: usize,
        layout: &'static Layout,
        enter: impl Fn(&mut Books),
    ) -> Result<(), Over> {
        let shared = self.shared;
        let most = shared.settings.channel_groups;
        for attempt in 0..2 {
            if attempt > 0 {
                shared.forget_gone_groups(gpu);
            }
            let mut books = shared.books();
            if books.groups.count(gpu) < usize::try_from(most).unwrap_or(usize::MAX) {
                enter(&mut books);
                return Ok(());
            }
        }
        self.log(&format!(
            "a channel group more than {most} on a GPU: [isolation] channel_groups is their bound"
        ));
        Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(layout)))
    }
}

fn group(gpu: usize, object: Object, handle: u32, certain: bool, reach: Option<Reach>) -> Record {
    let Object { client, parent, .. } = object;
    Record::Group { gpu, client, parent, handle, certain, reach }
}

impl Shared {
    /// An object was freed.
    pub(super) fn freed_groups(&self, client: u32, handle: u32) {
        let mut books = self.books();
        let groups = books.groups.freed(client, handle);
        let channels = books.channels.freed(client, handle, &groups);
        for (client, handle) in channels {
            books.write(Record::Ungroup { client, handle });
        }
        for (client, handle) in groups {
            books.write(Record::Ungroup { client, handle });
            self.shares.wake();
        }
    }

    /// Forgets those that the driver doesn't have any more.
    fn forget_gone_groups(&self, gpu: usize) {
        let own = self.auditor.own(self);
        let Some(own) = own.filter(|own| own.can_tell(&self.release)) else { return };
        let known: Vec<((u32, u32), Group)> = {
            let books = self.books();
            let on_gpu = books.groups.all.iter().filter(|(_, group)| group.gpu == gpu);
            on_gpu.map(|(name, group)| (*name, *group)).collect()
        };
        for ((client, handle), group) in known {
            let is_gone = match own.presence(&self.release, client, handle) {
                Presence::There => false,
                Presence::NoClient => true,
                // One that was let go on may be on its way.
                Presence::NoObject => group.certain,
            };
            let mut books = self.books();
            // Another thread may have made it anew.
            if is_gone && books.groups.all.get(&(client, handle)) == Some(&group) {
                books.write(Record::Ungroup { client, handle });
            }
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

    #[test]
    fn they_are_counted_by_gpu_and_freed_with_what_is_above() {
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
