//! Asks the driver what the container's processes have, and acts on the answers.
//!
//! [`judge`](crate::monitor::audit::judge) decides what the answers mean. An audit never reads a process's memory:
//! the process could make the audit wait. The auditor's thread audits ([`audit_thread`](crate::monitor::daemon)),
//! and so does a call that would be refused for the quota.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::events::Event;
use crate::gate::settings::Settings;
use crate::ledger::{Entry, Handle, Process};
use crate::monitor::audit::dead_clients::{end_client_users, with_clients};
use crate::monitor::audit::escape_search::EscapeSearch;
use crate::monitor::audit::history::{AuditHistory, Audited};
use crate::monitor::audit::holdings::{DeadPids, Holdings};
use crate::monitor::audit::judge::{Finding, judge};
use crate::monitor::audit::kept_exports::KeptExports;
use crate::monitor::audit::managed_ranges::ManagedRanges;
use crate::monitor::audit::memory_owners::{least_charged, processes_to_kill};
use crate::monitor::audit::prune::{remove_gone_names, remove_gone_objects};
use crate::monitor::caller::AuditWait;
use crate::monitor::compute::Slices;
use crate::monitor::driver::{Amount, DriverAccess, MonitorClient, Stakes};
use crate::monitor::processes::Processes;
use crate::monitor::state::{ContainerState, Depth, Lane, Occasion, OnLane, Space};
use crate::monitor::uvm::{Uvm, UvmFile};
use crate::process::ProcessId;
use crate::rm::about::Held;

/// The longest wait of a call that would be refused. The driver may hold up an audit for ever, and other calls need the
/// thread of a call that waits.
const MOST_WAIT: Duration = Duration::from_secs(1);

/// How often a call that waits looks whether another thread's audit is over.
const POLL_PAUSE: Duration = Duration::from_micros(200);

/// What an audit saw.
#[derive(Debug)]
struct Seen {
    own: Arc<MonitorClient>,
    dead: Vec<Process>,
    dead_pids: DeadPids,
    /// The driver's figures, by the container's GPUs.
    all: Vec<Vec<Held>>,
}

/// Audits the container: asks the driver what the container's processes have, and acts on the answers.
#[derive(Debug)]
pub(crate) struct Audit {
    state: Arc<ContainerState>,
    driver: Arc<DriverAccess>,
    stakes: Arc<Stakes>,
    processes: Arc<Processes>,
    lane: Arc<Lane>,
    uvm: Arc<Uvm>,
    managed: Arc<ManagedRanges>,
    exports: Arc<KeptExports>,
    slices: Arc<Slices>,
    pub(crate) audit_wait: Arc<AuditWait>,
    history: AuditHistory,
    pub(crate) escapes: EscapeSearch,
}

impl Audit {
    pub(crate) fn new(
        stakes: Arc<Stakes>,
        lane: Arc<Lane>,
        (uvm, managed): (Arc<Uvm>, Arc<ManagedRanges>),
        exports: Arc<KeptExports>,
        slices: Arc<Slices>,
        processes: Arc<Processes>,
        audit_wait: Arc<AuditWait>,
    ) -> Self {
        let (state, driver) = (Arc::clone(&stakes.state), Arc::clone(&stakes.driver));
        let history = AuditHistory::default();
        let escapes = EscapeSearch::new(Arc::clone(&driver), Arc::clone(&processes));
        Audit {
            state,
            driver,
            stakes,
            processes,
            lane,
            uvm,
            managed,
            exports,
            slices,
            audit_wait,
            history,
            escapes,
        }
    }

    /// Has the auditor's thread audit now.
    pub(crate) fn wake(&self) {
        self.audit_wait.wake();
    }

    /// Brings the books in line with the driver, for a call on the lane that came at `came` and would be refused
    /// otherwise. Other calls come onto the lane meanwhile.
    pub(crate) fn reconcile(&self, lane: &mut OnLane<'_>, came: Instant) {
        let asked = Instant::now();
        while asked.elapsed() < MOST_WAIT {
            let Some(mut last) = self.history.last.try_lock() else {
                lane.leave_while(|| std::thread::sleep(POLL_PAUSE));
                continue;
            };
            // An audit for another refused call that began after this call came has told everything.
            let told_all = |last: Audited| last.occasion == Occasion::Refusal && last.began >= came;
            if last.is_some_and(told_all) {
                break;
            }
            let wait = last.map_or(Duration::ZERO, Audited::wait);
            if !wait.is_zero() {
                drop(last);
                lane.leave_while(|| std::thread::sleep(wait));
                continue;
            }
            let (occasion, began) = (Occasion::Refusal, Instant::now());
            let seen = self.look(Some(lane));
            lane.leave_while(move || {
                self.act_on(seen, occasion);
                *last = Some(Audited { occasion, began, ended: Instant::now() });
            });
            break;
        }
        lane.leave_while(|| {
            self.uvm.sweep(Occasion::Refusal);
            self.exports.sweep_exports_for_refusal();
        });
        self.stakes.free_stakes(lane);
    }

