//! The processes to which the driver attributes memory: which processes were seen with which client, and what happens
//! to a client whose creator is dead, or whose container has ended.
//!
//! **The creator is dead.** The driver reports memory under the pid of the process that made the memory's client
//! (`NV2080_CTRL_CMD_GPU_GET_PID_INFO`). If the creator is dead and another process still has the client's file, by a
//! descriptor that a fork inherited, say, the memory stays. The kernel may give the creator's pid to a process of
//! another container, to which the memory would then seem to belong. So a process that retains such a file is killed,
//! like a process that takes untracked memory. CUDA serves no process that was forked after CUDA began, so no process
//! loses memory that it could use.
//!
//! **The container has ended.** A client lives as long as the file through which it was made. If a program of the host
//! has a descriptor of that file, the client outlives the container, with its memory, and the program isn't killed for
//! it ([`HolderFacts`](crate::processes::HolderFacts)). But the driver frees a client for any process that asks through
//! the client's file (`rmclientValidate` compares the file, not the process), so the monitor asks through a duplicate
//! of the program's descriptor. The program retains a file without a client.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::audit::history::DeadPids;
use crate::caller::{PIDFD_THREAD, compare_files};
use crate::driver::{MonitorClient, Presence, presence};
use crate::gate::settings::NodeKind;
use crate::node::{Device, Rm};
use crate::processes::{caller_pids, container_pids, kill_process, mounts_of, open_files_of};
use crate::shared::Monitor;
use crate::state::{ContainerState, NO_CLIENT};
use cgpu_core::ledger::{Client, Entry, Handle, Process};
use cgpu_host::events::Event;
use cgpu_host::process::ProcessId;
use nvrm::about::Held;

/// How long memory may be attributed to a dead process's pid before the processes that have its client are killed. The
/// driver may close the process's files later than the kernel reports that the process has exited.
const GRACE: Duration = Duration::from_secs(1);

/// How long such memory may be attributed at most. All the container's processes that called or have a client's file
/// are killed then: the file may be in a socket.
const LONGEST_GRACE: Duration = Duration::from_secs(5);

/// The kind of node that a client's file is opened on.
const CLIENT_NODE: NodeKind = NodeKind::Control;

/// The clients and the processes that were seen with them. A process is in several pairs if it used several clients.
fn client_users(state: &ContainerState) -> impl Iterator<Item = (Client, Process)> {
    state.ledger.holders().filter(|(client, _)| *client != NO_CLIENT)
}

/// The living processes that were seen with a client which the process with that pid, dead or alive, was seen with.
fn users_of_clients_by(state: &ContainerState, pid: u32) -> BTreeSet<Process> {
    let has_pid = |process: Process| process.pid() == pid;
    let clients = client_users(state).filter(|(_, process)| has_pid(*process));
    let clients: BTreeSet<Client> = clients.map(|(client, _)| client).collect();
    let users = client_users(state).filter(|(client, _)| clients.contains(client));
    users.map(|(_, process)| process).filter(|process| ProcessId::from(*process).alive()).collect()
}

/// The living processes that called.
fn living_callers(state: &ContainerState) -> BTreeSet<Process> {
    let processes = state.processes.iter().copied();
    processes.filter(|process| ProcessId::from(*process).alive()).collect()
}

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
    /// The scope once memory has been attributed to a dead process's pid for `lasted`.
    fn after(lasted: Duration) -> Self {
        match lasted {
            _ if lasted >= LONGEST_GRACE => KillScope::AllCallers,
            _ if lasted >= GRACE => KillScope::ClientOwners,
            _ => KillScope::None,
        }
    }
}

/// Kills processes that retain memory of dead processes: of those in `dead` whose pids no process has now, and of
/// forgotten processes. `all` is the driver usage, by GPU.
pub(crate) fn end_client_users(
    monitor: &Monitor,
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
        monitor.state().due.schedule_by(Instant::now() + GRACE);
    }
    for (pid, lasted) in monitor.history.lingering.note(&lingering, Instant::now()) {
        let users = match KillScope::after(lasted) {
            KillScope::None => continue,
            KillScope::ClientOwners => {
                let seen = users_of_clients_by(&monitor.state(), pid);
                if seen.is_empty() { inheritors(monitor) } else { seen }
            }
            KillScope::AllCallers => {
                let callers = living_callers(&monitor.state());
                callers.into_iter().chain(silent_processes_with_files(monitor, &[])).collect()
            }
        };
        users
            .into_iter()
            .for_each(|user| kill_process(monitor, user, Event::killed_for_dead_client()));
    }
}

