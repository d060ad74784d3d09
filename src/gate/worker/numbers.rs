//! How a pid namespace numbers the container's processes.
//!
//! The driver numbers processes for who calls it, which is us; the container has numbers of
//! its own. `/proc/PID/status` has a process's number in each namespace it is in, the
//! innermost last.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;

use super::target::process_id;
use crate::ledger::Process;
use crate::process::{ProcessId, told};

/// Numbers of processes: ours, and a namespace's.
#[derive(Debug)]
pub(super) struct Numbers(Vec<(u32, u32)>);

impl Numbers {
    /// Those that the namespace of thread `tid` has of `processes`. A process in a namespace
    /// below is left out.
    pub(super) fn of(tid: i32, processes: &BTreeSet<Process>) -> Self {
        let Some(namespace) = namespace(tid) else { return Numbers(Vec::new()) };
        let numbers = processes.iter().filter_map(|process| {
            let id = process_id(*process);
            let number =
                innermost(id.pid).filter(|_| self::namespace(id.pid) == Some(namespace))?;
            // Or it could be a stranger's by now.
            (ProcessId::of(id.pid) == Some(id)).then_some((id.pid.cast_unsigned(), number))
        });
        Numbers(numbers.collect())
    }

    /// The namespace's number of a process.
    pub(super) fn theirs(&self, ours: u32) -> Option<u32> {
        self.0.iter().find(|(pid, _)| *pid == ours).map(|(_, number)| *number)
    }

    /// Our number of a process.
    pub(super) fn ours(&self, theirs: u32) -> Option<u32> {
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
    use crate::gate::worker::target::number;

    #[test]
    fn a_process_of_ours_has_the_number_we_know_it_by() {
        let own = ProcessId::own().unwrap();
        let pid = own.pid.cast_unsigned();
        let before = ProcessId { start_ticks: own.start_ticks - 1, pid: own.pid };
        let numbers = Numbers::of(own.pid, &[number(own)].into());
        assert_eq!((numbers.theirs(pid), numbers.ours(pid)), (Some(pid), Some(pid)));
        assert_eq!(numbers.theirs(1), None);
        assert_eq!(Numbers::of(own.pid, &[number(before)].into()).theirs(pid), None);
    }
}