    /// Audits on the lane, or beside a call that hangs on the lane.
    pub(crate) fn audit(&self, occasion: Occasion) {
        // Locked before the lane is entered: a thread that has this lock may take a while off the lane.
        let mut last = self.history.last.lock();
        let lane = self.lane.enter_for_monitor();
        let began = Instant::now();
        let seen = self.look(lane.as_ref());
        drop(lane);
        self.act_on(seen, occasion);
        *last = Some(Audited { occasion, began, ended: Instant::now() });
    }

    /// Compares the driver's figures with the books for each GPU, and acts on them: kills processes, corrects what
    /// counts, and removes objects that are gone. `None` where the books have no process, or the driver doesn't answer.
    fn look(&self, lane: Option<&OnLane<'_>>) -> Option<Seen> {
        let processes: Vec<Process> = self.state.books().processes.iter().copied().collect();
        let dead: Vec<Process> = processes
            .iter()
            .copied()
            .filter(|process| !ProcessId::from(*process).alive())
            .collect();
        if processes.is_empty() {
            self.driver.close_if_unused(self.processes.origins.is_watched());
            return None;
        }
        let own = self.driver.own_client()?;
        let is_reused = |process: &Process| ProcessId::of(process.pid().cast_signed()).is_some();
        let reused: BTreeSet<Process> = dead.iter().copied().filter(is_reused).collect();
        let dead_pids = DeadPids { former: self.processes.origins.unused_dead_pids(), reused };
        let mut all = Vec::new();
        for gpu in 0..self.state.uuids.len() {
            let found = self.ask(&own, gpu, &dead_pids)?;
            let learnt = self.act_on_figures(lane, gpu, &found);
            if let (Some(driver_bytes), Some(lane)) = (learnt, lane) {
                remove_gone_objects(&self.state, &self.history, lane, &own, gpu, driver_bytes);
            }
            all.push(found.held);
        }
        Some(Seen { own, dead, dead_pids, all })
    }

    /// The driver's figures of the container's processes on a GPU, dead ones included, and of the monitor.
    fn ask(&self, own: &MonitorClient, gpu: usize, dead_pids: &DeadPids) -> Option<Holdings> {
        // The list of pids is of the moment in which the watch begins. A process that came and took memory after the
        // list was made would be missing in the figures, and its memory would seem to be freed.
        let pids: Vec<u32> = {
            let mut books = self.state.books();
            books.ledger.watch();
            // The monitor comes first: memory can become the monitor's, and never a process's again.
            let own_pid = books.ledger.has_stakes().then(std::process::id);
            own_pid.into_iter().chain(dead_pids.pids_to_ask(&books)).collect()
        };
        let held = own.held(gpu, &pids);
        let held = self.driver.answered(gpu, Amount::Held, held)?;
        let (own_held, held): (Vec<Held>, Vec<Held>) =
            held.into_iter().partition(|held| held.pid == std::process::id());
        let own_bytes =
            own_held.iter().fold(0_u64, |sum, held| sum.saturating_add(held.made_bytes));
        Some(Holdings { held, own_bytes })
    }

    /// Acts on what an audit saw. Calls may be on the lane meanwhile.
    fn act_on(&self, seen: Option<Seen>, occasion: Occasion) {
        let Some(Seen { own, dead, dead_pids, all }) = seen else { return };
        if occasion != Occasion::Tick || self.history.take_client_check_due() {
            let names = self.state.books().ledger.names_of_all();
            remove_gone_names(&self.state, &own, &names, Depth::Clients);
        }
        end_client_users(&self.processes, &self.history.lingering, &dead, &all, &dead_pids);
        let have_clients = with_clients(&self.state, &own, &dead);
        self.forget_dead_processes(&dead, &all, (&dead_pids.reused, &have_clients));
    }

