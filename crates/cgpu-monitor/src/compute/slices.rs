//! The container's shares of its GPUs' computing time: slices of its channel groups.
//!
//! A file says what the container has of a GPU ([`share`](cgpu_host::registry::share)). The command that creates,
//! changes or removes containers writes the file, and a thread of the monitor follows it. A group gets its slice in the
//! call that schedules it; when the share or the number of groups changes later, through a descriptor of its program:
//! the driver takes such a control only through the client's own file, and a file that the monitor kept open would keep
//! the client's memory. Slices outlast the monitor: the driver has them. A program gets a faked success for the slice
//! that it asked for. Groups and channels that the driver does not have any more are forgotten.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::caller::threads_by_fd_table;
use crate::compute::shares::{set_slice, was_seen};
use crate::driver::{Presence, own_client};
use crate::gate::settings::{Node, NodeKind};
use crate::node::{Device, Failure, Rm, kind_at};
use crate::shared::Monitor;
use crate::snapshot::Record;
use crate::state::ScheduledSlice;
use cgpu_core::sched::Period;
use cgpu_host::registry::notice::Notice;
use cgpu_host::registry::share;
use nvrm::number::{NV_ERR_INVALID_CLIENT, NV_ERR_INVALID_OBJECT_HANDLE, NV_ERR_OBJECT_NOT_FOUND};

/// Up to how many processes the samples distinguish. There are some seventy samples: with more processes, one that
/// computes could be in none.
const MOST_DISTINGUISHED: usize = 8;

/// How often the monitor checks which of several processes are idle, in milliseconds: while one of them was seen to
/// compute, and while none was.
const BUSY_POLL_MS: u16 = 1000;

const IDLE_POLL_MS: u16 = 5000;

/// After how long shares are read although no change was reported, for whatever reason.
const UNHEARD: Duration = Duration::from_secs(60);

/// How much of a process is searched whose descriptor names another file by now: a program has one or two files of
/// `nvidiactl`, and all its threads have the same.
const MOST_THREADS: usize = 4;
const MOST_DESCRIPTORS: usize = 4096;
const MOST_FILES: usize = 16;

/// Wakes the thread that sets slices when a file of shares has changed.
pub(crate) fn follow_shares_forever(monitor: &Monitor) {
    let dir = share::dir(&monitor.settings.state_dir);
    loop {
        // The notice is opened again each time: it may have been removed.
        let Ok(notice) = Notice::open(&dir) else {
            std::thread::sleep(UNHEARD);
            continue;
        };
        let known = notice.changes();
        monitor.shares.wake();
        notice.wait(known, UNHEARD);
    }
}

/// Reads the files of shares. A file that can't be read changes nothing.
pub(crate) fn read_shares(monitor: &Monitor) {
    for (gpu, settings) in monitor.settings.gpus.iter().enumerate() {
        match share::read(&monitor.settings.state_dir, &settings.uuid) {
            Ok(said) => {
                let said = said.unwrap_or_default();
                let round = said.round(&monitor.settings.short_id);
                let turns = said.turns(&monitor.settings.short_id);
                let turns = turns.map(|(frame_us, spans)| (frame_us, spans.to_vec()));
                let before = monitor.shares.on(gpu, |on| {
                    on.turns = turns;
                    on.frame = said.turns;
                    std::mem::replace(&mut on.round, round)
                });
                if before != round {
                    monitor.note_status_change();
                }
            }
            Err(error) => tracing::debug!(%error, "shares stay as they are"),
        }
    }
}

