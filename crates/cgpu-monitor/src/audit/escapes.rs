//! Finds outside processes that have the container's descriptors, and decides what happens to them.
//!
//! A descriptor can be sent to a process that no filter watches. Memory that is taken through it appears in the driver
//! usage alone: under the process that made the client, which may be dead by then, or under an outside process that
//! made a client of its own. So the driver usage of these processes is queried, too. Then the monitor searches for
//! processes that aren't the container's and have a file which was opened in the container
//! ([`ProvenanceIndex`](crate::processes)). [`HolderFacts`] decides what happens to each.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rustix::process::{Signal, pidfd_send_signal};

use crate::audit::clients::free_left_clients;
use crate::driver::driver_usage_of;
use crate::gate::wire::Holder;
use crate::log::described;
use crate::processes::{
    Consequence, Evidence, HolderFacts, all_pids, caller_pids, descriptors_of,
    is_container_or_monitor, is_of_host, kill_all_processes,
};
use crate::shared::Monitor;
use cgpu_host::events::Event;
use cgpu_host::process::{ProcStatus, ProcessId, is_running, pidfd};

/// The shortest time between two checks whether outside processes have taken memory.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// The time between two searches for descriptors while memory in use isn't explained; the first search comes no later
/// than this time after such memory was found.
const SEARCH: Duration = Duration::from_millis(200);

/// How often descriptors are searched while memory of dead processes stays in use.
const SLOW_SEARCH: Duration = Duration::from_secs(2);

/// A search begins if so many more bytes are in use that no known process has: the client of a dead outside process may
/// have them, say. The driver's own needs, contexts for example, are less, or are searched for in vain.
const UNEXPLAINED_BYTES: i128 = 16 << 20;

/// Checks in a row that may be dropped because the driver usage changed meanwhile.
const MOST_CHANGED_CHECKS: u32 = 1;

/// How long descriptors are searched for after untracked memory was found.
const SUSPICION: Duration = Duration::from_secs(3);

/// The most programs of the host that are logged.
const MOST_REPORTED: usize = 256;

#[derive(Debug, Default)]
pub(crate) struct Search {
    /// Whether a process was killed.
    pub(crate) has_killed: bool,
    /// Programs of the host that have a descriptor of the container's and weren't killed.
    pub(crate) holders: Vec<Holder>,
}

/// Notes that untracked memory is in use: memory for which no call asked the monitor.
pub(crate) fn suspect(monitor: &Monitor) {
    monitor.escapes.lock().suspicion = Some(Instant::now() + SUSPICION);
}

/// How long ago descriptors were searched for; [`Duration::MAX`] if they never were.
pub(crate) fn since_search(monitor: &Monitor) -> Duration {
    monitor.escapes.lock().searched.map_or(Duration::MAX, |searched| searched.elapsed())
}

/// Checks the driver usage of outside processes. If that usage, or the container's own, gives reason to, searches for
/// outside processes that have the container's descriptors.
pub(crate) fn end_escapes(monitor: &Monitor) {
    let provenances = &monitor.provenances;
    let now = Instant::now();
    if provenances.is_unknown() {
        return;
    }
    let callers = caller_pids(monitor);
    if callers.is_empty() && !provenances.is_watched() {
        return;
    }
    if monitor.escapes.lock().checked.is_none_or(|checked| now - checked >= POLL_INTERVAL) {
        monitor.escapes.lock().checked = Some(now);
        check_driver_usage(monitor, &callers);
    }
    let (suspicious, lingering, searched) = {
        let found = monitor.escapes.lock();
        let is_shown = |pid| found.usage.contains_key(&pid);
        let lingering = provenances.has_unused_dead_pid(is_shown);
        (found.suspicion.is_some_and(|until| now < until), lingering, found.searched)
    };
    let since = searched.map_or(Duration::MAX, |searched| now - searched);
    if (suspicious && since >= SEARCH) || (lingering && since >= SLOW_SEARCH) {
        search_running(monitor, &callers, Evidence::ContainerMemory);
    }
}

fn check_driver_usage(monitor: &Monitor, callers: &BTreeSet<u32>) {
    let provenances = &monitor.provenances;
    let own: Vec<u32> = callers.iter().copied().collect();
    let Some((_, other_bytes)) = driver_usage_of(monitor, &own) else { return };
    let (last, suspicion) = {
        let found = monitor.escapes.lock();
        (found.other_bytes, found.suspicion)
    };
    let now = Instant::now();
    // All processes are queried only with reason: there are many processes, and many monitors that query.
    let has_called = !callers.is_empty() || provenances.has_dead_caller();
    let often = monitor.audit_interval(has_called, now).scan_interval;
    if last.is_some_and(|(bytes, at)| bytes == other_bytes && now - at < often)
        && suspicion.is_none_or(|until| until <= now)
    {
        return;
    }
    monitor.escapes.lock().other_bytes = Some((other_bytes, now));
    let dead_pids = provenances.dead_pids();
    let all = all_pids().chain(dead_pids.iter().copied()).chain(callers.iter().copied());
    let all: Vec<u32> = all.collect::<BTreeSet<u32>>().into_iter().collect();
    let Some((_, before)) = driver_usage_of(monitor, &[]) else { return };
    let Some((mut usage, unexplained)) = driver_usage_of(monitor, &all) else { return };
    let Some((_, after)) = driver_usage_of(monitor, &[]) else { return };
    usage.retain(|pid, _| !callers.contains(pid));
    let known = std::mem::replace(&mut monitor.escapes.lock().usage, usage.clone());
    let grown =
        usage.iter().filter(|(pid, bytes)| known.get(pid).is_none_or(|known| known < bytes));
    for (pid, _) in grown {
        // Another process may have the number by now.
        if dead_pids.contains(pid) && ProcessId::is_absent(pid.cast_signed()) {
            suspect(monitor);
        }
        meet_running(monitor, *pid, callers, Evidence::OwnMemory);
    }
    // Memory that is taken during the check is in one of the two figures and not in the other.
    let mut found = monitor.escapes.lock();
    if before != after && found.changed_checks < MOST_CHANGED_CHECKS {
        found.changed_checks += 1;
        return;
    }
    found.changed_checks = 0;
    let known = found.unexplained;
    drop(found);
    if known.is_some_and(|known| unexplained - known >= UNEXPLAINED_BYTES) {
        search_running(monitor, callers, Evidence::Unexplained);
    } else if known.is_some_and(|known| known <= unexplained) {
        return;
    }
    monitor.escapes.lock().unexplained = Some(unexplained);
}

