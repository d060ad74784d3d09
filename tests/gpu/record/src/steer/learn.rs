//! What the programs make in the driver, until they compute.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use cgpu_record::follow::{Task, Then, Watch, node, read};
use cgpu_record::objects::{Did, GROUP_PARAMS_BYTES, Objects, Origin, did, engine_of};
use nix::libc;
use nix::unistd::Pid;
use nvrm::{Call, Command, Release};
use serde::Serialize;

use crate::control::{Control, Who, ask};
use crate::desk::duplicate;

/// What a program says, within quotation marks, when it computes.
const COMPUTING: &[u8] = b"\"computing\"";

/// Most bytes of what a program says that are looked at.
const MOST_SAID: usize = 4096;

/// A call that matters.
pub(crate) enum Begun {
    /// An ioctl of `nvidiactl`, unwrapped: where its struct is.
    Ioctl { command: Command, address: u64, descriptor: i32 },
    /// Something is said on standard output.
    Said { address: u64 },
}

/// What was answered to a slice before a group was scheduled.
#[derive(Debug, Serialize)]
pub(crate) struct BeforeSchedule {
    /// Whose group.
    name: char,
    what: String,
    outcome: String,
}

/// A program and what it made.
#[derive(Debug)]
pub(crate) struct Learnt {
    pub(crate) name: char,
    pub(crate) program: Pid,
    pub(crate) objects: Objects,
    computes: bool,
}

/// Watches all.
#[derive(Debug)]
pub(crate) struct Learner {
    release: Release,
    dev: PathBuf,
    tenants: Vec<Learnt>,
    before_schedule_us: Option<u64>,
    before_schedule: Vec<BeforeSchedule>,
}

impl Learner {
    pub(crate) fn new(release: Release, dev: PathBuf, programs: &[(char, Pid)]) -> Self {
        let tenant = |&(name, program)| {
            let objects = Objects::default();
            Learnt { name, program, objects, computes: false }
        };
        let tenants = programs.iter().map(tenant).collect();
        Learner { release, dev, tenants, before_schedule_us: None, before_schedule: Vec::new() }
    }

    /// Sets a slice on each group that a program is about to schedule.
    pub(crate) fn before_schedule(&mut self, slice_us: Option<u64>) {
        self.before_schedule_us = slice_us;
    }

    /// All, where all compute, and what was answered to slices before.
    ///
    /// # Errors
    ///
    /// Where one ended before.
    pub(crate) fn learnt(self) -> anyhow::Result<(Vec<Learnt>, Vec<BeforeSchedule>)> {
        for tenant in &self.tenants {
            anyhow::ensure!(tenant.computes, "{} ended before it computed", tenant.name);
        }
        Ok((self.tenants, self.before_schedule))
    }

    /// A program is about to schedule a group.
    fn schedules(&mut self, task: Task, client: u32, handle: u32) {
        let Some(slice_us) = self.before_schedule_us else { return };
        let Some(tenant) = self.tenants.iter().find(|tenant| tenant.program == task.program) else {
            return;
        };
        let Some(origin) = tenant.objects.origin(client) else { return };
        let name = tenant.name;
        let Ok(file) = duplicate(origin).map(Arc::new) else { return };
        for control in [Control::get_slice(), Control::set_slice(slice_us), Control::get_slice()] {
            let answer = ask(&file, client, handle, &control, Who::Unprivileged, true);
            let us = answer.number().filter(|_| control.asked.is_empty());
            let outcome =
                format!("{:?} {}", answer.outcome, us.map_or(String::new(), |us| us.to_string()));
            let what = format!("{} {} on {handle:#x}", control.name, control.asked);
            self.before_schedule.push(BeforeSchedule { name, what, outcome });
        }
    }

    fn ioctl(&mut self, task: Task, arguments: &[u64; 6]) -> Option<Begun> {
        let [descriptor, request, address, ..] = *arguments;
        let descriptor = i32::try_from(descriptor & 0xffff_ffff).ok()?;
        let mut command = Command::of_ioctl(nvrm::low_word(request));
        let mut address = address;
        let mut of_interest = vec![nvrm::number::NV_ESC_RM_ALLOC, nvrm::number::NV_ESC_RM_FREE];
        if self.before_schedule_us.is_some() {
            of_interest.push(nvrm::number::NV_ESC_RM_CONTROL);
        }
        let wrapper = nvrm::number::NV_ESC_IOCTL_XFER_CMD;
        if !of_interest.contains(&command.number()) && command.number() != wrapper {
            return None;
        }
        if node(&self.dev, task.id, arguments[0])? != "nvidiactl" {
            return None;
        }
        if command.number() == wrapper {
            let bytes = read(task.id, address, command.size())?;
            let decoded = nvrm::decode(&self.release, command, &bytes).ok()?;
            let Call::Wrapped { command: inner, address: inside } = decoded.call else {
                return None;
            };
            (command, address) = (inner, inside);
        }
        if command.number() == nvrm::number::NV_ESC_RM_CONTROL {
            let bytes = read(task.id, address, command.size())?;
            if let Call::Control { client, object, command, .. } =
                nvrm::decode(&self.release, command, &bytes).ok()?.call
                && command == nvrm::number::NVA06C_CTRL_CMD_GPFIFO_SCHEDULE
            {
                self.schedules(task, client, object);
            }
            return None;
        }
        Some(Begun::Ioctl { command, address, descriptor })
    }
}

impl Watch for Learner {
    type Begun = Begun;

    fn begins(&mut self, task: Task, number: i64, arguments: &[u64; 6]) -> Option<Begun> {
        match number {
            libc::SYS_ioctl => self.ioctl(task, arguments),
            libc::SYS_write if arguments[0] == 1 => Some(Begun::Said { address: arguments[1] }),
            _ => None,
        }
    }

    fn ended(&mut self, task: Task, begun: Begun, result: i64) -> anyhow::Result<Then> {
        let tenant = self.tenants.iter_mut().find(|tenant| tenant.program == task.program);
        let tenant = tenant.context("a task of neither program")?;
        match begun {
            Begun::Ioctl { command, address, descriptor } if result == 0 => {
                let after = read(task.id, address, command.size()).unwrap_or_default();
                if let Some(did) = did(&self.release, command, &after) {
                    let engine = match did {
                        Did::Made(alloc) => {
                            let params = read(task.id, alloc.params, GROUP_PARAMS_BYTES);
                            engine_of(&params.unwrap_or_default())
                        }
                        Did::Freed(_) => 0,
                    };
                    let origin = Origin { process: task.process.as_raw(), descriptor };
                    tenant.objects.enter(origin, did, engine);
                }
            }
            Begun::Said { address } => {
                let said = usize::try_from(result).unwrap_or(0).min(MOST_SAID);
                let text = read(task.id, address, said).unwrap_or_default();
                tenant.computes |= text.windows(COMPUTING.len()).any(|part| part == COMPUTING);
                if tenant.computes {
                    return Ok(Then::Leave);
                }
            }
            Begun::Ioctl { .. } => {}
        }
        Ok(Then::Follow)
    }
}
