//! What the two programs make in the driver, until they compute.

use std::path::PathBuf;

use anyhow::Context;
use cgpu::rm::{self, Call, Command, Release};
use cgpu_record::follow::{Task, Then, Watch, node, read};
use cgpu_record::objects::{Did, GROUP_PARAMS_BYTES, Objects, Origin, did, engine_of};
use nix::libc;
use nix::unistd::Pid;

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

/// A program and what it made.
#[derive(Debug)]
pub(crate) struct Learnt {
    pub(crate) name: char,
    pub(crate) program: Pid,
    pub(crate) objects: Objects,
    computes: bool,
}

/// Watches both.
#[derive(Debug)]
pub(crate) struct Learner {
    release: Release,
    dev: PathBuf,
    tenants: [Learnt; 2],
}

impl Learner {
    pub(crate) fn new(release: Release, dev: PathBuf, programs: [Pid; 2]) -> Self {
        let [a, b] = programs;
        let tenant = |name, program| {
            let objects = Objects::default();
            Learnt { name, program, objects, computes: false }
        };
        Learner { release, dev, tenants: [tenant('a', a), tenant('b', b)] }
    }

    /// Both, where both compute.
    ///
    /// # Errors
    ///
    /// Where one ended before.
    pub(crate) fn learnt(self) -> anyhow::Result<[Learnt; 2]> {
        for tenant in &self.tenants {
            anyhow::ensure!(tenant.computes, "{} ended before it computed", tenant.name);
        }
        Ok(self.tenants)
    }

    fn ioctl(&self, task: Task, arguments: &[u64; 6]) -> Option<Begun> {
        let [descriptor, request, address, ..] = *arguments;
        let descriptor = i32::try_from(descriptor & 0xffff_ffff).ok()?;
        let mut command = Command::of_ioctl(request);
        let mut address = address;
        let of_interest = [rm::number::NV_ESC_RM_ALLOC, rm::number::NV_ESC_RM_FREE];
        let wrapper = rm::number::NV_ESC_IOCTL_XFER_CMD;
        if !of_interest.contains(&command.number()) && command.number() != wrapper {
            return None;
        }
        if node(&self.dev, task.id, arguments[0])? != "nvidiactl" {
            return None;
        }
        if command.number() == wrapper {
            let bytes = read(task.id, address, command.size())?;
            let decoded = rm::decode(&self.release, command, &bytes).ok()?;
            let Call::Wrapped { command: inner, address: inside } = decoded.call else {
                return None;
            };
            (command, address) = (inner, inside);
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
