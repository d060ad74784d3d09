//! What the driver sets in each GPU's runlist: slices, modes, what is scheduled, what is disabled.
//!
//! As the headers say (ctrla06c.h, ctrla06fgpfifo.h, ctrl2080fifo.h) and an H100 was seen to do
//! (`tests/gpu/results`): a slice is applied at once, also before the group is scheduled; restarting
//! the runlist changes nothing; taking a group off its schedule does nothing; channels that are disabled
//! come off at once, by whichever client, and come back when they were enabled as often as they were disabled,
//! whichever client schedules them meanwhile (2026-11-27). A program's work comes by the doorbell, a write to
//! `nvidiaN` ([`Doorbell`]), since what a real program writes there goes past the driver, too.
//! Only the graphics engine has a runlist.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::abi::{
    CHANNEL_CLASSES, KEPLER_CHANNEL_GROUP_A, NV_ERR_INVALID_ARGUMENT, NV_ERR_INVALID_CHANNEL,
    NV_ERR_OBJECT_NOT_FOUND,
};
use crate::bytes::Fields;
use crate::driver::Driver;
use crate::object::{Client, File, Status};
use crate::runlist::{Name, Rules, Runlist, Sample};

/// What a new group has: `kfifoChannelGroupGetDefaultTimeslice_GV100` (kernel_fifo_gv100.c).
const DEFAULT_TIMESLICE_US: u64 = 1024;

/// The mode in which a kernel is interrupted at any instruction
/// (`NV2080_CTRL_SET_CTXSW_PREEMPTION_MODE_COMPUTE_CILP`, ctrl2080gr.h).
const CILP: u32 = 2;

/// How long a process that waits for a kernel may rely on an answer, since others change the future.
const MOST_WAIT_NS: u64 = 20_000_000;

/// What is set in the scheduler for a channel group or a channel; for other objects it means nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Turn {
    /// A group's time slice, as it was asked for.
    pub(crate) timeslice_us: u64,
    /// Whether a group was scheduled.
    pub(crate) scheduled: bool,
    /// Whether a channel was enabled, as it is when it's scheduled.
    pub(crate) enabled: bool,
    /// How often a channel was disabled since, which counts: it has to be enabled as often.
    pub(crate) disables: u32,
    /// How a group's kernels are preempted, where its program chose.
    pub(crate) compute_mode: Option<u32>,
}

impl Turn {
    /// That of a new object.
    pub(crate) fn of(class: u32) -> Self {
        let slice = if class == KEPLER_CHANNEL_GROUP_A { DEFAULT_TIMESLICE_US } else { 0 };
        Turn { timeslice_us: slice, ..Turn::default() }
    }

    /// Whether a channel may run, where it's scheduled.
    pub(crate) fn is_on(self) -> bool {
        self.enabled && self.disables == 0
    }
}

/// Work for a group, or for a channel outside one: what is written to `nvidiaN`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doorbell {
    /// The group's client, and its handle.
    pub client: u32,
    /// See `client`.
    pub group: u32,
    /// How long each kernel takes, in nanoseconds.
    pub kernel_ns: u64,
    /// How many kernels, or none to ask only.
    pub count: u64,
    /// The kernel, counted from the group's first, that a read of the same file reports.
    pub until: u64,
}

impl Doorbell {
    /// Bytes of one.
    pub const BYTES: usize = 32;

    /// As it is written.
    #[must_use]
    pub fn bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes.set_u32(0, self.client);
        bytes.set_u32(4, self.group);
        bytes.set_u64(8, self.kernel_ns);
        bytes.set_u64(16, self.count);
        bytes.set_u64(24, self.until);
        bytes
    }

    /// What was written, if it is one.
    pub(crate) fn of(data: &[u8]) -> Option<Self> {
        (data.len() == Self::BYTES).then(|| Doorbell {
            client: data.u32_at(0),
            group: data.u32_at(4),
            kernel_ns: data.u64_at(8),
            count: data.u64_at(16),
            until: data.u64_at(24),
        })
    }
}

