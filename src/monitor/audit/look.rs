//! Looks what the container's processes have by the driver's own account, and acts on it.
//!
//! What the answers mean is decided in [`judge`](crate::monitor::audit::judge); here they are got, and acted
//! on. It never reads a process's memory, which could make it wait. A thread of its own audits
//! ([`rounds`](crate::monitor::worker::rounds)), and so does a call that would be refused for the quota.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::events::Event;
use crate::gate::settings::Settings;
use crate::ledger::{Entry, Handle, Process};
use crate::monitor::audit::holdings::{DeadPids, Holdings};
use crate::monitor::audit::judge::{self, Finding, Underway};
use crate::monitor::audit::kept_exports::KeptExports;
use crate::monitor::audit::mappings::Mappings;
use crate::monitor::audit::memory::{AuditMemory, Audited};
use crate::monitor::audit::suspects::{culprits, uncharged, with_charges};
use crate::monitor::caller::audit_wait::AuditWait;
use crate::monitor::compute::slices::Slices;
use crate::monitor::driver::access::DriverAccess;
use crate::monitor::driver::monitor_client::MonitorClient;
use crate::monitor::driver::stakes::Stakes;
use crate::monitor::driver::unanswered::Amount;
use crate::monitor::journal::process_number::process_id;
use crate::monitor::processes::container_processes::Processes;
use crate::monitor::state::container_state::ContainerState;
use crate::monitor::state::lane::{Lane, OnLane};
use crate::monitor::state::occasion::{Depth, Occasion};
use crate::monitor::state::space::Space;
use crate::monitor::uvm::files::UvmFile;
use crate::monitor::uvm::kept_files::Uvm;
use crate::process::ProcessId;
use crate::rm::about::Held;

/// How long a call that would be refused waits at most: the driver may keep an audit for ever, and
/// calls have threads that others need.
const MOST_PATIENCE: Duration = Duration::from_secs(1);

/// How often it looks whether an audit is over.
const LOOK: Duration = Duration::from_micros(200);

/// What an audit saw.
#[derive(Debug)]
struct Seen {
    own: Arc<MonitorClient>,
    dead: Vec<Process>,
    numbers: DeadPids,
    /// By the container's GPUs.
    all: Vec<Vec<Held>>,
}

/// Asks the driver and the kernel what the container has, and acts on it.
#[derive(Debug)]
pub(crate) struct Audit {
    pub(crate) state: Arc<ContainerState>,
    pub(crate) driver: Arc<DriverAccess>,
    stakes: Arc<Stakes>,
    pub(crate) processes: Arc<Processes>,
    lane: Arc<Lane>,
    uvm: Arc<Uvm>,
    mappings: Arc<Mappings>,
    exports: Arc<KeptExports>,
    slices: Arc<Slices>,
    pub(crate) audit_wait: Arc<AuditWait>,
    pub(crate) memory: AuditMemory,
}

impl Audit {
    pub(crate) fn new(
        stakes: Arc<Stakes>,
        lane: Arc<Lane>,
        mappings: Arc<Mappings>,
        exports: Arc<KeptExports>,
        slices: Arc<Slices>,
        processes: Arc<Processes>,
        audit_wait: Arc<AuditWait>,
    ) -> Self {
        let (state, driver) = (Arc::clone(&stakes.state), Arc::clone(&stakes.driver));
        let (uvm, memory) = (Arc::clone(&mappings.uvm), AuditMemory::default());
        Audit {
            state,
            driver,
            stakes,
            processes,
            lane,
            uvm,
            mappings,
            exports,
            slices,
            audit_wait,
            memory,
        }
    }

    /// Has the audit's thread look now.
    pub(crate) fn wake(&self) {
        self.audit_wait.ring();
    }

