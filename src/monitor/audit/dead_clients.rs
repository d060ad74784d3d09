//! Ends processes that keep the memory of a client whose maker is dead.
//!
//! The driver reports memory under the pid of the process that made the memory's client
//! (`NV2080_CTRL_CMD_GPU_GET_PID_INFO`). When the maker is dead and another process still has the client's file, by a
//! descriptor that a fork inherited, say, the memory stays. The kernel may give the maker's pid to a process of another
//! container, which would then seem to have the memory. So a process that keeps such a file is killed, like a process
//! that takes memory past the monitor. CUDA serves no process that was forked after CUDA began, so no process loses
//! memory that it could use.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::events::Event;
use crate::gate::settings::NodeKind;
use crate::ledger::{Client, Process};
use crate::monitor::audit::client_users::{
    LingeringPids, client_users, living_callers, users_of_clients_by,
};
use crate::monitor::audit::holdings::DeadPids;
use crate::monitor::caller::compare_files;
use crate::monitor::driver::{MonitorClient, Presence};
use crate::monitor::processes::Processes;
use crate::monitor::state::ContainerState;
use crate::process::ProcessId;
use crate::rm::about::Held;

/// How long memory may show under a dead process's pid before the processes that have its client are killed. The driver
/// may close the process's files later than the kernel says that the process is gone.
const GRACE: Duration = Duration::from_secs(1);

/// How long such memory may show at most. All the container's processes that called or have a client's file are
/// killed then: the file may be in a socket.
const LONGEST_GRACE: Duration = Duration::from_secs(5);

/// The kind of node that a client's file is opened on.
const CLIENT_NODE: NodeKind = NodeKind::Control;

/// Which processes are killed, so that the memory under a dead process's pid is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KillScope {
    /// None yet.
    None,
    /// Those that have a client of the dead process.
    ClientOwners,
    /// All that called or have a client's file.
    AllCallers,
}

impl KillScope {
    /// The scope once memory has shown for `lasted` under a dead process's pid.
    fn after(lasted: Duration) -> Self {
        match lasted {
            _ if lasted >= LONGEST_GRACE => KillScope::AllCallers,
            _ if lasted >= GRACE => KillScope::ClientOwners,
            _ => KillScope::None,
        }
    }
}

/// Kills processes that keep memory of dead processes: of those in `dead` whose pids no process has now, and of
/// forgotten processes. `all` is what the driver shows, by GPU; `seen_pids` has how long it has shown dead processes.
pub(crate) fn end_client_users(
    processes: &Processes,
    seen_pids: &LingeringPids,
    dead: &[Process],
    all: &[Vec<Held>],
    pids: &DeadPids,
) {
    let dead = dead.iter().filter(|process| !pids.reused.contains(process));
    let dead = dead.map(|process| process.pid());
    let dead_pids: BTreeSet<u32> = dead.chain(pids.former.iter().copied()).collect();
    let held = all.iter().flatten().filter(|held| held.bytes() > 0).map(|held| held.pid);
    let lingering: BTreeSet<u32> = held.filter(|pid| dead_pids.contains(pid)).collect();
    if !lingering.is_empty() {
        processes.state.books().due.schedule_by(Instant::now() + GRACE);
    }
    for (pid, lasted) in seen_pids.note(&lingering, Instant::now()) {
        let users = match KillScope::after(lasted) {
            KillScope::None => continue,
            KillScope::ClientOwners => {
                let seen = users_of_clients_by(&processes.state.books(), pid);
                if seen.is_empty() { inheritors(processes) } else { seen }
            }
            KillScope::AllCallers => {
                let callers = living_callers(&processes.state.books());
                callers.into_iter().chain(silent_processes_with_files(processes, &[])).collect()
            }
        };
        users.into_iter().for_each(|user| processes.kill(user, Event::killed_for_dead_client()));
    }
}

/// The processes in `dead` that were seen with a client which still exists. Some process has that client's file,
/// and may take memory by it.
pub(crate) fn with_clients(
    state: &ContainerState,
    own: &MonitorClient,
    dead: &[Process],
) -> BTreeSet<Process> {
    if dead.is_empty() || !own.can_tell() {
        return BTreeSet::new();
    }
    let is_dead = |(_, process): &(Client, Process)| dead.contains(process);
    let all: Vec<_> = client_users(&state.books()).filter(is_dead).collect();
    let is_there = |client: Client| own.presence(client.0, client.0) != Presence::NoClient;
    let there = all.into_iter().filter(|(client, _)| is_there(*client));
    there.map(|(_, process)| process).collect()
}

/// The container's processes that never called and have a client's file that no living caller has. Empty where the
/// callers' files can't be listed.
fn inheritors(processes: &Processes) -> BTreeSet<Process> {
    let callers = living_callers(&processes.state.books());
    let files_of = |process: Process| processes.open_files_of(process.pid(), CLIENT_NODE);
    let files: Option<Vec<_>> = callers.into_iter().map(files_of).collect();
    files.map(|files| silent_processes_with_files(processes, &files.concat())).unwrap_or_default()
}

/// The container's processes that never called and have a client's file that is not in `known`.
fn silent_processes_with_files(processes: &Processes, known: &[(u32, i32)]) -> BTreeSet<Process> {
    let is_known = |file: (u32, i32)| {
        known.iter().any(|other| compare_files(file, *other).is_ok_and(|order| order.is_eq()))
    };
    let called = processes.caller_pids();
    let silent = processes.container_pids().into_iter().filter(|pid| !called.contains(pid));
    let with_files = silent.filter(|pid| {
        let files = processes.open_files_of(*pid, CLIENT_NODE).unwrap_or_default();
        files.into_iter().any(|file| !is_known(file))
    });
    with_files.filter_map(|pid| ProcessId::of(pid.cast_signed())).map(Process::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_of_a_dead_processs_client_are_killed_first() {
        let after = |ms| KillScope::after(Duration::from_millis(ms));
        assert_eq!([after(0), after(999)], [KillScope::None; 2]);
        assert_eq!([after(1000), after(4999)], [KillScope::ClientOwners; 2]);
        assert_eq!(after(5000), KillScope::AllCallers);
    }
}