/// Finds out which of several processes that compute were not on the GPU lately. Returns in how many milliseconds to
/// check again; `None` if that isn't needed.
pub(crate) fn find_resting_processes(monitor: &Monitor) -> Option<u16> {
    let mut again_ms = None;
    for gpu in 0..monitor.uuids.len() {
        let adds_up = monitor.shares.round(gpu).is_some_and(|round| !round.each);
        let computing = {
            let state = monitor.state();
            state.groups.computing_processes(gpu, &state.processes)
        };
        let mut resting = BTreeSet::new();
        if adds_up && (2..=MOST_DISTINGUISHED).contains(&computing.len()) {
            let own = own_client(monitor);
            let samples = own.map(|own| own.samples(gpu)).unwrap_or_default();
            let is_busy = computing.iter().any(|process| was_seen(&samples, *process));
            let poll_ms = if is_busy { BUSY_POLL_MS } else { IDLE_POLL_MS };
            again_ms = again_ms.into_iter().chain([poll_ms]).min();
            resting = monitor.shares.find_resting(gpu, &computing, &samples, Instant::now());
        }
        monitor.shares.on(gpu, |on| on.resting = resting);
    }
    again_ms
}

/// What the container's groups have of its period on a GPU; `None` if the monitor sets no slices.
pub(crate) fn period_of_groups(monitor: &Monitor, gpu: usize) -> Option<Period> {
    let round = monitor.shares.round(gpu)?;
    Some(round.beside_channels(monitor.state().outside_groups(gpu).len()))
}

/// Notes the driver's answer to setting a slice.
pub(crate) fn note_slice_tried(monitor: &Monitor, gpu: usize, done: Result<(), Failure>) {
    note_share_tried(monitor, gpu, "SET_TIMESLICE", done);
}

/// Notes the driver's answer to a control that holds a share, and logs a new refusal.
pub(crate) fn note_share_tried(
    monitor: &Monitor,
    gpu: usize,
    what: &'static str,
    done: Result<(), Failure>,
) {
    if !monitor.shares.note_failure(gpu, what, done.err()) {
        return;
    }
    monitor.note_status_change();
    if let Err(error) = done {
        tracing::warn!(gpu, "a share of computing time can't be held: {what}: {error}");
    }
}

/// Sets the slices that are other than they are to be. `true` if each is set, or never will be.
pub(crate) fn set_slices(monitor: &Monitor) -> bool {
    let mut is_whole = true;
    // A process without a descriptor for one group isn't searched again for the next group.
    let mut out_of_reach = BTreeSet::new();
    for gpu in 0..monitor.uuids.len() {
        let round = period_of_groups(monitor, gpu);
        let due = {
            let state = monitor.state();
            state.groups.scheduled_slices(
                gpu,
                round,
                &state.processes,
                &monitor.shares.resting(gpu),
            )
        };
        monitor.shares.keep_out_of_reach(gpu, &due);
        for due in due {
            let process = due.reach.process;
            let all = !out_of_reach.contains(&process);
            let done = set_via_program(monitor, &due, all);
            let group = (due.client, due.handle);
            match done {
                // What the driver refuses of a group that exists, it refuses each time.
                Some(done) if !done.is_err_and(is_no_such_object) => {
                    monitor.state().groups.note_slice(&due);
                    monitor.shares.note_in_reach(gpu, group);
                    note_slice_tried(monitor, gpu, done);
                }
                _ if forget_if_gone(monitor, &due) => monitor.shares.note_in_reach(gpu, group),
                _ => {
                    out_of_reach.insert(process);
                    is_whole = false;
                    if round.is_some() && monitor.shares.note_out_of_reach(gpu, group) {
                        let pid = process.pid();
                        tracing::warn!(
                            gpu,
                            pid,
                            "a program is taken off the GPU: its share has changed, and it has closed \
                             the file of the driver's by which that is set"
                        );
                    }
                }
            }
        }
    }
    is_whole
}

/// Forgets the channel groups and channels that the driver frees together with this object.
pub(crate) fn forget_freed_groups(monitor: &Monitor, client: u32, handle: u32) {
    let mut state = monitor.state();
    let groups = state.groups.freed(client, handle);
    let channels = state.channels.freed(client, handle, &groups);
    for (client, handle) in channels.into_iter().chain(groups) {
        state.write(Record::Ungroup { client, handle });
        monitor.shares.wake();
    }
}

