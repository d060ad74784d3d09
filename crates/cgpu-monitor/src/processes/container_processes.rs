//! The container's processes: which they are, what they have open, and how they are ended.

use std::collections::BTreeSet;
use std::{fs, io};

use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};

use crate::caller::threads_by_fd_table;
use crate::gate::settings::NodeKind;
use crate::log::described;
use crate::node::kind_at;
use crate::processes::provenance_index::mount_namespace;
use crate::shared::Monitor;
use cgpu_core::ledger::Process;
use cgpu_host::events::Event;
use cgpu_host::process::{self, ProcessId, of_any_thread};

/// The pids of the processes that called and are still known.
pub(crate) fn caller_pids(monitor: &Monitor) -> BTreeSet<u32> {
    let state = monitor.state();
    state.processes.iter().map(|process| process.pid()).collect()
}

/// The pids of all processes of the container, also of those that never called.
pub(crate) fn container_pids(monitor: &Monitor) -> BTreeSet<u32> {
    let is_inside = |pid: &u32| {
        let namespace = mount_namespace(pid.cast_signed());
        namespace.is_some_and(|(_, inode)| is_in_container(monitor, *pid, inode))
    };
    let mut pids = caller_pids(monitor);
    pids.extend(all_pids().filter(is_inside));
    pids
}

/// Whether a process is the container's, or a monitor.
pub(crate) fn is_container_or_monitor(monitor: &Monitor, pid: u32) -> bool {
    // Where the mount namespace can't be read, too little is known to end the process.
    let Some(namespace) = mount_namespace(pid.cast_signed()) else { return true };
    is_monitor(pid) || is_in_container(monitor, pid, namespace.1)
}

fn is_in_container(monitor: &Monitor, pid: u32, namespace: u64) -> bool {
    let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    monitor.provenances.has_process(namespace, &cgroup)
}

/// The descriptors of nodes of that kind that the container's processes have, each with its thread. `None` if not all
/// could be inspected, because the monitor has no descriptors left, say.
pub(crate) fn open_files(monitor: &Monitor, kind: NodeKind) -> Option<Vec<(u32, i32)>> {
    let mut open = Vec::new();
    for pid in container_pids(monitor) {
        open.extend(open_files_of(monitor, pid, kind)?);
    }
    Some(open)
}

/// Like [`open_files`], for the descriptors that the one process `pid` has.
pub(crate) fn open_files_of(
    monitor: &Monitor,
    pid: u32,
    kind: NodeKind,
) -> Option<Vec<(u32, i32)>> {
    let mut open = Vec::new();
    for tid in threads_by_fd_table(pid) {
        let entries = match fs::read_dir(format!("/proc/{tid}/fd")) {
            Ok(entries) => entries,
            Err(error) if is_gone(&error) => continue,
            Err(_) => return None,
        };
        for entry in entries.flatten() {
            let number = entry.file_name().to_str().and_then(|number| number.parse().ok());
            if let Some(number) = number
                && kind_at(&monitor.settings.nodes, &entry.path()) == Some(kind)
            {
                open.push((tid, number));
            }
        }
    }
    Some(open)
}

/// Kills a process that took memory bypassing the gate, or keeps memory of a dead process alive. The event says why.
pub(crate) fn kill_process(monitor: &Monitor, process: Process, event: Event) {
    let pid = ProcessId::from(process);
    // The pidfd names the process that has the pid when it is opened, so the pid is compared after that.
    let Ok(pidfd) = process::pidfd(pid.pid) else { return };
    if ProcessId::of(pid.pid) != Some(pid) {
        return;
    }
    let first = {
        let mut killed = monitor.killed.lock();
        killed.retain(|killed| ProcessId::from(*killed).alive());
        killed.insert(process)
    };
    let event = first.then(|| described(event, pid.pid));
    // Counted before the signal: a reader that sees that the process has exited finds it counted.
    if first {
        monitor.count_killed();
    }
    let _ = pidfd_send_signal(pidfd, Signal::KILL);
    if let Some(event) = event {
        monitor.log.report_killed(event);
    }
}

pub(crate) fn kill_all_processes(monitor: &Monitor) {
    let retained = [1, std::process::id(), std::os::unix::process::parent_id()];
    let callers = monitor.state().processes.clone();
    for pid in container_pids(monitor).into_iter().filter(|pid| !retained.contains(pid)) {
        // The pidfd is opened before the process is inspected, so that the signal reaches no other process.
        let Ok(pidfd) = process::pidfd(pid.cast_signed()) else { continue };
        let namespace = mount_namespace(pid.cast_signed());
        let is_inside = namespace.is_some_and(|(_, inode)| is_in_container(monitor, pid, inode));
        // A caller's pid may be another process's by now.
        let now = ProcessId::of(pid.cast_signed()).map(Process::from);
        if is_inside || now.is_some_and(|now| callers.contains(&now)) {
            monitor.count_killed();
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }
}

/// Whether a process is a monitor, in the mount namespace of this process.
pub(crate) fn is_monitor(pid: u32) -> bool {
    let namespace = mount_namespace(pid.cast_signed());
    let program = |tid| fs::read_link(format!("/proc/{tid}/exe")).ok();
    let name = of_any_thread(pid.cast_signed(), program).unwrap_or_default();
    let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // The kernel adds " (deleted)" to the name where an upgrade has replaced the file.
    namespace.is_some()
        && namespace == mount_namespace(std::process::id().cast_signed())
        && name.trim_end_matches(" (deleted)") == "cgpu-monitor"
}

/// Whether a process is a program of the host: it is in the monitor's pid namespace. `None` where that can't be read,
/// because the process ends, say.
pub(crate) fn is_of_host(pid: i32) -> Option<bool> {
    let namespace =
        |pid| of_any_thread(pid, |tid| fs::read_link(format!("/proc/{tid}/ns/pid")).ok());
    let own = namespace(std::process::id().cast_signed());
    namespace(pid).map(|namespace| Some(namespace) == own)
}

/// Whether procfs gives this error because the process has ended.
fn is_gone(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOENT | Errno::SRCH))
}

/// The pids of all processes of the host.
pub(crate) fn all_pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}
