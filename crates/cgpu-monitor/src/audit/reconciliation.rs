//! Asks the driver what the container's processes have, and acts on the answers.
//!
//! [`judge`](crate::audit::judge) decides what the answers mean. An audit never reads a process's memory: the process
//! could make the audit wait. The audit thread audits ([`audit_thread`](crate::daemon)), and so does a call that would
//! be refused for the quota.
//!
//! The driver usage says how much memory there is, and not whose it is. So the driver is asked for clients and
//! objects by their handles, and those that it does not have any more are removed from the state.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::audit::clients::{end_client_users, least_charged, processes_to_kill, with_clients};
use crate::audit::escapes::suspect;
use crate::audit::history::{Audited, DeadPids, Holdings, MOST_ASKED};
use crate::audit::judge::{Finding, judge};
use crate::audit::retained_exports::scan_exports_for_refusal;
use crate::driver::{
    Amount, MonitorClient, Presence, answered, close_client_if_unused, free_pins, own_client,
};
use crate::gate::settings::Settings;
use crate::processes::kill_process;
use crate::shared::Monitor;
use crate::state::{Occasion, Space, UnderRmLock};
use crate::uvm::{UvmFile, dead_with_mapped_memory, end_files, scan_files};
use cgpu_core::ledger::{Client, Entry, Handle, Process};
use cgpu_host::events::Event;
use cgpu_host::process::ProcessId;
use nvrm::about::Held;

/// The longest wait of a call that would be refused. The driver may hold up an audit for ever, and other calls need the
/// thread of a call that waits.
const MOST_WAIT: Duration = Duration::from_secs(1);

/// How often a waiting call checks whether another thread's audit has finished.
const POLL_PAUSE: Duration = Duration::from_micros(200);

/// What the driver is asked for one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Depth {
    /// Each client. Driver usage can't show that a client is gone: memory with two handles is reported twice, and
    /// memory that a call has got before its return is both reported and reserved.
    Clients,
    /// Each object.
    Objects,
}

#[derive(Debug)]
struct DriverAnswers {
    own: Arc<MonitorClient>,
    dead: Vec<Process>,
    dead_pids: DeadPids,
    /// The driver usage, by the container's GPUs.
    all: Vec<Vec<Held>>,
}

/// Reconciles the state with the driver, for a call under the RM lock that came at `came` and would be refused
/// otherwise. Other calls take the RM lock meanwhile.
pub(crate) fn reconcile(monitor: &Monitor, rm_lock: &mut UnderRmLock<'_>, came: Instant) {
    let asked = Instant::now();
    while asked.elapsed() < MOST_WAIT {
        let Some(mut last) = monitor.history.last.try_lock() else {
            rm_lock.leave_while(|| std::thread::sleep(POLL_PAUSE));
            continue;
        };
        // An audit for another refused call that began after this call came has reported everything.
        let reported_all = |last: Audited| last.occasion == Occasion::Refusal && last.began >= came;
        if last.is_some_and(reported_all) {
            break;
        }
        let wait = last.map_or(Duration::ZERO, Audited::wait);
        if !wait.is_zero() {
            drop(last);
            rm_lock.leave_while(|| std::thread::sleep(wait));
            continue;
        }
        let (occasion, began) = (Occasion::Refusal, Instant::now());
        let seen = ask_all(monitor, Some(rm_lock));
        rm_lock.leave_while(move || {
            act_on(monitor, seen, occasion);
            *last = Some(Audited { occasion, began, ended: Instant::now() });
        });
        break;
    }
    rm_lock.leave_while(|| {
        scan_files(monitor, Occasion::Refusal);
        scan_exports_for_refusal(monitor);
    });
    free_pins(monitor, rm_lock);
}

