//! SIGKILL, and which process gets it.
//!
//! No process is killed by pid or name alone: it is held by a descriptor, checked, and
//! only then killed, and it has to be a program of this soak's.

use std::path::PathBuf;

use procfs::process::Process;
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::Soak;
use crate::gated::RUNTIME;

/// Kills the process of that number if it's what `is` says; whether it was.
pub(crate) fn kill_if(pid: i32, is: impl Fn(&Process) -> bool) -> bool {
    let handle = rustix::process::Pid::from_raw(pid)
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let (Some(handle), Ok(process)) = (handle, Process::new(pid)) else { return false };
    // The number is still its: it was alive when it was checked, if it can be signalled now.
    is(&process) && pidfd_send_signal(handle, Signal::KILL).is_ok()
}

/// Whether a process has that command line, somewhere.
pub(crate) fn has_words(process: &Process, words: &[&str]) -> bool {
    let line = process.cmdline().unwrap_or_default().join(" ");
    words.iter().all(|word| line.contains(word))
}

/// Kills the first process that has all the words on its command line, and isn't the client that
/// was given them; whether there was one.
pub(crate) fn kill_with(program: &str, words: &[&str]) -> bool {
    let all = procfs::process::all_processes().expect("/proc can be read");
    let is = |process: &Process| {
        let line = process.cmdline().unwrap_or_default();
        let name = line.first().map(PathBuf::from);
        let name = name.as_ref().and_then(|path| path.file_name()).unwrap_or_default();
        name == program && has_words(process, words)
    };
    all.flatten().any(|process| is(&process) && kill_if(process.pid, is))
}

/// Whether a process is of a monitor that this worktree's programs are.
fn is_monitor(process: &Process) -> bool {
    let program = PathBuf::from(RUNTIME).with_file_name("cgpu-monitor");
    process.exe().is_ok_and(|path| path == program)
}

/// The directory of a container's monitor.
fn place(soak: &Soak, id: &str) -> PathBuf {
    let short = format!("{:_<12}", &id[..id.len().min(12)]);
    soak.gated.host.state_dir().join("gate").join(short)
}

/// The monitor of a container, where it lives.
pub(crate) fn monitor(soak: &Soak, id: &str) -> Option<i32> {
    let text = std::fs::read_to_string(place(soak, id).join("process")).unwrap_or_default();
    text.split(' ').next()?.parse().ok()
}

/// Whether it is reported that a container's monitor is lost, or its directory is gone with the container.
pub(crate) fn is_reported_lost(soak: &Soak, id: &str) -> bool {
    let place = place(soak, id);
    place.join("lost").exists() || !place.exists()
}

/// Kills a monitor; whether it was one.
pub(crate) fn kill_monitor(pid: Option<i32>) -> bool {
    pid.is_some_and(|pid| kill_if(pid, is_monitor))
}
