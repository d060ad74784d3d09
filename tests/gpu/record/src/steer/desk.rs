//! Where the two programs are scheduled from: their groups, files to reach them by, and what was changed.
//!
//! Invariant: no slice is changed that isn't known, and [`Desk::put_back`] undoes all that was changed.

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use anyhow::Context;
use cgpu_record::objects::{Group, Origin, computing};
use nvrm::channel::MOST_CHANNELS;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde::Serialize;

use crate::control::{Answer, Control, Mode, Outcome, Who, ask};
use crate::learn::Learnt;
use crate::samples::ReportedSamples;
use crate::turns::ReportedTurns;

/// What the programs are called: one, and one or several.
pub(crate) const A: char = 'a';
pub(crate) const B: char = 'b';

/// A control that was tried.
#[derive(Debug, Serialize)]
pub(crate) struct Tried {
    phase: &'static str,
    name: &'static str,
    number: String,
    tenant: char,
    object: String,
    asked: String,
    who: Who,
    #[serde(flatten)]
    outcome: Outcome,
    /// Microseconds.
    us: f64,
}

/// A group as it was found.
#[derive(Debug, Serialize)]
struct ReportedGroup {
    client: String,
    handle: String,
    engine: u32,
    channels: usize,
    timeslice_us: Option<u64>,
}

/// A program as it was found.
#[derive(Debug, Serialize)]
pub(crate) struct ReportedTenant {
    name: char,
    process: i32,
    groups: Vec<ReportedGroup>,
    loose_channels: usize,
}

/// All that is reported at the end.
#[derive(Debug)]
pub(crate) struct Reported {
    pub(crate) tenants: Vec<ReportedTenant>,
    pub(crate) tried: Vec<Tried>,
    pub(crate) turns: Vec<ReportedTurns>,
    pub(crate) samples: Vec<ReportedSamples>,
}

/// A group that can be reached.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    pub(crate) group: Group,
    pub(crate) file: Arc<OwnedFd>,
    /// Its slice as it was found.
    slice_us: Option<u64>,
}

#[derive(Debug)]
struct Tenant {
    name: char,
    process: i32,
    groups: Vec<Held>,
    loose_channels: usize,
}

#[derive(Debug)]
pub(crate) struct Desk {
    tenants: Vec<Tenant>,
    tried: Vec<Tried>,
    pub(crate) turns: Vec<ReportedTurns>,
    pub(crate) samples: Vec<ReportedSamples>,
    pub(crate) phase: &'static str,
    pub(crate) patient: bool,
    sliced: bool,
    pub(crate) disabled: BTreeSet<usize>,
}

impl Desk {
    /// Takes duplicates of the programs' files, and reads what slices there are.
    ///
    /// # Errors
    ///
    /// Where a program has nothing that could be scheduled, or its file can't be had.
    pub(crate) fn of(learnt: Vec<Learnt>) -> anyhow::Result<Self> {
        let mut tenants = Vec::new();
        for Learnt { name, program, objects, .. } in learnt {
            let mut files: BTreeMap<u32, Arc<OwnedFd>> = BTreeMap::new();
            let mut groups = Vec::new();
            for group in objects.groups() {
                let file = match files.entry(group.client) {
                    Entry::Occupied(known) => Arc::clone(known.get()),
                    Entry::Vacant(unknown) => {
                        let origin = objects.origin(group.client).context("its client is gone")?;
                        let file = duplicate(origin)
                            .with_context(|| format!("the descriptor of {name}'s client"))?;
                        Arc::clone(unknown.insert(Arc::new(file)))
                    }
                };
                groups.push(Held { group, file, slice_us: None });
            }
            anyhow::ensure!(!groups.is_empty(), "{name} computes without any channel group");
            let loose_channels = objects.loose_channels();
            tenants.push(Tenant { name, process: program.as_raw(), groups, loose_channels });
        }
        let mut desk = Desk {
            tenants,
            tried: Vec::new(),
            turns: Vec::new(),
            samples: Vec::new(),
            phase: "found",
            patient: true,
            sliced: false,
            disabled: BTreeSet::new(),
        };
        for tenant in 0..desk.tenants.len() {
            for at in 0..desk.tenants[tenant].groups.len() {
                let held = desk.tenants[tenant].groups[at].clone();
                let answer =
                    desk.ask(tenant, &held, held.group.handle, &Control::get_slice(), Who::Root);
                desk.tenants[tenant].groups[at].slice_us = answer.number().filter(|us| *us > 0);
            }
        }
        Ok(desk)
    }

    /// What is asked from now on is asked in this phase.
    pub(crate) fn begin(&mut self, phase: &'static str) {
        self.phase = phase;
    }

    /// The programs of a name.
    pub(crate) fn named(&self, name: char) -> Vec<usize> {
        let all = self.tenants.iter().enumerate();
        all.filter(|(_, tenant)| tenant.name == name).map(|(at, _)| at).collect()
    }

    /// Sets the slices of all groups of both; as with all that follows, whether that went well.
    pub(crate) fn set_slices(&mut self, slices_us: [u64; 2]) -> bool {
        self.sliced = true;
        let mut well = true;
        for (name, slice_us) in [A, B].into_iter().zip(slices_us) {
            for tenant in self.named(name) {
                well &= self.set_slice(tenant, Some(slice_us));
            }
        }
        well
    }