/// Audits under the RM lock, or next to a call that hangs while it holds the RM lock.
pub(crate) fn audit(monitor: &Monitor, occasion: Occasion) {
    // Locked before the RM lock is taken: a thread that has this lock may take a while without the RM lock.
    let mut last = monitor.history.last.lock();
    let rm_lock = monitor.rm_lock.enter_for_monitor();
    let began = Instant::now();
    let seen = ask_all(monitor, rm_lock.as_ref());
    drop(rm_lock);
    act_on(monitor, seen, occasion);
    *last = Some(Audited { occasion, began, ended: Instant::now() });
}

/// Compares the driver usage with the state for each GPU, and acts on it: kills processes, corrects what counts, and
/// removes objects that are gone. `None` if the state has no process, or the driver doesn't answer.
fn ask_all(monitor: &Monitor, rm_lock: Option<&UnderRmLock<'_>>) -> Option<DriverAnswers> {
    let processes: Vec<Process> = monitor.state().processes.iter().copied().collect();
    let dead: Vec<Process> =
        processes.iter().copied().filter(|process| !ProcessId::from(*process).alive()).collect();
    if processes.is_empty() {
        close_client_if_unused(monitor, monitor.provenances.is_watched());
        return None;
    }
    let own = own_client(monitor)?;
    let is_reused = |process: &Process| ProcessId::of(process.pid().cast_signed()).is_some();
    let reused: BTreeSet<Process> = dead.iter().copied().filter(is_reused).collect();
    let dead_pids = DeadPids { former: monitor.provenances.unused_dead_pids(), reused };
    let mut all = Vec::new();
    for gpu in 0..monitor.uuids.len() {
        let found = ask(monitor, &own, gpu, &dead_pids)?;
        let learnt = act_on_driver_usage(monitor, rm_lock, gpu, &found);
        if let (Some(driver_bytes), Some(rm_lock)) = (learnt, rm_lock) {
            remove_gone_objects(monitor, rm_lock, &own, gpu, driver_bytes);
        }
        all.push(found.held);
    }
    Some(DriverAnswers { own, dead, dead_pids, all })
}

/// The driver usage of the container's processes on a GPU, dead ones included, and of the monitor.
fn ask(
    monitor: &Monitor,
    own: &MonitorClient,
    gpu: usize,
    dead_pids: &DeadPids,
) -> Option<Holdings> {
    // The list of pids is of the moment in which the watch begins. A process that came and took memory after the list
    // was made would be missing in the driver usage, and its memory would seem to be freed.
    let pids: Vec<u32> = {
        let mut state = monitor.state();
        state.ledger.watch();
        // The monitor comes first: memory can become the monitor's, and never a process's again.
        let own_pid = state.ledger.has_pins().then(std::process::id);
        own_pid.into_iter().chain(dead_pids.pids_to_ask(&state)).collect()
    };
    let held = own.held(gpu, &pids);
    let held = answered(monitor, gpu, Amount::Held, held)?;
    let (own_held, held): (Vec<Held>, Vec<Held>) =
        held.into_iter().partition(|held| held.pid == std::process::id());
    let own_bytes = own_held.iter().fold(0_u64, |sum, held| sum.saturating_add(held.made_bytes));
    Some(Holdings { held, own_bytes })
}

/// Acts on what an audit saw. Calls may hold the RM lock meanwhile.
fn act_on(monitor: &Monitor, seen: Option<DriverAnswers>, occasion: Occasion) {
    let Some(DriverAnswers { own, dead, dead_pids, all }) = seen else { return };
    if occasion != Occasion::Tick || monitor.history.take_client_check_due() {
        let names = monitor.state().ledger.names_of_all();
        remove_gone_names(monitor, &own, &names, Depth::Clients);
    }
    end_client_users(monitor, &dead, &all, &dead_pids);
    let have_clients = with_clients(monitor, &own, &dead);
    forget_dead_processes(monitor, &dead, &all, (&dead_pids.reused, &have_clients));
}

