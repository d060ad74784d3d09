//! Programs under ptrace: both ends of every system call of theirs, and of all that they start.
//!
//! ptrace, because it sees what any program asks, static ones included. It makes calls slow, which
//! changes none. What is looked for in the calls is a [`Watch`]'s; one that has seen enough of a program
//! leaves it, which then runs as if it had never been traced.
#![allow(
    unsafe_code,
    reason = "a child is made, unions of the kernel's are read, tasks are stopped"
)]

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::IoSliceMut;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::Context;
use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// A task, and whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    pub id: Pid,
    pub process: Pid,
    /// The first process of its program.
    pub program: Pid,
}

/// What is looked for.
pub trait Watch {
    /// A call that has begun, as far as it matters.
    type Begun;

    /// A task begins a system call; nothing where it doesn't matter.
    fn begins(&mut self, task: Task, number: i64, arguments: &[u64; 6]) -> Option<Self::Begun>;

    /// The call ended.
    ///
    /// # Errors
    ///
    /// Where nothing more can be made of what is seen; then nothing is followed any further.
    fn ended(&mut self, task: Task, begun: Self::Begun, result: i64) -> anyhow::Result<Then>;
}

/// What becomes of a program after a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    Follow,
    Leave,
}

/// Starts a program that is to be followed, with no signal blocked; its process. It ends with us.
///
/// # Errors
///
/// Where it can't be run, or not be traced.
pub fn start(mut program: Command) -> anyhow::Result<Pid> {
    // SAFETY: between fork and exec the child makes three system calls.
    unsafe {
        program.pre_exec(|| {
            SigSet::all().thread_unblock()?;
            nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
            ptrace::traceme().map_err(Into::into)
        })
    };
    let name = program.get_program().to_owned();
    let child = program.spawn().with_context(|| format!("can't run {}", name.display()))?;
    let main = Pid::from_raw(i32::try_from(child.id())?);
    waitpid(main, None).context("it didn't stop at its exec")?;
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACEEXEC
        | Options::PTRACE_O_EXITKILL;
    ptrace::setoptions(main, options)?;
    Ok(main)
}

/// Follows programs that [`start`] started, until each has ended or was left; the exit statuses of the
/// processes that ended, 128 and the signal's number where one ended it.
///
/// # Errors
///
/// Where the kernel refuses to wait, and what the watch says.
pub fn follow<W: Watch>(programs: &[Pid], watch: &mut W) -> anyhow::Result<HashMap<Pid, i32>> {
    let mut follower = Follower {
        watch,
        begun: HashMap::new(),
        tasks: HashMap::new(),
        left: HashSet::new(),
        ended: HashMap::new(),
    };
    for main in programs {
        follower.tasks.insert(*main, Task { id: *main, program: *main, process: *main });
        go_on(*main, None);
    }
    while !follower.tasks.is_empty() {
        match waitpid(None, Some(WaitPidFlag::__WALL)) {
            Err(Errno::ECHILD) => break,
            Err(errno) => return Err(errno).context("waitpid"),
            Ok(status) => follower.happened(status)?,
        }
    }
    Ok(follower.ended)
}

struct Follower<'a, W: Watch> {
    watch: &'a mut W,
    begun: HashMap<Pid, W::Begun>,
    /// Those that are traced.
    tasks: HashMap<Pid, Task>,
    /// Programs that are to be followed no more.
    left: HashSet<Pid>,
    ended: HashMap<Pid, i32>,
}