    /// Asks what slice the first group that computes has, of each program.
    pub(crate) fn get_slices(&mut self) -> bool {
        let mut well = true;
        for tenant in 0..self.tenants.len() {
            for held in self.computing(tenant).into_iter().take(1) {
                let control = Control::get_slice();
                let answer = self.ask(tenant, &held, held.group.handle, &control, Who::Root);
                let stored = answer.number().map_or("?".to_owned(), |us| format!("has {us} us"));
                if let Some(tried) = self.tried.last_mut() {
                    tried.asked = stored;
                }
                well &= answer.is_ok();
            }
        }
        well
    }

    /// Sets how the groups of `b` that compute are preempted.
    pub(crate) fn set_mode(&mut self, mode: Mode) -> bool {
        let mut well = true;
        for tenant in self.named(B) {
            for held in self.computing(tenant) {
                let control = Control::set_mode(held.group.handle, mode);
                well &= held.group.subdevice.is_some_and(|subdevice| {
                    self.ask(tenant, &held, subdevice, &control, Who::Root).is_ok()
                });
            }
        }
        well
    }

    /// Disables or enables what computes of `b`, asked without any capability, by the client of `a`.
    pub(crate) fn disable_by_another(&mut self, disable: bool) -> bool {
        let Some(asker) = self.computing(0).into_iter().next() else { return false };
        let Some(subdevice) = asker.group.subdevice else { return false };
        let mut well = true;
        for tenant in self.named(B) {
            if disable {
                self.disabled.insert(tenant);
            }
            for held in self.computing(tenant) {
                let control = Control::disable(disable, held.group.client, &held.group.channels);
                well &= self.ask(0, &asker, subdevice, &control, Who::Unprivileged).is_ok();
            }
            if !disable && well {
                self.disabled.remove(&tenant);
            }
        }
        well
    }

    /// Sets the slices as they were found.
    pub(crate) fn restore_slices(&mut self) -> bool {
        let done: Vec<bool> =
            (0..self.tenants.len()).map(|tenant| self.set_slice(tenant, None)).collect();
        self.sliced = done.contains(&false);
        !self.sliced
    }

    fn set_slice(&mut self, tenant: usize, slice_us: Option<u64>) -> bool {
        let mut well = true;
        for held in self.tenants[tenant].groups.clone() {
            let handle = held.group.handle;
            match (held.slice_us, slice_us) {
                (Some(found_us), asked_us) => {
                    let control = Control::set_slice(asked_us.unwrap_or(found_us));
                    well &= self.ask(tenant, &held, handle, &control, Who::Root).is_ok();
                }
                // Nothing was changed that isn't known.
                (None, None) => {}
                (None, Some(asked_us)) => {
                    let control = Control::set_slice(asked_us);
                    let answer = Answer::not_tried("its own slice isn't known");
                    self.note(tenant, handle, &control, Who::Root, &answer);
                    well = false;
                }
            }
        }
        well
    }

    /// Restarts the runlists that the kernels of one wait in, or of both.
    pub(crate) fn restart(&mut self, only: Option<char>) -> bool {
        let mut well = true;
        let names = self.tenants.iter().map(|tenant| tenant.name).collect::<Vec<_>>();
        let all = names.into_iter().enumerate();
        for (tenant, _) in all.filter(|(_, name)| only.is_none_or(|only| only == *name)) {
            for held in self.computing(tenant) {
                if let Some(channel) = held.group.channels.first() {
                    let control = Control::restart();
                    well &= self.ask(tenant, &held, *channel, &control, Who::Root).is_ok();
                }
            }
        }
        well
    }

    /// Schedules what the kernels of a name's programs wait in, as the programs did.
    pub(crate) fn schedule(&mut self, name: char) -> bool {
        let mut well = true;
        for tenant in self.named(name) {
            for held in self.computing(tenant) {
                let handle = held.group.handle;
                well &= self.ask(tenant, &held, handle, &Control::schedule(), Who::Root).is_ok();
            }
        }
        well
    }

    /// Preempts the groups that the kernels of both wait in.
    pub(crate) fn preempt(&mut self) -> bool {
        let mut well = true;
        for tenant in 0..self.tenants.len() {
            for held in self.computing(tenant) {
                let handle = held.group.handle;
                well &= self.ask(tenant, &held, handle, &Control::preempt(), Who::Root).is_ok();
            }
        }
        well
    }

    /// Disables or enables all channels of all programs of a name.
    pub(crate) fn disable(&mut self, name: char, disable: bool) -> bool {
        let done: Vec<bool> =
            self.named(name).into_iter().map(|tenant| self.disable_one(tenant, disable)).collect();
        !done.contains(&false)
    }

