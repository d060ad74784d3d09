//! Channel groups: which of them a GPU runs, and for what part of its time.
//!
//! The firmware does this, whose source isn't published, so this is a model of what headers
//! (ctrla06c.h, ctrla06fgpfifo.h, ctrl2080fifo.h) and others' measurements say: a time slice that is
//! set waits until the runlist is restarted; a GPU's time goes to the groups that have a channel which
//! isn't disabled, in proportion to their slices; channels that are disabled come off at once. Simpler
//! than the truth: a group that has no work takes its part too, and a GPU has one runlist.

use crate::abi::{
    CHANNEL_CLASSES, KEPLER_CHANNEL_GROUP_A, NV_ERR_INVALID_ARGUMENT, NV_ERR_INVALID_CHANNEL,
    NV_ERR_OBJECT_NOT_FOUND,
};
use crate::driver::Driver;
use crate::object::Status;

/// What a new group has: `kfifoChannelGroupGetDefaultTimeslice_GV100` (kernel_fifo_gv100.c).
const DEFAULT_TIMESLICE_US: u64 = 1024;

/// The whole of a GPU's time, in `sim/shares`.
const WHOLE_PPM: u64 = 1_000_000;

/// What the scheduler knows of a channel group or a channel; of other objects it means nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Turn {
    /// A group's time slice, as it was asked for.
    pub(crate) timeslice_us: u64,
    /// As the runlist has it.
    committed_us: u64,
    /// Whether a channel isn't to run.
    pub(crate) disabled: bool,
    /// How a group's kernels are preempted, where its program chose.
    pub(crate) compute_mode: Option<u32>,
}

impl Turn {
    /// That of a new object.
    pub(crate) fn of(class: u32) -> Self {
        let slice = if class == KEPLER_CHANNEL_GROUP_A { DEFAULT_TIMESLICE_US } else { 0 };
        Turn { timeslice_us: slice, committed_us: slice, disabled: false, compute_mode: None }
    }

    /// `NVA06C_CTRL_CMD_SET_TIMESLICE`.
    pub(crate) fn ask(&mut self, timeslice_us: u64) -> Result<(), Status> {
        if timeslice_us == 0 {
            return Err(NV_ERR_INVALID_ARGUMENT);
        }
        self.timeslice_us = timeslice_us;
        Ok(())
    }
}

/// A group's part of its GPU's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Share {
    client: u32,
    group: u32,
    ppm: u64,
}

impl Driver {
    /// What the scheduler knows of an object.
    pub(crate) fn turn(&mut self, client: u32, object: u32) -> Result<&mut Turn, Status> {
        let entry = self.clients.get_mut(&client).and_then(|entry| entry.objects.get_mut(&object));
        Ok(&mut entry.ok_or(NV_ERR_OBJECT_NOT_FOUND)?.turn)
    }

    /// `NVA06F_CTRL_CMD_RESTART_RUNLIST`: what was asked for takes effect, of all groups.
    pub(crate) fn restart_runlist(&mut self, gpu: usize) {
        let objects = self.clients.values_mut().flat_map(|client| client.objects.values_mut());
        for object in objects.filter(|object| object.gpu == Some(gpu)) {
            object.turn.committed_us = object.turn.timeslice_us;
        }
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
        for (client, handle) in channels {
            self.turn(*client, *handle)?.disabled = disabled;
        }
        Ok(())
    }

    fn shares(&self) -> Vec<Share> {
        let mut groups = Vec::new();
        for (client, entry) in &self.clients {
            for (group, object) in &entry.objects {
                if object.class != KEPLER_CHANNEL_GROUP_A {
                    continue;
                }
                let runs = entry.objects.values().any(|channel| {
                    channel.parent == *group
                        && CHANNEL_CLASSES.contains(&channel.class)
                        && !channel.turn.disabled
                });
                let weight = if runs { object.turn.committed_us } else { 0 };
                groups.push((object.gpu, *client, *group, weight));
            }
        }
        let share = |(gpu, client, group, weight): &(Option<usize>, u32, u32, u64)| {
            let on_gpu = groups.iter().filter(|(other, ..)| other == gpu);
            let all: u64 = on_gpu.map(|(.., weight)| weight).sum();
            Share { client: *client, group: *group, ppm: WHOLE_PPM * weight / all.max(1) }
        };
        groups.iter().map(share).collect()
    }

    /// `sim/shares`: a line for each group with its client, its handle, and its millionths of its
    /// GPU's time.
    pub(crate) fn shares_text(&self) -> String {
        let line = |Share { client, group, ppm }: Share| format!("{client:#x} {group:#x} {ppm}\n");
        self.shares().into_iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::abi::AMPERE_CHANNEL_GPFIFO_A;
    use crate::object::{Client, Object};
    use crate::spec::{Gpu, GpuSpec};

    const GROUP: u32 = 10;

    /// Two clients with a group each, of so many channels: 11, 12, …
    fn driver(channels: u32) -> Driver {
        let mut driver = Driver::new(vec![Gpu::new(0, GpuSpec { memory_bytes: 1 << 30 })]);
        for handle in [1, 2] {
            let object = |parent, class| Object {
                parent,
                class,
                gpu: Some(0),
                memory: None,
                shared: false,
                turn: Turn::of(class),
                switches_of: None,
            };
            let mut objects = BTreeMap::from([(GROUP, object(handle, KEPLER_CHANNEL_GROUP_A))]);
            for channel in 0..channels {
                objects.insert(GROUP + 1 + channel, object(GROUP, AMPERE_CHANNEL_GPFIFO_A));
            }
            let client = Client {
                file: 1,
                process: 1,
                user: 0,
                numbers: Vec::new(),
                cgroup: String::new(),
                objects,
                lost: Vec::new(),
                made: 0,
            };
            driver.clients.insert(handle, client);
        }
        driver
    }

    fn ppm(driver: &Driver) -> Vec<u64> {
        driver.shares().into_iter().map(|share| share.ppm).collect()
    }

    #[test]
    fn a_slice_counts_once_the_runlist_is_restarted() {
        let mut driver = driver(1);
        assert_eq!(ppm(&driver), [500_000, 500_000]);
        driver.turn(1, GROUP).unwrap().ask(3072).unwrap();
        assert_eq!(ppm(&driver), [500_000, 500_000]);
        driver.restart_runlist(0);
        assert_eq!(ppm(&driver), [750_000, 250_000]);
        assert_eq!(driver.turn(1, GROUP).unwrap().ask(0), Err(NV_ERR_INVALID_ARGUMENT));
        assert_eq!(driver.shares_text(), "0x1 0xa 750000\n0x2 0xa 250000\n");
    }

    #[test]
    fn a_group_runs_while_one_of_its_channels_may() {
        let mut driver = driver(2);
        driver.set_disabled(&[(2, GROUP + 1)], true).unwrap();
        assert_eq!(ppm(&driver), [500_000, 500_000]);
        driver.set_disabled(&[(2, GROUP + 1), (2, GROUP + 2)], true).unwrap();
        assert_eq!(ppm(&driver), [1_000_000, 0]);
        driver.set_disabled(&[(2, GROUP + 2)], false).unwrap();
        assert_eq!(ppm(&driver), [500_000, 500_000]);
        let not_a_channel = [(1, GROUP + 1), (1, GROUP)];
        assert_eq!(driver.set_disabled(&not_a_channel, true), Err(NV_ERR_INVALID_CHANNEL));
        assert_eq!(ppm(&driver), [500_000, 500_000]);
    }
}