/// Acts on the driver usage of a GPU. Returns how many bytes the driver has, if these are fewer than the state has: the
/// caller must check which of the state's objects are gone.
fn act_on_driver_usage(
    monitor: &Monitor,
    rm_lock: Option<&UnderRmLock<'_>>,
    gpu: usize,
    found: &Holdings,
) -> Option<u64> {
    let Holdings { ref held, own_bytes } = *found;
    let mut state = monitor.state();
    let expected = state.ledger.expected(gpu)?;
    let made_bytes = held.iter().fold(0, |sum: u64, held| sum.saturating_add(held.made_bytes));
    let finding = judge(made_bytes, own_bytes, &expected);
    let is_more = matches!(finding, Finding::Unasked { .. } | Finding::Exceeds { .. });
    if rm_lock.is_some() || !is_more {
        monitor.history.doubts.clear(gpu);
    } else if !monitor.history.doubts.note(gpu) {
        state.due.schedule(Instant::now());
        drop(state);
        monitor.audit_wait.wake();
        return None;
    }
    match finding {
        Finding::Fine => {}
        Finding::LessShown { driver_bytes } => return Some(driver_bytes),
        Finding::Unasked { driver_bytes } => {
            tracing::debug!(driver_bytes, "more than was asked for counts");
            state.enter(Entry::Reconcile { gpu, driver_bytes });
        }
        Finding::Exceeds { excess_bytes, driver_bytes } => {
            let pid = least_charged(&state, gpu, held)?;
            state.enter(Entry::Reconcile { gpu, driver_bytes });
            state.due.schedule(Instant::now());
            let to_kill = processes_to_kill(&state, pid);
            drop(state);
            tracing::debug!(excess_bytes, pid, "taken past the monitor");
            suspect(monitor);
            let event = || past_the_monitor(&monitor.settings, gpu, excess_bytes);
            to_kill.into_iter().for_each(|process| kill_process(monitor, process, event()));
        }
    }
    None
}

/// Forgets dead processes that hold nothing by clients which other processes keep open. `with_clients` hold some.
/// Memory attributed to a pid that another process has now is the other process's (`reused`).
fn forget_dead_processes(
    monitor: &Monitor,
    dead: &[Process],
    all: &[Vec<Held>],
    (reused, with_clients): (&BTreeSet<Process>, &BTreeSet<Process>),
) {
    // Files of a process that comes while this goes on are not among these.
    let files = monitor.uvm_files.all();
    let with_mapped_memory = dead_with_mapped_memory(monitor, dead);
    let mut state = monitor.state();
    let mut has_forgotten = false;
    for process in dead {
        let pid = process.pid();
        let has = |held: &Held| held.pid == pid && held.bytes() > 0;
        let is_shown = all.iter().flatten().any(has) || with_clients.contains(process);
        let holds = !reused.contains(process) && is_shown;
        // A process's nvidia-uvm files end first. Another thread ends them: UVM may keep that thread waiting.
        let is_retained = |number| files.iter().any(|file| file.number == number);
        let has_files = state.creators.bound_to(*process).any(is_retained);
        if has_files {
            monitor.spaces.check_all();
        }
        if holds || has_files || with_mapped_memory.contains(process) {
            continue;
        }
        let space = Space::Managed(*process);
        state.enter(Entry::ReleaseSpace { space: space.number() });
        for (base, _) in state.ranges.of(space) {
            state.remove_range(space, base);
        }
        state.enter(Entry::RemoveProcess { process: *process });
        monitor.shares.wake();
        monitor.spaces.check_all();
        monitor.provenances.note_dead(*process);
        has_forgotten = true;
    }
    if has_forgotten {
        // No driver usage shows that these clients are gone. If one is in use all the same, none of its memory counts
        // anyway.
        for client in state.ledger.uncharged_orphans() {
            state.enter(Entry::Free { client, handle: Handle(client.0) });
            state.devices.forget_client(client.0);
        }
        if state.processes.is_empty() {
            drop(state);
            clear_up(monitor, &files);
        } else {
            // The memory of the dead processes is checked once more.
            state.due.schedule(Instant::now());
            monitor.audit_wait.wake();
        }
    }
}