impl<W: Watch> Follower<'_, W> {
    fn happened(&mut self, status: WaitStatus) -> anyhow::Result<()> {
        match status {
            WaitStatus::Exited(task, status) => self.gone(task, status),
            WaitStatus::Signaled(task, signal, _) => self.gone(task, 128 + signal as i32),
            WaitStatus::PtraceSyscall(task) => {
                let then = self.at_call(task)?;
                if then == Then::Leave {
                    self.leave(task);
                }
                self.on(task, None);
            }
            WaitStatus::PtraceEvent(task, _, event) => {
                let other = ptrace::getevent(task).ok().and_then(|other| i32::try_from(other).ok());
                if let Some(other) = other.map(Pid::from_raw).filter(|other| *other != task) {
                    match event {
                        // The thread that called took the process's number.
                        libc::PTRACE_EVENT_EXEC => drop(self.tasks.remove(&other)),
                        _ => self.add(other),
                    }
                }
                self.on(task, None);
            }
            // The first stop of a new task, and what a terminal does to all.
            WaitStatus::Stopped(task, Signal::SIGSTOP | Signal::SIGTRAP) => self.on(task, None),
            WaitStatus::Stopped(task, signal) => self.on(task, Some(signal)),
            _ => {}
        }
        Ok(())
    }

    fn gone(&mut self, task: Pid, status: i32) {
        self.begun.remove(&task);
        self.ended.insert(task, status);
        self.removed(task);
    }

    /// A task may be seen before the event that reports it.
    fn add(&mut self, task: Pid) {
        if self.tasks.contains_key(&task) {
            return;
        }
        let process = number_of(task, "Tgid:").unwrap_or(task);
        let program = [process, number_of(task, "PPid:").unwrap_or(process)]
            .into_iter()
            .find_map(|relative| self.tasks.values().find(|known| known.process == relative));
        let program = program.map_or(process, |known| known.program);
        self.tasks.insert(task, Task { id: task, process, program });
    }

    /// Lets a stopped task go on, or go.
    fn on(&mut self, task: Pid, signal: Option<Signal>) {
        self.add(task);
        if self.tasks.get(&task).is_some_and(|known| self.left.contains(&known.program)) {
            // One that was killed needs nothing.
            let _ = ptrace::detach(task, signal);
            self.removed(task);
        } else {
            go_on(task, signal);
        }
    }

    fn removed(&mut self, task: Pid) {
        let Some(Task { program, process, .. }) = self.tasks.remove(&task) else { return };
        if self.left.contains(&program)
            && !self.tasks.values().any(|known| known.process == process)
        {
            // Stops that a task had no time to take would come now.
            let _ = kill(process, Signal::SIGCONT);
        }
    }

    /// Stops all other tasks of a task's program, each of which is let go when it has.
    fn leave(&mut self, task: Pid) {
        let Some(Task { program, .. }) = self.tasks.get(&task).copied() else { return };
        self.left.insert(program);
        for (other, known) in &self.tasks {
            if known.program == program && *other != task {
                let (process, other) = (known.process.as_raw(), other.as_raw());
                // SAFETY: takes numbers only.
                unsafe { libc::syscall(libc::SYS_tgkill, process, other, libc::SIGSTOP) };
            }
        }
    }

    /// At one end of a system call.
    fn at_call(&mut self, task: Pid) -> anyhow::Result<Then> {
        self.add(task);
        // Killed in between.
        let (Some(whose), Ok(info)) = (self.tasks.get(&task), ptrace::syscall_info(task)) else {
            return Ok(Then::Follow);
        };
        match info.op {
            libc::PTRACE_SYSCALL_INFO_ENTRY => {
                // SAFETY: the kernel says that this is the member that it filled.
                let entry = unsafe { info.u.entry };
                let number = i64::try_from(entry.nr).unwrap_or(-1);
                match self.watch.begins(*whose, number, &entry.args) {
                    Some(begun) => self.begun.insert(task, begun),
                    None => self.begun.remove(&task),
                };
            }
            libc::PTRACE_SYSCALL_INFO_EXIT => {
                if let Some(begun) = self.begun.remove(&task) {
                    // SAFETY: as above.
                    let result = unsafe { info.u.exit }.sval;
                    return self.watch.ended(*whose, begun, result);
                }
            }
            _ => {}
        }
        Ok(Then::Follow)
    }
}

/// Lets a task go on; one that was killed needs nothing.
fn go_on(task: Pid, signal: Option<Signal>) {
    let _ = ptrace::syscall(task, signal);
}

/// A number from a task's status.
fn number_of(task: Pid, field: &str) -> Option<Pid> {
    let status = fs::read_to_string(format!("/proc/{task}/status")).ok()?;
    let text = status.lines().find_map(|line| line.strip_prefix(field))?;
    text.trim().parse().ok().map(Pid::from_raw)
}

/// Which of the driver's files below `dev` a task's descriptor is.
#[must_use]
pub fn node(dev: &Path, task: Pid, descriptor: u64) -> Option<String> {
    let descriptor = descriptor & 0xffff_ffff;
    let path = fs::read_link(format!("/proc/{task}/fd/{descriptor}")).ok()?;
    let name = path.strip_prefix(dev).ok()?.to_str()?;
    name.starts_with("nvidia").then(|| name.to_owned())
}

/// Bytes of a task's memory: all or none.
#[must_use]
pub fn read(task: Pid, address: u64, size: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; size];
    if size == 0 {
        return Some(bytes);
    }
    let remote = [RemoteIoVec { base: usize::try_from(address).ok()?, len: size }];
    let got = process_vm_readv(task, &mut [IoSliceMut::new(&mut bytes)], &remote).ok()?;
    (got == size).then_some(bytes)
}