    fn disable_one(&mut self, tenant: usize, disable: bool) -> bool {
        if disable {
            self.disabled.insert(tenant);
        }
        let mut by_subdevice: BTreeMap<_, (Held, Vec<u32>)> = BTreeMap::new();
        for held in &self.tenants[tenant].groups {
            let key = (held.group.client, held.group.subdevice);
            let (_, channels) = by_subdevice.entry(key).or_insert((held.clone(), Vec::new()));
            channels.extend(&held.group.channels);
        }
        let mut well = true;
        for ((client, subdevice), (held, channels)) in by_subdevice {
            for some in channels.chunks(MOST_CHANNELS) {
                let control = Control::disable(disable, client, some);
                if let Some(subdevice) = subdevice {
                    well &= self.ask(tenant, &held, subdevice, &control, Who::Root).is_ok();
                } else {
                    let answer = Answer::not_tried("its client has no subdevice");
                    self.note(tenant, client, &control, Who::Root, &answer);
                    well = false;
                }
            }
        }
        if !disable && well {
            self.disabled.remove(&tenant);
        }
        well
    }

    /// Tries each control that schedules on the first program, as each who there is, so that nothing
    /// changes by it.
    pub(crate) fn try_all(&mut self) -> bool {
        let Some(held) = self.computing(0).into_iter().next() else { return false };
        let Group { client, handle, ref channels, subdevice, .. } = held.group;
        let level = self.ask(0, &held, handle, &Control::get_interleave(), Who::Root).number();
        let level = level.and_then(|level| u32::try_from(level).ok());
        for who in Who::ALL {
            let mut on_group = vec![Control::get_slice()];
            on_group.extend(held.slice_us.map(Control::set_slice));
            on_group.push(Control::get_interleave());
            on_group.extend(level.map(Control::set_interleave));
            on_group.extend([Control::preempt(), Control::schedule()]);
            for control in on_group {
                self.ask(0, &held, handle, &control, who);
            }
            if let Some(channel) = channels.first() {
                self.ask(0, &held, *channel, &Control::restart(), who);
                if let Some(subdevice) = subdevice {
                    let control = Control::disable(false, client, &[*channel]);
                    self.ask(0, &held, subdevice, &control, who);
                }
            }
        }
        true
    }

    /// Undoes what was changed.
    pub(crate) fn put_back(&mut self) -> bool {
        self.phase = "put back";
        let mut well = true;
        for tenant in self.disabled.clone() {
            well &= self.disable_one(tenant, false);
            well &= self.restart(Some(self.tenants[tenant].name));
        }
        if self.sliced {
            well &= self.restore_slices();
            well &= self.restart(None);
        }
        well
    }

    /// Gives the files back, and returns the report.
    pub(crate) fn close(self) -> Reported {
        let tenants = self.tenants.into_iter().map(|tenant| ReportedTenant {
            name: tenant.name,
            process: tenant.process,
            loose_channels: tenant.loose_channels,
            groups: tenant
                .groups
                .into_iter()
                .map(|Held { group, slice_us, .. }| ReportedGroup {
                    client: format!("{:#x}", group.client),
                    handle: format!("{:#x}", group.handle),
                    engine: group.engine,
                    channels: group.channels.len(),
                    timeslice_us: slice_us,
                })
                .collect(),
        });
        let tenants = tenants.collect();
        Reported { tenants, tried: self.tried, turns: self.turns, samples: self.samples }
    }

    pub(crate) fn computing(&self, tenant: usize) -> Vec<Held> {
        let held = &self.tenants[tenant].groups;
        let groups: Vec<Group> = held.iter().map(|held| held.group.clone()).collect();
        let chosen = computing(&groups);
        held.iter().filter(|held| chosen.contains(&&held.group)).cloned().collect()
    }

    pub(crate) fn ask(
        &mut self,
        tenant: usize,
        held: &Held,
        object: u32,
        control: &Control,
        who: Who,
    ) -> Answer {
        let answer = ask(&held.file, held.group.client, object, control, who, self.patient);
        self.patient &= answer.outcome != Outcome::Hung(true);
        self.note(tenant, object, control, who, &answer);
        answer
    }

    pub(crate) fn note(
        &mut self,
        tenant: usize,
        object: u32,
        control: &Control,
        who: Who,
        answer: &Answer,
    ) {
        self.tried.push(Tried {
            phase: self.phase,
            name: control.name,
            number: format!("{:#x}", control.number),
            tenant: self.tenants[tenant].name,
            object: format!("{object:#x}"),
            asked: control.asked.clone(),
            who,
            outcome: answer.outcome.clone(),
            us: answer.took.as_secs_f64() * 1e6,
        });
    }
}

/// A duplicate of a program's descriptor, which must be of `nvidiactl` still.
pub(crate) fn duplicate(origin: Origin) -> anyhow::Result<OwnedFd> {
    let process = Pid::from_raw(origin.process).context("no process")?;
    let pidfd = pidfd_open(process, PidfdFlags::empty()).context("pidfd_open")?;
    let copy = pidfd_getfd(pidfd, origin.descriptor, PidfdGetfdFlags::empty());
    let copy = copy.context("pidfd_getfd")?;
    let path = fs::read_link(format!("/proc/self/fd/{}", copy.as_raw_fd()))?;
    anyhow::ensure!(path.ends_with("nvidiactl"), "it is {} now", path.display());
    Ok(copy)
}
