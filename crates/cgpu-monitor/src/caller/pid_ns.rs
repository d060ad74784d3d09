//! How a pid namespace numbers the container's processes.
//!
//! The driver numbers processes for the process that calls it, which is the monitor; the container has numbers of its
//! own. `/proc/PID/status` has a process's number in each pid namespace that it is in, the innermost last.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use crate::sync::Lock;
use cgpu_core::ledger::Process;
use cgpu_host::process::{ProcStatus, ProcessId, of_any_thread};

/// How long the numbers of a namespace are remembered: to find those of thousands of processes takes a tenth of a
/// second, which is charged to no cgroup of the container's.
const FRESH: Duration = Duration::from_millis(100);

/// The map that was asked for last, with its time and its namespace. One thread at a time makes a map.
#[derive(Debug, Default)]
pub(crate) struct PidMaps(Lock<Option<(Instant, u64, PidMap)>>);

impl PidMaps {
    /// The numbers that `processes` have in the namespace of thread `tid`, which is a thread of `process`.
    pub(crate) fn of(&self, tid: i32, process: Process, processes: &BTreeSet<Process>) -> PidMap {
        let Some(namespace) = namespace(tid) else { return PidMap(Vec::new()) };
        let mut last = self.0.lock();
        let known = last.take().filter(|(at, of, _)| *of == namespace && at.elapsed() < FRESH);
        let (at, _, mut numbers) =
            known.unwrap_or_else(|| (Instant::now(), namespace, PidMap::of(namespace, processes)));
        if numbers.in_ns(process.pid()).is_none() {
            // The process may have started after the map was made.
            numbers.0.extend(PidMap::of(namespace, &[process].into()).0);
        }
        *last = Some((at, namespace, numbers.clone()));
        numbers
    }
}

/// Pairs of numbers of processes: on the host, and in a pid namespace.
#[derive(Debug, Clone)]
pub(crate) struct PidMap(Vec<(u32, u32)>);

impl PidMap {
    /// The numbers that `processes` have in a namespace. A process in a namespace below is left out.
    fn of(namespace: u64, processes: &BTreeSet<Process>) -> Self {
        let numbers = processes.iter().filter_map(|process| {
            let id = ProcessId::from(*process);
            let number = ProcStatus::read(id.pid).ok()?.innermost_pid().map(i32::cast_unsigned);
            let number = number.filter(|_| self::namespace(id.pid) == Some(namespace))?;
            // The pid may belong to another process by now.
            (ProcessId::of(id.pid) == Some(id)).then_some((id.pid.cast_unsigned(), number))
        });
        PidMap(numbers.collect())
    }

    /// The number in the namespace of the process that has `host_pid` on the host.
    pub(crate) fn in_ns(&self, host_pid: u32) -> Option<u32> {
        self.0.iter().find(|(pid, _)| *pid == host_pid).map(|(_, number)| *number)
    }

    /// The number on the host of the process that has `inner_pid` in the namespace.
    pub(crate) fn on_host(&self, inner_pid: u32) -> Option<u32> {
        self.0.iter().find(|(_, number)| *number == inner_pid).map(|(pid, _)| *pid)
    }
}

/// The inode of a process's pid namespace.
fn namespace(pid: i32) -> Option<u64> {
    of_any_thread(pid, |tid| Some(fs::metadata(format!("/proc/{tid}/ns/pid")).ok()?.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process in the monitor's own pid namespace has the pid by which the monitor knows it.
    #[test]
    fn own_process_keeps_its_pid_in_own_namespace() {
        let own = ProcessId::own().unwrap();
        let pid = own.pid.cast_unsigned();
        let before = ProcessId { start_ticks: own.start_ticks - 1, pid: own.pid };
        let namespace = namespace(own.pid).unwrap();
        let numbers = PidMap::of(namespace, &[Process::from(own)].into());
        assert_eq!((numbers.in_ns(pid), numbers.on_host(pid)), (Some(pid), Some(pid)));
        assert_eq!(numbers.in_ns(1), None);
        assert_eq!(PidMap::of(namespace, &[Process::from(before)].into()).in_ns(pid), None);
    }

    /// A process that started since the pids of others were mapped is known.
    #[test]
    fn process_started_after_the_map_is_known() {
        let own = ProcessId::own().unwrap();
        let pid = own.pid.cast_unsigned();
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let other = ProcessId::find(child.id().cast_signed()).unwrap().unwrap();
        let (asked, numbers) = loop {
            let begun = Instant::now();
            let asked = PidMaps::default();
            let numbers = asked.of(own.pid, Process::from(own), &[Process::from(other)].into());
            assert_eq!(numbers.in_ns(pid), Some(pid));
            assert_eq!(numbers.in_ns(child.id()), Some(child.id()));
            let numbers = asked.of(own.pid, Process::from(own), &BTreeSet::new());
            if begun.elapsed() < FRESH {
                break (asked, numbers);
            }
        };
        // Before the map is old, no process is searched for again.
        assert_eq!(numbers.in_ns(child.id()), Some(child.id()));
        std::thread::sleep(FRESH + Duration::from_millis(1));
        let numbers = asked.of(own.pid, Process::from(own), &BTreeSet::new());
        assert_eq!((numbers.in_ns(child.id()), numbers.in_ns(pid)), (None, Some(pid)));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