/// The channels of a group.
fn channels(client: &Client, group: u32) -> impl Iterator<Item = &Turn> {
    let is_channel = move |object: &&crate::object::Object| {
        object.parent == group && CHANNEL_CLASSES.contains(&object.class)
    };
    client.objects.values().filter(is_channel).map(|object| &object.turn)
}

impl Driver {
    /// What the scheduler knows of an object.
    pub(crate) fn turn(&self, client: u32, object: u32) -> Result<&Turn, Status> {
        let entry = self.clients.get(&client).and_then(|entry| entry.objects.get(&object));
        Ok(&entry.ok_or(NV_ERR_OBJECT_NOT_FOUND)?.turn)
    }

    /// Changes what is set in the scheduler for an object, from now on.
    pub(crate) fn report(
        &mut self,
        client: u32,
        object: u32,
        change: impl FnOnce(&mut Turn),
    ) -> Result<(), Status> {
        self.turn(client, object)?;
        self.reschedule(|driver| {
            let entry = driver.clients.get_mut(&client);
            if let Some(object) = entry.and_then(|entry| entry.objects.get_mut(&object)) {
                change(&mut object.turn);
            }
        });
        Ok(())
    }

    /// `GPFIFO_SCHEDULE` of a group with its channels, or of a channel: bEnable, bSkipSubmit, bSkipEnable
    /// (ctrla06fgpfifo.h). What is scheduled is enabled with it unless that is skipped; what was disabled by a
    /// list stays off.
    pub(crate) fn schedule(
        &mut self,
        client: u32,
        handle: u32,
        params: &[u8],
    ) -> Result<(), Status> {
        let flag = |at: usize| params.get(at).is_some_and(|flag| *flag != 0);
        let (enable, skip_submit, skip_enable) = (flag(0), flag(1), flag(2));
        if enable && skip_submit && skip_enable {
            return Err(NV_ERR_INVALID_ARGUMENT);
        }
        self.report(client, handle, |turn| turn.scheduled |= enable && !skip_submit)?;
        if enable && !skip_enable {
            self.reschedule(|driver| {
                let objects = driver.clients.get_mut(&client).map(|client| &mut client.objects);
                let objects = objects.into_iter().flat_map(|objects| objects.iter_mut());
                objects
                    .filter(|(own, object)| **own == handle || object.parent == handle)
                    .for_each(|(_, object)| object.turn.enabled = true);
            });
        }
        Ok(())
    }

    /// `NVA06C_CTRL_CMD_SET_TIMESLICE`.
    pub(crate) fn set_timeslice(
        &mut self,
        client: u32,
        object: u32,
        us: u64,
    ) -> Result<(), Status> {
        if us == 0 {
            return Err(NV_ERR_INVALID_ARGUMENT);
        }
        self.report(client, object, |turn| turn.timeslice_us = us)
    }

    /// `NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS`, of channels by client and handle.
    pub(crate) fn set_disabled(
        &mut self,
        channels: &[(u32, u32)],
        disabled: bool,
    ) -> Result<(), Status> {
        let is_channel = |(client, handle): &(u32, u32)| {
            let object = self.clients.get(client).and_then(|client| client.objects.get(handle));
            object.is_some_and(|object| CHANNEL_CLASSES.contains(&object.class))
        };
        if !channels.iter().all(is_channel) {
            return Err(NV_ERR_INVALID_CHANNEL);
        }
        self.reschedule(|driver| {
            for (client, handle) in channels {
                let entry = driver.clients.get_mut(client);
                if let Some(object) = entry.and_then(|entry| entry.objects.get_mut(handle)) {
                    let disables = &mut object.turn.disables;
                    *disables = if disabled { *disables + 1 } else { disables.saturating_sub(1) };
                }
            }
        });
        Ok(())
    }