/// Searches all processes of the host, while the container runs.
fn search_running(monitor: &Monitor, callers: &BTreeSet<u32>, evidence: Evidence) {
    let all: Vec<u32> = all_pids().collect();
    all.into_iter().for_each(|pid| meet_running(monitor, pid, callers, evidence));
    monitor.escapes.lock().searched = Some(Instant::now());
}

/// Kills a process that has a descriptor of the container's, or ends the container for it.
fn meet_running(monitor: &Monitor, pid: u32, callers: &BTreeSet<u32>, evidence: Evidence) {
    if let Some((Consequence::ContainerEnds, holder)) = meet(monitor, pid, callers, evidence, false)
    {
        monitor.log.report_killed(Event::ended_for_leak().by(
            holder.pid,
            None,
            Some(holder.program.as_str()).filter(|program| !program.is_empty()),
        ));
        kill_all_processes(monitor);
    }
}

/// Searches all processes of the host once the container has ended, kills those that are to be killed, and frees
/// the container's clients in the others.
pub(crate) fn search_after_end(monitor: &Monitor, evidence: Evidence) -> Search {
    let mut search = Search::default();
    for pid in all_pids().collect::<Vec<u32>>() {
        match meet(monitor, pid, &BTreeSet::new(), evidence, true) {
            Some((Consequence::Killed, _)) => search.has_killed = true,
            Some((_, holder)) => {
                free_left_clients(monitor, pid);
                search.holders.push(holder);
            }
            None => {}
        }
    }
    monitor.escapes.lock().searched = Some(Instant::now());
    report_holders(monitor, &search.holders);
    search
}

/// Logs each program of the host that has a descriptor of a container that has ended, once.
fn report_holders(monitor: &Monitor, holders: &[Holder]) {
    for holder in holders {
        let mut found = monitor.escapes.lock();
        let has_capacity = found.reported_holders.len() < MOST_REPORTED;
        if has_capacity && found.reported_holders.insert(holder.pid) {
            drop(found);
            let event = described(Event::leaked(), holder.pid);
            monitor.log.report_leaked(event);
        }
    }
}

/// What happens to a process that isn't the container's and has a descriptor of it: if it is to be killed, it was.
/// `None` if it is no such process, or another container's process that may have the descriptor.
fn meet(
    monitor: &Monitor,
    pid: u32,
    callers: &BTreeSet<u32>,
    evidence: Evidence,
    container_ended: bool,
) -> Option<(Consequence, Holder)> {
    let retained = [1, std::process::id(), std::os::unix::process::parent_id()];
    if retained.contains(&pid) || callers.contains(&pid) {
        return None;
    }
    // The pidfd is opened before anything is asked: the signal reaches only the process that had the pid then.
    let pidfd = pidfd(pid.cast_signed()).ok()?;
    let provenances = &monitor.provenances;
    let has_file = |mount, filesystem| provenances.has_file(mount, filesystem);
    let found = descriptors_of(pid, &monitor.settings.nodes, has_file);
    if !found.of_container || is_container_or_monitor(monitor, pid) {
        return None;
    }
    let is_of_host = is_of_host(pid.cast_signed())?;
    // The container of a process that is exiting can't be determined any more: it has no cgroup and no descriptors.
    if !is_running(&pidfd) {
        return None;
    }
    let facts = HolderFacts {
        is_of_host,
        has_own_file: found.of_own,
        has_memory: is_of_host && has_memory(monitor, pid),
        container_ended,
    };
    let consequence = facts.consequence(evidence);
    let name = ProcStatus::read(pid.cast_signed()).ok();
    let name = name.as_ref().and_then(|status| status.field("Name")).unwrap_or_default();
    let holder = Holder { pid: pid.cast_signed(), program: name.to_owned() };
    match consequence {
        // If it has GPUs of its own, it is no business of this container's.
        Consequence::Ignored if !is_of_host => return None,
        Consequence::Ignored | Consequence::ContainerEnds => {}
        Consequence::Killed => {
            let event = described(Event::killed_outside(), pid.cast_signed());
            pidfd_send_signal(&pidfd, Signal::KILL).ok()?;
            monitor.count_killed();
            monitor.log.report_killed(event);
        }
    }
    Some((consequence, holder))
}

/// Whether the driver attributes memory of the container's GPUs to `pid`.
fn has_memory(monitor: &Monitor, pid: u32) -> bool {
    driver_usage_of(monitor, &[pid]).is_some_and(|(usage, _)| !usage.is_empty())
}