/// Forgets the channel groups and channels of a GPU that the driver doesn't have any more.
pub(crate) fn forget_gone_groups(monitor: &Monitor, gpu: usize) {
    let own = own_client(monitor);
    let Some(own) = own.filter(|own| own.can_report()) else { return };
    let (known, channels) = {
        let state = monitor.state();
        (state.groups.on(gpu), state.outside_groups(gpu))
    };
    // A channel may still be pending, as long as its client is there.
    for (client, handle) in channels {
        if own.presence(client, handle) == Presence::NoClient {
            monitor.state().write(Record::Ungroup { client, handle });
        }
    }
    for ((client, handle), group) in known {
        let is_gone = match own.presence(client, handle) {
            Presence::There => false,
            Presence::NoClient => true,
            // A group whose creation was passed through may still be pending.
            Presence::NoObject => group.certain,
        };
        let mut state = monitor.state();
        // Another thread may have created a new group with that name.
        if is_gone && state.groups.named((client, handle)) == Some(group) {
            state.write(Record::Ungroup { client, handle });
        }
    }
}

/// Forgets a group that the driver doesn't have any more. `true` if that is so.
fn forget_if_gone(monitor: &Monitor, due: &ScheduledSlice) -> bool {
    let Some(own) = own_client(monitor) else { return false };
    let presence = own.presence(due.client, due.handle);
    let is_gone = presence != Presence::There && own.can_report();
    if is_gone {
        forget_freed_groups(monitor, due.client, due.handle);
    }
    is_gone
}

/// Whether the driver says that there is no such client, or no such object.
fn is_no_such_object(failure: Failure) -> bool {
    let nothing = [NV_ERR_INVALID_CLIENT, NV_ERR_INVALID_OBJECT_HANDLE, NV_ERR_OBJECT_NOT_FOUND];
    matches!(failure, Failure::Status(status) if nothing.contains(&status))
}

/// Sets a slice through the descriptor that its group was made by or, if `all` is set, through another one of the same
/// process. `None` if no descriptor leads to the group's client.
fn set_via_program(
    monitor: &Monitor,
    due: &ScheduledSlice,
    all: bool,
) -> Option<Result<(), Failure>> {
    let pid = due.reach.process.pid().cast_signed();
    let through = |tid: i32, descriptor: i32| {
        let (target, file) = monitor.targets.duplicate(tid, descriptor, None).ok()?;
        // The pid may belong to another process by now.
        if target.process != due.reach.process {
            return None;
        }
        let device = Device::of(&monitor.settings.nodes, file)?;
        let is_control = device.kind == NodeKind::Control;
        let rm = Rm { release: &monitor.release, device: &device };
        is_control.then(|| set_slice(rm, due))
    };
    // If that fails, the descriptor may name another file by now.
    if let Some(Ok(())) = through(pid, due.reach.descriptor) {
        return Some(Ok(()));
    }
    let mut last = None;
    let threads = if all { threads_by_fd_table(pid.cast_unsigned()) } else { Vec::new() };
    for tid in threads.into_iter().map(u32::cast_signed).take(MOST_THREADS) {
        for descriptor in control_files(&monitor.settings.nodes, tid) {
            match through(tid, descriptor) {
                Some(Ok(())) => return Some(Ok(())),
                other => last = other.or(last),
            }
        }
    }
    last
}

/// The first descriptors of `nvidiactl` that a thread has.
fn control_files(nodes: &[Node], tid: i32) -> Vec<i32> {
    let listed = fs::read_dir(format!("/proc/{tid}/fd")).into_iter().flatten().flatten();
    let listed = listed.take(MOST_DESCRIPTORS);
    let is_control = |path: &PathBuf| kind_at(nodes, path) == Some(NodeKind::Control);
    let paths = listed.map(|entry| entry.path()).filter(is_control);
    let numbers = paths.filter_map(|path| path.file_name()?.to_str()?.parse().ok());
    numbers.take(MOST_FILES).collect()
}
