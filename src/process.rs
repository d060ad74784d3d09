//! Who a process is: its pid with the time it started, so that a pid used again is
//! never taken for the process that had it before.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;

/// A process of this host, told apart from later ones of the same pid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// The pid in our namespace.
    pub pid: i32,
    /// Clock ticks from boot to its start (`/proc/PID/stat`, field 22).
    pub start_ticks: u64,
}

impl ProcessId {
    /// The process that has `pid` now; `None` where there is none, or only what its
    /// parent has not reaped yet.
    ///
    /// A process whose first thread alone has ended says `Z`, too, and lives on: any
    /// program can do that to itself (`pthread_exit` in `main`), and would be rid of its
    /// quota. What waits to be reaped has no other thread left.
    #[must_use]
    pub fn of(pid: i32) -> Option<Self> {
        let stat = procfs::process::Process::new(pid).ok()?.stat().ok()?;
        if stat.state == 'X' || (stat.state == 'Z' && stat.num_threads <= 1) {
            return None;
        }
        Some(ProcessId { pid, start_ticks: stat.starttime })
    }

    /// This process; the same after an exec.
    #[must_use]
    pub fn own() -> Option<Self> {
        Self::of(i32::try_from(std::process::id()).ok()?)
    }

    /// Whether any process has the pid; cheap, and wrong only where a pid was used again.
    #[must_use]
    pub fn pid_taken(self) -> bool {
        self.pid > 0 && kill(Pid::from_raw(self.pid), None) != Err(Errno::ESRCH)
    }

    /// Whether this very process is still there.
    #[must_use]
    pub fn alive(self) -> bool {
        self.pid_taken() && Self::of(self.pid) == Some(self)
    }
}

/// The first process of a container, by the runtime's own state of it, as both runtimes write
/// it: runc in `state.json` (`libcontainer/container_linux.go`, `State`), crun in `status`
/// (`src/libcrun/status.c`). `None` where there is none, or it has ended.
#[must_use]
pub fn first_of(state_file: &Path) -> Option<ProcessId> {
    #[derive(Deserialize)]
    struct State {
        #[serde(alias = "init_process_pid")]
        pid: i32,
        #[serde(rename = "process-start-time", alias = "init_process_start")]
        start_ticks: u64,
    }
    let state: State = serde_json::from_slice(&fs::read(state_file).ok()?).ok()?;
    let first = ProcessId { pid: state.pid, start_ticks: state.start_ticks };
    first.alive().then_some(first)
}

/// The id of this boot; empty where the kernel tells none.
#[must_use]
pub fn boot_id(proc_root: &Path) -> String {
    fs::read_to_string(proc_root.join("sys/kernel/random/boot_id"))
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_used_again_is_another_process() {
        let own = ProcessId::own().unwrap();
        assert!(own.alive());
        let before = ProcessId { start_ticks: own.start_ticks - 1, ..own };
        assert!(before.pid_taken());
        assert!(!before.alive());
    }

    #[test]
    fn a_process_that_ended_is_gone() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let id = ProcessId::of(i32::try_from(child.id()).unwrap());
        child.wait().unwrap();
        assert!(!id.is_some_and(ProcessId::alive));
    }
}
