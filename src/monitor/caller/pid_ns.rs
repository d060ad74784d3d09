//! How a pid namespace numbers the container's processes.
//!
//! The driver numbers processes for who calls it, which is us; the container has numbers of
//! its own. `/proc/PID/status` has a process's number in each namespace it is in, the
//! innermost last.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use crate::ledger::Process;
use crate::monitor::journal::process_number::process_id;
use crate::monitor::lock::Lock;
use crate::process::{ProcessId, told};

/// How long numbers are taken for what they were: to find out those of thousands takes a tenth of a
/// second, in no cgroup of the container's.
const FRESH: Duration = Duration::from_millis(100);

/// Those of one namespace that were asked for last, which one thread finds out at a time.
#[derive(Debug, Default)]
pub(crate) struct PidMaps(Lock<Option<(Instant, u64, PidMap)>>);

impl PidMaps {
    /// Those that the namespace of thread `tid`, which is of `process`, has of `processes`.
    pub(crate) fn of(&self, tid: i32, process: Process, processes: &BTreeSet<Process>) -> PidMap {
        let Some(namespace) = namespace(tid) else { return PidMap(Vec::new()) };
        let mut last = self.0.lock();
        let known = last.take().filter(|(at, of, _)| *of == namespace && at.elapsed() < FRESH);
        let (at, _, mut numbers) =
            known.unwrap_or_else(|| (Instant::now(), namespace, PidMap::of(namespace, processes)));
        if numbers.theirs(process_id(process).pid.cast_unsigned()).is_none() {
            // It may have come since.
            numbers.0.extend(PidMap::of(namespace, &[process].into()).0);
        }
        *last = Some((at, namespace, numbers.clone()));
        numbers
    }
}

/// Numbers of processes: ours, and a namespace's.
#[derive(Debug, Clone)]
pub(crate) struct PidMap(Vec<(u32, u32)>);

impl PidMap {
    /// Those that a namespace has of `processes`. A process in a namespace below is left out.
    fn of(namespace: u64, processes: &BTreeSet<Process>) -> Self {
        let numbers = processes.iter().filter_map(|process| {
            let id = process_id(*process);
            let number =
                innermost(id.pid).filter(|_| self::namespace(id.pid) == Some(namespace))?;
            // Or it could be a stranger's by now.
            (ProcessId::of(id.pid) == Some(id)).then_some((id.pid.cast_unsigned(), number))
        });
        PidMap(numbers.collect())
    }

    /// The namespace's number of a process.
    pub(crate) fn theirs(&self, ours: u32) -> Option<u32> {
        self.0.iter().find(|(pid, _)| *pid == ours).map(|(_, number)| *number)
    }

    /// Our number of a process.
    pub(crate) fn ours(&self, theirs: u32) -> Option<u32> {
        self.0.iter().find(|(_, number)| *number == theirs).map(|(pid, _)| *pid)
    }
}

/// The pid namespace of a process, by its inode.
fn namespace(pid: i32) -> Option<u64> {
    told(pid, |tid| Some(fs::metadata(format!("/proc/{tid}/ns/pid")).ok()?.ino()))
}

/// A process's number in its own namespace.
fn innermost(pid: i32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::journal::process_number::number;

    #[test]
    fn a_process_of_ours_has_the_number_we_know_it_by() {
        let own = ProcessId::own().unwrap();
        let pid = own.pid.cast_unsigned();
        let before = ProcessId { start_ticks: own.start_ticks - 1, pid: own.pid };
        let namespace = namespace(own.pid).unwrap();
        let numbers = PidMap::of(namespace, &[number(own)].into());
        assert_eq!((numbers.theirs(pid), numbers.ours(pid)), (Some(pid), Some(pid)));
        assert_eq!(numbers.theirs(1), None);
        assert_eq!(PidMap::of(namespace, &[number(before)].into()).theirs(pid), None);
    }

    #[test]
    fn who_came_since_others_were_asked_for_is_known() {
        let own = ProcessId::own().unwrap();
        let pid = own.pid.cast_unsigned();
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let other = ProcessId::find(child.id().cast_signed()).unwrap().unwrap();
        let asked = PidMaps::default();
        let numbers = asked.of(own.pid, number(own), &[number(other)].into());
        assert_eq!(numbers.theirs(pid), Some(pid));
        assert_eq!(numbers.theirs(child.id()), Some(child.id()));
        // So soon nobody is looked for again.
        let numbers = asked.of(own.pid, number(own), &BTreeSet::new());
        assert_eq!(numbers.theirs(child.id()), Some(child.id()));
        std::thread::sleep(FRESH + Duration::from_millis(1));
        let numbers = asked.of(own.pid, number(own), &BTreeSet::new());
        assert_eq!((numbers.theirs(child.id()), numbers.theirs(pid)), (None, Some(pid)));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