/// The processes in `dead` that were seen with a client which still exists. Some process has that client's file,
/// and may take memory by it.
pub(crate) fn with_clients(
    monitor: &Monitor,
    own: &MonitorClient,
    dead: &[Process],
) -> BTreeSet<Process> {
    if dead.is_empty() || !own.can_report() {
        return BTreeSet::new();
    }
    let is_dead = |(_, process): &(Client, Process)| dead.contains(process);
    let all: Vec<_> = client_users(&monitor.state()).filter(is_dead).collect();
    let is_there = |client: Client| own.presence(client.0, client.0) != Presence::NoClient;
    let there = all.into_iter().filter(|(client, _)| is_there(*client));
    there.map(|(_, process)| process).collect()
}

/// The container's processes that never called and have a client's file that no living caller has. Empty if the
/// callers' files can't be listed.
fn inheritors(monitor: &Monitor) -> BTreeSet<Process> {
    let callers = living_callers(&monitor.state());
    let files_of = |process: Process| open_files_of(monitor, process.pid(), CLIENT_NODE);
    let files: Option<Vec<_>> = callers.into_iter().map(files_of).collect();
    files.map(|files| silent_processes_with_files(monitor, &files.concat())).unwrap_or_default()
}

/// The container's processes that never called and have a client's file that is not in `known`.
fn silent_processes_with_files(monitor: &Monitor, known: &[(u32, i32)]) -> BTreeSet<Process> {
    let is_known = |file: (u32, i32)| {
        known.iter().any(|other| compare_files(file, *other).is_ok_and(|order| order.is_eq()))
    };
    let called = caller_pids(monitor);
    let silent = container_pids(monitor).into_iter().filter(|pid| !called.contains(pid));
    let with_files = silent.filter(|pid| {
        let files = open_files_of(monitor, *pid, CLIENT_NODE).unwrap_or_default();
        files.into_iter().any(|file| !is_known(file))
    });
    with_files.filter_map(|pid| ProcessId::of(pid.cast_signed())).map(Process::from).collect()
}

/// Frees the container's clients whose files the process `pid` has. The container has ended: no call of it makes a
/// client meanwhile.
pub(crate) fn free_left_clients(monitor: &Monitor, pid: u32) {
    let left: BTreeSet<Client> = client_users(&monitor.state()).map(|(client, _)| client).collect();
    if left.is_empty() {
        return;
    }
    for file in control_files(monitor, pid) {
        let rm = Rm { release: &monitor.release, device: &file };
        for client in &left {
            // Fails if the client was made through another file.
            let _ = rm.free(client.0, client.0, client.0);
        }
    }
    for client in left {
        if presence(monitor, client.0, client.0) == Some(Presence::NoClient) {
            let mut state = monitor.state();
            state.enter(Entry::Free { client, handle: Handle(client.0) });
            state.devices.forget_client(client.0);
        }
    }
}

/// Whether the driver still has a client of a container that has ended: then a process has the client's file, or the
/// file is in a socket.
pub(crate) fn has_left_clients(monitor: &Monitor) -> bool {
    let all: BTreeSet<Client> = client_users(&monitor.state()).map(|(client, _)| client).collect();
    let is_there = |client: Client| {
        presence(monitor, client.0, client.0).is_some_and(|found| found != Presence::NoClient)
    };
    all.into_iter().any(is_there)
}

/// Duplicates of the container's control files that a process has.
fn control_files(monitor: &Monitor, pid: u32) -> Vec<Device> {
    let Some(own_mounts) = mounts_of(pid.cast_signed()) else { return Vec::new() };
    let open = open_files_of(monitor, pid, NodeKind::Control).unwrap_or_default();
    let files = open.into_iter().filter_map(|(tid, descriptor)| {
        let file = duplicate(pid, tid, descriptor)?;
        // The process may have replaced the file meanwhile: what counts is the duplicate.
        let device = Device::of(&monitor.settings.nodes, file)?;
        let mount = device.mount?;
        let is_left = device.kind == NodeKind::Control
            && !own_mounts.contains(&mount)
            && monitor.provenances.has_file(mount, device.place.0);
        is_left.then_some(device)
    });
    files.collect()
}

/// A duplicate of a descriptor of the thread `tid` of the process `pid`.
fn duplicate(pid: u32, tid: u32, descriptor: i32) -> Option<OwnedFd> {
    let flags = if pid == tid { PidfdFlags::empty() } else { PIDFD_THREAD };
    let pidfd = pidfd_open(Pid::from_raw(tid.cast_signed())?, flags).ok()?;
    pidfd_getfd(pidfd, descriptor, PidfdGetfdFlags::empty()).ok()
}