/// Clears the state if no process that called is left. Memory that only an nvidia-uvm file maps is freed at once.
/// Exported memory stays: a process that never called may have its file, and may pass the file on.
fn clear_up(monitor: &Monitor, files: &[Arc<UvmFile>]) {
    end_files(monitor, files);
    let retained = monitor.uvm_files.all().iter().map(|file| file.number).collect();
    let mut state = monitor.state();
    if state.processes.is_empty() {
        state.close_all(&retained);
    } else {
        state.due.schedule(Instant::now());
        monitor.audit_wait.wake();
    }
}

/// The event of a process that is killed because it took `excess_bytes` of a GPU untracked.
fn past_the_monitor(settings: &Settings, gpu: usize, excess_bytes: u64) -> Event {
    let gpu = settings.gpus.get(gpu);
    Event {
        gpu: gpu.map(|gpu| gpu.index),
        gpu_uuid: gpu.map(|gpu| gpu.uuid.clone()),
        excess_bytes: Some(excess_bytes),
        ..Event::killed_past_the_monitor()
    }
}

/// Removes the ledger's objects on a GPU that are gone, if the driver reports less memory than the ledger.
///
/// The driver usage alone doesn't show which: the driver attributes the memory of a client to the process that made the
/// client, which may be a dead process that was never seen. So the driver is asked for each client and for its objects.
/// An object that is there counts, whichever process has it.
fn remove_gone_objects(
    monitor: &Monitor,
    _: &UnderRmLock<'_>,
    own: &MonitorClient,
    gpu: usize,
    driver_bytes: u64,
) {
    let names = monitor.state().ledger.names(gpu);
    let names = monitor.history.in_turn(gpu, names);
    if !remove_gone_names(monitor, own, &names, Depth::Objects) {
        return;
    }
    let mut state = monitor.state();
    let Some(expected) = state.ledger.expected(gpu) else { return };
    let driver_bytes = driver_bytes.max(expected.charged_bytes);
    if driver_bytes < expected.usage.used_bytes {
        state.enter(Entry::Reconcile { gpu, driver_bytes });
    }
}

/// Enters as freed the objects of `names` that are gone. `false` if the driver can't say.
///
/// Calls may be in progress, so an object is removed only while its serial number is the one in `names`.
fn remove_gone_names(
    monitor: &Monitor,
    own: &MonitorClient,
    names: &[(Client, Handle, u32)],
    depth: Depth,
) -> bool {
    if names.is_empty() {
        return true;
    }
    if !own.can_report() {
        return false;
    }
    let mut clients = BTreeMap::new();
    let mut gone = Vec::new();
    let mut asked = 0;
    for (client, handle, serial) in names.iter().copied() {
        let there = *clients
            .entry(client)
            .or_insert_with(|| own.presence(client.0, client.0) != Presence::NoClient);
        // If the client is there, the monitor saw each free of its objects, except by a call that was killed.
        let mut is_there = || {
            asked += 1;
            asked > MOST_ASKED || own.presence(client.0, handle.0) == Presence::There
        };
        if !there || depth == Depth::Objects && !is_there() {
            gone.push((client, handle, serial));
        }
    }
    let mut state = monitor.state();
    for (client, handle, serial) in gone {
        // Another object may have this handle now, even one of the same memory.
        if state.ledger.serial_of(client, handle) == Some(serial) {
            state.enter(Entry::Free { client, handle });
        }
    }
    let charged = state.ledger.names_of_all().into_iter().map(|(client, ..)| client);
    let charged: BTreeSet<Client> = charged.collect();
    for (client, there) in clients {
        if !there && !charged.contains(&client) {
            state.enter(Entry::Free { client, handle: Handle(client.0) });
            state.devices.forget_client(client.0);
        }
    }
    true
}