    /// Looks what there really is, for a call on the lane that would be refused otherwise, and came then.
    /// Others come onto the lane meanwhile.
    pub(crate) fn reconcile(&self, lane: &mut OnLane<'_>, came: Instant) {
        let asked = Instant::now();
        while asked.elapsed() < MOST_PATIENCE {
            let Some(mut last) = self.memory.last.try_lock() else {
                lane.leave_while(|| std::thread::sleep(LOOK));
                continue;
            };
            // One that began since then, for somebody else, has told all.
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
            self.exports.hurry_exports();
        });
        self.stakes.free_stakes(lane);
    }

    /// Audits on the lane, or beside a call that hangs there.
    pub(crate) fn audit(&self, occasion: Occasion) {
        // Before the lane: who has it may take a while beside that.
        let mut last = self.memory.last.lock();
        let lane = self.lane.enter_for_monitor();
        let began = Instant::now();
        let seen = self.look(lane.as_ref());
        drop(lane);
        self.act_on(seen, occasion);
        *last = Some(Audited { occasion, began, ended: Instant::now() });
    }

    /// Compares what the driver says with the books, for each GPU. `None` where nobody is there who could
    /// have anything, or the driver doesn't answer.
    fn look(&self, lane: Option<&OnLane<'_>>) -> Option<Seen> {
        let processes: Vec<Process> = self.state.books().processes.iter().copied().collect();
        let dead: Vec<Process> =
            processes.iter().copied().filter(|process| !process_id(*process).alive()).collect();
        if processes.is_empty() {
            self.driver.let_go(self.processes.escaped.is_watched());
            return None;
        }
        let own = self.driver.own_client()?;
        let is_lost = |process: &Process| ProcessId::of(process_id(*process).pid).is_some();
        let lost: BTreeSet<Process> = dead.iter().copied().filter(is_lost).collect();
        let numbers = DeadPids { former: self.processes.escaped.unused_dead_pids(), lost };
        let mut all = Vec::new();
        for gpu in 0..self.state.uuids.len() {
            let found = self.ask(&own, gpu, &numbers)?;
            let learnt = self.judge(lane, gpu, &found);
            if let (Some(driver_bytes), Some(lane)) = (learnt, lane) {
                self.take_stock(lane, &own, gpu, driver_bytes);
            }
            all.push(found.held);
        }
        Some(Seen { own, dead, numbers, all })
    }

    /// What the driver says of the container's processes, and of those before them.
    fn ask(&self, own: &MonitorClient, gpu: usize, numbers: &DeadPids) -> Option<Holdings> {
        // All of one moment: a process that came and took memory after the list was made would be missing in the
        // driver's figure, and what it holds would seem to be given back.
        let pids: Vec<u32> = {
            let mut books = self.state.books();
            books.ledger.watch();
            // The monitor first: memory becomes the monitor's, and never a process's again.
            let ours = books.ledger.has_stakes().then(std::process::id);
            ours.into_iter().chain(numbers.asked_for(&books)).collect()
        };
        let held = own.held(gpu, &pids);
        let held = self.driver.answered(gpu, Amount::Held, held)?;
        let (ours, held): (Vec<Held>, Vec<Held>) =
            held.into_iter().partition(|held| held.pid == std::process::id());
        let own_bytes = ours.iter().fold(0_u64, |sum, held| sum.saturating_add(held.made_bytes));
        Some(Holdings { held, own_bytes })
    }

    /// What can be done beside calls.
    fn act_on(&self, seen: Option<Seen>, occasion: Occasion) {
        let Some(Seen { own, dead, numbers, all }) = seen else { return };
        if occasion != Occasion::Tick || self.memory.take_stock_due() {
            let names = self.state.books().ledger.names_of_all();
            self.strike_out(&own, &names, Depth::Clients);
        }
        self.end_heirs(&dead, &all, &numbers);
        let outlived = self.with_clients(&own, &dead);
        self.bury(&dead, &all, (&numbers.lost, &outlived));
    }

    /// Acts on what the driver says of a GPU. How many bytes it has, where that is less than the books
    /// do: it is to be looked which of theirs are gone.
    fn judge(&self, lane: Option<&OnLane<'_>>, gpu: usize, found: &Holdings) -> Option<u64> {
        let Holdings { ref held, own_bytes } = *found;
        let mut books = self.state.books();
        let expected = books.ledger.expected(gpu)?;
        let underway = if lane.is_some() { Underway::Nothing } else { Underway::Call };
        let figures = uncharged(held);
        let finding = judge::judge(&figures, own_bytes, &expected, underway);
        let is_more = matches!(finding, Finding::Unasked { .. } | Finding::Exceeds { .. });
        if lane.is_some() || !is_more {
            self.memory.doubts.dispel(gpu);
        } else if !self.memory.doubts.note(gpu) {
            books.due.schedule(Instant::now());
            drop(books);
            self.audit_wait.ring();
            return None;
        }
        match finding {
            Finding::Fine | Finding::Less => {}
            Finding::Learn { driver_bytes } => return Some(driver_bytes),
            Finding::Unasked { driver_bytes } => {
                tracing::debug!(driver_bytes, "more than was asked for counts");
                books.enter(Entry::Reconcile { gpu, driver_bytes });
            }
            Finding::Exceeds { .. } => {
                let figures = with_charges(&books, gpu, held);
                if let Finding::Exceeds { pid, excess_bytes, driver_bytes } =
                    judge::judge(&figures, own_bytes, &expected, underway)
                {
                    books.enter(Entry::Reconcile { gpu, driver_bytes });
                    books.due.schedule(Instant::now());
                    let culprits = culprits(&books, pid);
                    drop(books);
                    tracing::debug!(excess_bytes, pid, "taken past the monitor");
                    self.processes.escaped.suspect();
                    let event = || past_the_monitor(&self.state.settings, gpu, excess_bytes);
                    culprits.into_iter().for_each(|culprit| self.processes.kill(culprit, event()));
                }
            }
        }
        None
    }

    /// Processes that are gone, and hold nothing by clients that others keep open; what is under a number
    /// that another process has is that one's.
    fn bury(
        &self,
        dead: &[Process],
        all: &[Vec<Held>],
        (lost, with_clients): (&BTreeSet<Process>, &BTreeSet<Process>),
    ) {
        // Those of who comes while this goes on are not among them.
        let files = self.uvm.files.all();
        let outlived = self.mappings.outlived(dead);
        let mut books = self.state.books();
        let mut has_buried = false;
        for process in dead {
            let pid = process_id(*process).pid.cast_unsigned();
            let has = |held: &Held| held.pid == pid && held.bytes() > 0;
            let is_shown = all.iter().flatten().any(has) || with_clients.contains(process);
            let holds = !lost.contains(process) && is_shown;
            // Their files end first, which others look to, who may be kept waiting.
            let is_kept = |number| files.iter().any(|file| file.number == number);
            let has_files = books.makers.bound_to(*process).any(is_kept);
            if has_files {
                self.mappings.spaces.look_at_all();
            }
            if holds || has_files || outlived.contains(process) {
                continue;
            }
            let space = Space::Managed(*process);
            books.enter(Entry::ReleaseSpace { space: space.number() });
            for (base, _) in books.ranges.of(space) {
                books.remove_range(space, base);
            }
            books.enter(Entry::RemoveProcess { process: *process });
            self.slices.shares.wake();
            self.mappings.spaces.look_at_all();
            self.processes.escaped.forget(*process);
            has_buried = true;
        }
        if has_buried {
            // No figure tells that they are gone. Should one be in use all the same, nothing
            // of it counted.
            for client in books.ledger.uncharged_orphans() {
                books.enter(Entry::Free { client, handle: Handle(client.0) });
                books.devices.forget_client(client.0);
            }
            if books.processes.is_empty() {
                drop(books);
                self.clear_up(&files);
            } else {
                // What they had is looked at once more.
                books.due.schedule(Instant::now());
                self.audit_wait.ring();
            }
        }
    }

    /// Nobody is left who called. What only a file maps has nobody to look for it; what was
    /// exported, somebody may have who never called, and passes it on.
    fn clear_up(&self, files: &[Arc<UvmFile>]) {
        self.uvm.unregister_each(files);
        let kept = self.uvm.files.all().iter().map(|file| file.number).collect();
        let mut books = self.state.books();
        if books.processes.is_empty() {
            books.close_all(&kept);
        } else {
            books.due.schedule(Instant::now());
            self.audit_wait.ring();
        }
    }

    /// The worker before may have buried the last one, and not have come to clear up.
    pub(crate) fn clear_up_what_is_left(&self) {
        let files = self.uvm.files.all();
        let is_deserted = {
            let books = self.state.books();
            let is_left = !books.has_nothing() || self.exports.all.has_any() || !files.is_empty();
            books.processes.is_empty() && is_left
        };
        if is_deserted {
            self.clear_up(&files);
        }
    }
}

/// A process took so much of a GPU that wasn't given.
fn past_the_monitor(settings: &Settings, gpu: usize, excess_bytes: u64) -> Event {
    let gpu = settings.gpus.get(gpu);
    Event {
        gpu: gpu.map(|gpu| gpu.index),
        gpu_uuid: gpu.map(|gpu| gpu.uuid.clone()),
        excess_bytes: Some(excess_bytes),
        ..Event::killed_past_the_monitor()
    }
}