/// The pid to which the driver attributes most beyond what its process is charged for. A client's charges count for the
/// first process that was seen with the client, which is mostly its creator.
pub(crate) fn least_charged(state: &ContainerState, gpu: usize, held: &[Held]) -> Option<u32> {
    let charges = state.ledger.charged_by_client(gpu);
    let mut owners: BTreeMap<Client, Process> = BTreeMap::new();
    for (client, process) in state.ledger.holders() {
        owners.entry(client).or_insert(process);
    }
    let charged_bytes = |pid: u32| {
        let of_pid = charges
            .iter()
            .filter(|(client, _)| owners.get(client).is_some_and(|of| of.pid() == pid));
        of_pid.fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes))
    };
    let excess = |held: &&Held| held.made_bytes.saturating_sub(charged_bytes(held.pid));
    held.iter().max_by_key(excess).map(|held| held.pid)
}

/// The processes to kill for the memory that the driver attributes to `pid`: the caller with that pid; if it is dead,
/// the living processes that were seen with one of its clients; if there are none, all living callers.
pub(crate) fn processes_to_kill(state: &ContainerState, pid: u32) -> BTreeSet<Process> {
    let callers = living_callers(state);
    let of_pid = |process: &&Process| process.pid() == pid;
    if let Some(named) = callers.iter().find(of_pid) {
        return [*named].into();
    }
    let users = users_of_clients_by(state, pid);
    if users.is_empty() { callers } else { users }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::state_of;
    use cgpu_core::ledger::{Entry, Handle};
    use cgpu_host::process::ProcessId;

    /// If a client's creator is dead, the processes that own the client are killed first, and all
    /// callers later.
    #[test]
    fn owners_of_an_orphaned_client_are_killed_first() {
        let after = |ms| KillScope::after(Duration::from_millis(ms));
        assert_eq!([after(0), after(999)], [KillScope::None; 2]);
        assert_eq!([after(1000), after(4999)], [KillScope::ClientOwners; 2]);
        assert_eq!(after(5000), KillScope::AllCallers);
    }

    /// A dead process: no process has its pid.
    fn dead(start_ticks: u64) -> Process {
        Process::from(ProcessId { pid: 0x3f_fff0, start_ticks })
    }

    fn alive() -> [Process; 2] {
        let of = |pid: i32| Process::from(ProcessId::of(pid).expect("it lives"));
        [
            of(std::process::id().cast_signed()),
            of(std::os::unix::process::parent_id().cast_signed()),
        ]
    }

    fn held(process: Process) -> Held {
        Held { pid: process.pid(), made_bytes: 9, duplicated_bytes: 0 }
    }

    #[test]
    fn client_is_charged_to_its_first_user() {
        let mut state = state_of(vec![]);
        let [creator, user] = alive();
        state.note_user(1, creator);
        state.note_user(1, user);
        state.note_user(2, user);
        for (client, bytes) in [(1, 4), (2, 1)] {
            let (client, parent, handle) = (Client(client), Handle(client), Handle(7));
            state.enter(Entry::Commit { gpu: 0, bytes, client, parent, handle });
        }
        // 9 bytes are attributed to each. 4 of the creator's are charged, and 1 of the user's.
        let [creator, user, dead] = [creator, user, dead(1)].map(held);
        assert_eq!(least_charged(&state, 0, &[creator, user, dead]), Some(dead.pid));
        assert_eq!(least_charged(&state, 0, &[creator, user]), Some(user.pid));
        assert_eq!(least_charged(&state, 0, &[user, creator]), Some(user.pid));
        assert_eq!(least_charged(&state, 0, &[]), None);
    }

    /// The process that memory is attributed to is killed; if it is dead, the users of its clients;
    /// if none is known, all callers.
    #[test]
    fn attributed_process_is_killed_else_client_users() {
        let mut state = state_of(vec![]);
        let ([first, second], gone) = (alive(), dead(1));
        for process in [first, second, gone] {
            assert!(state.note_process(process));
        }
        let of = |state: &ContainerState, process: Process| processes_to_kill(state, process.pid());
        assert_eq!(of(&state, first), [first].into());
        assert_eq!(of(&state, gone), [first, second].into(), "no process was seen with its client");
        state.note_user(5, gone);
        state.note_user(5, second);
        assert_eq!(of(&state, gone), [second].into());
        assert_eq!(
            of(&state, Process::from(ProcessId { pid: 2, start_ticks: 0 })),
            [first, second].into()
        );
    }
}