    /// Acts on the driver's figures of a GPU. Returns how many bytes the driver has, where these are fewer than the
    /// books have: the caller is to look which of the books' objects are gone.
    fn act_on_figures(
        &self,
        lane: Option<&OnLane<'_>>,
        gpu: usize,
        found: &Holdings,
    ) -> Option<u64> {
        let Holdings { ref held, own_bytes } = *found;
        let mut books = self.state.books();
        let expected = books.ledger.expected(gpu)?;
        let made_bytes = held.iter().fold(0, |sum: u64, held| sum.saturating_add(held.made_bytes));
        let finding = judge(made_bytes, own_bytes, &expected);
        let is_more = matches!(finding, Finding::Unasked { .. } | Finding::Exceeds { .. });
        if lane.is_some() || !is_more {
            self.history.doubts.clear(gpu);
        } else if !self.history.doubts.note(gpu) {
            books.due.schedule(Instant::now());
            drop(books);
            self.audit_wait.wake();
            return None;
        }
        match finding {
            Finding::Fine => {}
            Finding::LessShown { driver_bytes } => return Some(driver_bytes),
            Finding::Unasked { driver_bytes } => {
                tracing::debug!(driver_bytes, "more than was asked for counts");
                books.enter(Entry::Reconcile { gpu, driver_bytes });
            }
            Finding::Exceeds { excess_bytes, driver_bytes } => {
                let pid = least_charged(&books, gpu, held)?;
                books.enter(Entry::Reconcile { gpu, driver_bytes });
                books.due.schedule(Instant::now());
                let to_kill = processes_to_kill(&books, pid);
                drop(books);
                tracing::debug!(excess_bytes, pid, "taken past the monitor");
                self.escapes.suspect();
                let event = || past_the_monitor(&self.state.settings, gpu, excess_bytes);
                to_kill.into_iter().for_each(|process| self.processes.kill(process, event()));
            }
        }
        None
    }

    /// Forgets dead processes that hold nothing by clients which other processes keep open. `with_clients` hold some.
    /// Memory under a pid that another process has now is the other process's (`reused`).
    fn forget_dead_processes(
        &self,
        dead: &[Process],
        all: &[Vec<Held>],
        (reused, with_clients): (&BTreeSet<Process>, &BTreeSet<Process>),
    ) {
        // Files of a process that comes while this goes on are not among these.
        let files = self.uvm.files.all();
        let with_mapped_memory = self.managed.dead_with_mapped_memory(dead);
        let mut books = self.state.books();
        let mut has_forgotten = false;
        for process in dead {
            let pid = process.pid();
            let has = |held: &Held| held.pid == pid && held.bytes() > 0;
            let is_shown = all.iter().flatten().any(has) || with_clients.contains(process);
            let holds = !reused.contains(process) && is_shown;
            // A process's files of nvidia-uvm end first. Another thread ends them: UVM may keep that thread waiting.
            let is_kept = |number| files.iter().any(|file| file.number == number);
            let has_files = books.makers.bound_to(*process).any(is_kept);
            if has_files {
                self.uvm.spaces.look_at_all();
            }
            if holds || has_files || with_mapped_memory.contains(process) {
                continue;
            }
            let space = Space::Managed(*process);
            books.enter(Entry::ReleaseSpace { space: space.number() });
            for (base, _) in books.ranges.of(space) {
                books.remove_range(space, base);
            }
            books.enter(Entry::RemoveProcess { process: *process });
            self.slices.shares.wake();
            self.uvm.spaces.look_at_all();
            self.processes.origins.note_dead(*process);
            has_forgotten = true;
        }
        if has_forgotten {
            // No figure tells that these clients are gone. Where one is in use all the same, none of its memory counts
            // anyway.
            for client in books.ledger.uncharged_orphans() {
                books.enter(Entry::Free { client, handle: Handle(client.0) });
                books.devices.forget_client(client.0);
            }
            if books.processes.is_empty() {
                drop(books);
                self.clear_up(&files);
            } else {
                // The memory of the dead processes is looked at once more.
                books.due.schedule(Instant::now());
                self.audit_wait.wake();
            }
        }
    }

    /// Closes the books where no process that called is left. Memory that only a file of nvidia-uvm maps is freed at
    /// once. Exported memory stays: a process that never called may have its file, and may pass the file on.
    fn clear_up(&self, files: &[Arc<UvmFile>]) {
        self.uvm.end_files(files);
        let kept = self.uvm.files.all().iter().map(|file| file.number).collect();
        let mut books = self.state.books();
        if books.processes.is_empty() {
            books.close_all(&kept);
        } else {
            books.due.schedule(Instant::now());
            self.audit_wait.wake();
        }
    }
}

/// The event of a process that is killed because it took `excess_bytes` of a GPU past the monitor.
fn past_the_monitor(settings: &Settings, gpu: usize, excess_bytes: u64) -> Event {
    let gpu = settings.gpus.get(gpu);
    Event {
        gpu: gpu.map(|gpu| gpu.index),
        gpu_uuid: gpu.map(|gpu| gpu.uuid.clone()),
        excess_bytes: Some(excess_bytes),
        ..Event::killed_past_the_monitor()
    }
}