    /// The settings of a group now, or of a channel that has one of its own, whose slice no client sets
    /// (`kchannelConstruct_IMPL`); `None` if there is none.
    fn rules(&self, (client, handle): Name) -> Option<Rules> {
        let client = self.clients.get(&client)?;
        let object = client.objects.get(&handle)?;
        let turn = object.turn;
        let interrupts = turn.compute_mode == Some(CILP);
        if object.class == KEPLER_CHANNEL_GROUP_A {
            let runs = turn.scheduled && channels(client, handle).any(|channel| channel.is_on());
            return Some(Rules { slice_us: turn.timeslice_us, runs, interrupts });
        }
        let above = client.objects.get(&object.parent).map(|above| above.class);
        let is_alone = above != Some(KEPLER_CHANNEL_GROUP_A);
        (CHANNEL_CLASSES.contains(&object.class) && is_alone).then_some(Rules {
            slice_us: DEFAULT_TIMESLICE_US,
            runs: turn.scheduled && turn.is_on(),
            interrupts,
        })
    }

    /// How long a driver is there.
    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Changes something that runlists depend on: until now they go on as it was.
    pub(crate) fn reschedule<T>(&mut self, change: impl FnOnce(&mut Self) -> T) -> T {
        let now_ns = self.now_ns();
        self.runlists.values_mut().for_each(|runlist| runlist.run_until(now_ns));
        let changed = change(self);
        let mut runlists = std::mem::take(&mut self.runlists);
        runlists.values_mut().for_each(|runlist| runlist.change(|name| self.rules(name)));
        runlists.retain(|_, runlist| !runlist.is_unused());
        self.runlists = runlists;
        changed
    }

    /// A GPU's runlist, gone on to now.
    fn runlist(&mut self, gpu: usize) -> &mut Runlist {
        let now_ns = self.now_ns();
        let runlist = self.runlists.entry(gpu).or_default();
        runlist.run_until(now_ns);
        runlist
    }

    /// The doorbell of a GPU is rung through a file, which is remembered for the next read.
    pub(crate) fn ring(
        &mut self,
        file: File,
        gpu: usize,
        doorbell: Doorbell,
    ) -> Result<(), Status> {
        let name = (doorbell.client, doorbell.group);
        let rules = self.rules(name).ok_or(NV_ERR_OBJECT_NOT_FOUND)?;
        self.runlist(gpu).submit(name, rules, doorbell.kernel_ns, doorbell.count);
        self.doorbells.insert(file, (gpu, doorbell));
        Ok(())
    }

    /// What a read after a doorbell reports: how many of the group's kernels have ended, and in how many
    /// nanoseconds the one that was asked for will have, as far as is known.
    pub(crate) fn answer_doorbell(&mut self, file: File) -> Option<[u8; 16]> {
        let (gpu, doorbell) = *self.doorbells.get(&file)?;
        let name = (doorbell.client, doorbell.group);
        let runlist = self.runlist(gpu);
        let mut bytes = [0; 16];
        bytes.set_u64(0, runlist.ended(name));
        bytes.set_u64(8, runlist.wait_ns(name, doorbell.until, MOST_WAIT_NS));
        Some(bytes)
    }

    /// By group: kernels that have ended by now, and for how many microseconds its kernels have run.
    pub(crate) fn works(&mut self) -> BTreeMap<Name, (u64, u64)> {
        let now_ns = self.now_ns();
        let works = self.runlists.values_mut().flat_map(|runlist| {
            runlist.run_until(now_ns);
            runlist.works().collect::<Vec<_>>()
        });
        works.collect()
    }

    /// What the driver saw of a GPU in each sample: when, in nanoseconds since 1970; the process that
    /// was there last, if there is one; whether it was at work.
    pub(crate) fn checks(&mut self, gpu: usize) -> Vec<(u64, Option<u32>, bool)> {
        let checks: Vec<_> = self.runlist(gpu).samples().collect();
        let born = SystemTime::now().checked_sub(self.started.elapsed());
        let born = born.and_then(|born| born.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        let born_ns = u64::try_from(born.as_nanos()).unwrap_or(u64::MAX);
        let of = |check: Sample| {
            let client = check.of.and_then(|(client, _)| self.clients.get(&client));
            (born_ns + check.when_ns, client.map(|client| client.process), check.is_busy)
        };
        checks.into_iter().map(of).collect()
    }
}
