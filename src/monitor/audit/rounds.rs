//! Asks the driver and the kernel what the container's processes have: the audit.
//!
//! A thread of its own, so that calls that hang don't keep it from looking; a call that
//! would be refused for the quota asks too. What the answers mean is decided in
//! [`crate::monitor::audit::judge`]; here they are got, and acted on. It never reads a process's
//! memory, which could make it wait.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Signal, pidfd_send_signal};

use crate::events::Event;
use crate::ledger::{Client, Entry, Handle, Process};
use crate::monitor::audit::alias_audit::NAMES_DOUBT;
use crate::monitor::audit::auditor::Audited;
use crate::monitor::audit::deaths::{WaitEnd, Watched};
use crate::monitor::audit::heirs::{callers, seen_with};
use crate::monitor::audit::holdings::{DeadPids, Holdings};
use crate::monitor::audit::judge::{self, Figure, Finding, Underway};
use crate::monitor::audit::occasion::Occasion;
use crate::monitor::audit::prune::Depth;
use crate::monitor::audit::unanswered::{Amount, Unanswered};
use crate::monitor::caller::target::{pidfd_open, process_id};
use crate::monitor::calls::lane::OnLane;
use crate::monitor::driver::device::Failure;
use crate::monitor::driver::monitor_client::MonitorClient;
use crate::monitor::resident::{give_back_the_heap, give_back_the_start};
use crate::monitor::state::books::Books;
use crate::monitor::state::space::Space;
use crate::monitor::uvm::files::UvmFile;
use crate::monitor::worker::Shared;
use crate::monitor::worker::facts::{When, described};
use crate::monitor::worker::shutdown::LAST_LOOK;
use crate::process::ProcessId;
use crate::rm::about::Held;

/// How often the driver is asked while the container has processes that use it.
const TICK: Duration = Duration::from_millis(250);

/// How often while the container rests: what it does is heard of, and only strangers could have taken
/// anything.
const REST_TICK: Duration = Duration::from_millis(500);

/// How often while none of its processes has called.
const IDLE_TICK: Duration = Duration::from_secs(4);

/// How often mappings are looked at.
const MAPPINGS: Duration = Duration::from_millis(500);

/// How long a call that would be refused waits at most: the driver may keep an audit for ever, and
/// calls have threads that others need.
const MOST_PATIENCE: Duration = Duration::from_secs(1);

/// How often it looks whether an audit is over.
const LOOK: Duration = Duration::from_micros(200);

/// How often pages are given back that calls took which are over: a program calls most when it
/// starts.
const TIDY: Duration = Duration::from_secs(10);

/// What an audit saw.
#[derive(Debug)]
struct Seen {
    own: Arc<MonitorClient>,
    dead: Vec<Process>,
    numbers: DeadPids,
    /// By the container's GPUs.
    all: Vec<Vec<Held>>,
}

impl Shared {
    /// Our client of the driver.
    pub(crate) fn own_client(&self) -> Option<Arc<MonitorClient>> {
        opened(self.auditor.lock_own(), self)
    }

    /// Looks what there really is, for a call on the lane that would be refused otherwise, and came then.
    /// Others come onto the lane meanwhile.
    pub(crate) fn reconcile(&self, lane: &mut OnLane<'_>, came: Instant) {
        let asked = Instant::now();
        while asked.elapsed() < MOST_PATIENCE {
            let Some(mut last) = self.auditor.try_last() else {
                lane.step_aside(|| std::thread::sleep(LOOK));
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
                lane.step_aside(|| std::thread::sleep(wait));
                continue;
            }
            let (occasion, began) = (Occasion::Refusal, Instant::now());
            let seen = self.look(Some(lane));
            lane.step_aside(move || {
                self.act_on(seen, occasion);
                *last = Some(Audited { occasion, began, ended: Instant::now() });
            });
            break;
        }
        lane.step_aside(|| {
            self.sweep_mapped(Occasion::Refusal);
            self.hurry_exports();
        });
        self.free_stakes(lane);
    }

    /// Audits on the lane, or beside a call that hangs there.
    pub(crate) fn audit(&self, occasion: Occasion) {
        // Before the lane: who has it may take a while beside that.
        let mut last = self.auditor.last.lock().unwrap_or_else(PoisonError::into_inner);
        let lane = self.lane.enter_soon();
        let began = Instant::now();
        let seen = self.look(lane.as_ref());
        drop(lane);
        self.act_on(seen, occasion);
        *last = Some(Audited { occasion, began, ended: Instant::now() });
    }

    /// Audits, forever.
    pub(crate) fn audit_forever(&self) -> nix::Result<()> {
        let mut watched = Watched::new();
        let mut mapped = Instant::now();
        let mut tidied = Instant::now();
        self.clear_up_what_is_left();
        // Nobody looked since the worker before did.
        self.books().schedule(Instant::now());
        loop {
            self.watch(&mut watched)?;
            let woken = self.auditor.deaths.wait(self.next(Instant::now()));
            let now = Instant::now();
            self.undo_unclaimed();
            let occasion = if woken == WaitEnd::Death { Occasion::Death } else { Occasion::Tick };
            if self.is_due(now) || woken != WaitEnd::Rung {
                self.audit(occasion);
                self.look_abroad();
            }
            self.tell_left_out(When::Due);
            self.see_out();
            self.sweep_exports();
            self.sweep_mapped(occasion);
            self.free_stakes_soon();
            self.let_go();
            if self.is_idle() {
                self.meet();
            }
            if tidied.elapsed() > TIDY {
                give_back_the_start();
                if self.is_at_rest(now) {
                    give_back_the_heap();
                }
                tidied = Instant::now();
            }
            let are_due = mapped.elapsed() > MAPPINGS
                || woken == WaitEnd::Late
                || self.address_spaces.has_new();
            if are_due && (self.address_spaces.has_any() || !self.uvm_files.all().is_empty()) {
                self.address_spaces.ring();
                mapped = Instant::now();
            }
        }
    }

    /// Waits for the deaths of processes that were seen.
    fn watch(&self, watched: &mut Watched) -> nix::Result<()> {
        let processes = self.books().processes.clone();
        watched.retain(|process, _| processes.contains(process));
        for process in processes {
            let pid = process_id(process);
            if watched.contains_key(&process) || ProcessId::of(pid.pid) != Some(pid) {
                continue;
            }
            let Ok(pidfd) = pidfd_open(pid.pid, 0) else { continue };
            self.settle(pid.pid);
            self.auditor.deaths.watch(watched, process, pidfd)?;
        }
        Ok(())
    }

    /// Whether none of the container's processes has called yet, and somebody is to be met.
    fn is_idle(&self) -> bool {
        self.settings.state_file.is_some()
            && !self.auditor.abroad.has_called()
            && self.books().processes.is_empty()
    }

    /// Whether the container has called nothing for a while.
    pub(crate) fn is_at_rest(&self, now: Instant) -> bool {
        let mut rest = self.auditor.rest.lock().unwrap_or_else(PoisonError::into_inner);
        rest.note(self.journal.calls().received(), now);
        rest.is_long(now)
    }

    /// How long nothing is due; `None` where nothing will be by itself.
    fn next(&self, now: Instant) -> Option<Duration> {
        let idle = self.is_idle();
        let has_files = !self.uvm_files.all().is_empty();
        let rests = self.is_at_rest(now) && !self.exports.has_any();
        let mut books = self.books();
        let watched = idle
            || !books.processes.is_empty()
            || self.auditor.abroad.is_watched()
            || self.exports.has_any()
            || self.has_left_out()
            || has_files;
        let ending = self.auditor.ending.is_under_way();
        let tick = match (idle && self.auditor.abroad.is_watched(), rests) {
            (true, _) => IDLE_TICK,
            (false, true) => REST_TICK,
            (false, false) => TICK,
        };
        if !watched && !ending && self.unclaimed.is_empty() {
            // Or whoever comes next would find something due already, and wake nobody.
            books.due = [None; 2];
            return None;
        }
        let due = books.due.iter().flatten().min();
        let wait = due.map_or(tick, |due| due.saturating_duration_since(now).min(tick));
        Some(if ending { wait.min(LAST_LOOK) } else { wait })
    }

    /// Whether the driver is to be asked now.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let mut books = self.books();
        let mut due = false;
        for at in &mut books.due {
            if at.is_some_and(|at| at <= now) {
                *at = None;
                due = true;
            }
        }
        due
    }

    /// Undoes calls whose threads ended before they took the reply.
    pub(crate) fn undo_unclaimed(&self) {
        if self.unclaimed.is_empty() {
            return;
        }
        let Some(lane) = self.lane.enter_soon() else { return };
        while let Some(kept) = self.unclaimed.take_left(ProcessId::alive) {
            self.undo(&lane, &kept);
        }
    }

    /// Compares what the driver says with the books, for each GPU. `None` where nobody is there who could
    /// have anything, or the driver doesn't answer.
    fn look(&self, lane: Option<&OnLane<'_>>) -> Option<Seen> {
        let processes: Vec<Process> = self.books().processes.iter().copied().collect();
        let dead: Vec<Process> =
            processes.iter().copied().filter(|process| !process_id(*process).alive()).collect();
        if processes.is_empty() {
            self.let_go();
            return None;
        }
        let own = self.own_client()?;
        let is_lost = |process: &Process| ProcessId::of(process_id(*process).pid).is_some();
        let lost: BTreeSet<Process> = dead.iter().copied().filter(is_lost).collect();
        let numbers = DeadPids { former: self.auditor.abroad.former(), lost };
        let mut all = Vec::new();
        for gpu in 0..self.uuids.len() {
            let found = self.ask(lane, &own, gpu, &numbers)?;
            let learnt = self.judge(lane, gpu, &found);
            if let (Some(driver_bytes), Some(lane)) = (learnt, lane) {
                self.take_stock(lane, &own, gpu, driver_bytes);
            }
            all.push(found.held);
        }
        Some(Seen { own, dead, numbers, all })
    }

    /// What can be done beside calls.
    fn act_on(&self, seen: Option<Seen>, occasion: Occasion) {
        let Some(Seen { own, dead, numbers, all }) = seen else { return };
        let shows_names = all.iter().any(|held| has_duplicates(held));
        {
            let ledger = &self.books().ledger;
            let shows_names = shows_names || ledger.has_names_elsewhere();
            self.auditor.names.saw(shows_names, ledger.lacks_stakes());
        }
        if occasion != Occasion::Tick || self.auditor.is_stock_due() {
            let names = self.books().ledger.names_of_all();
            self.strike_out(&own, &names, Depth::Clients);
        }
        self.ask_for_names(&own);
        self.end_heirs(&dead, &all, &numbers);
        let outlived = self.with_clients(&own, &dead);
        self.bury(&dead, &all, (&numbers.lost, &outlived));
    }

    /// Closes our client of the driver, where nobody is left to be asked for.
    fn let_go(&self) {
        let mut own = self.auditor.own.lock().unwrap_or_else(PoisonError::into_inner);
        // Who has it may be about to enter a stake; nobody else can get it until this is over.
        if own.as_ref().is_none_or(|own| Arc::strong_count(own) > 1) {
            return;
        }
        let books = self.books();
        let is_needed = !books.processes.is_empty() || books.ledger.has_stakes();
        drop(books);
        if !is_needed && !self.auditor.abroad.is_watched() {
            own.take().iter().for_each(|own| self.disown(own));
        }
    }

    /// Acts on what the driver says of a GPU. How many bytes it has, where that is less than the books
    /// do: it is to be looked which of theirs are gone.
    fn judge(&self, lane: Option<&OnLane<'_>>, gpu: usize, found: &Holdings) -> Option<u64> {
        let Holdings { ref held, own_bytes, named } = *found;
        let mut books = self.books();
        let expected = books.ledger.expected(gpu)?;
        let underway = if lane.is_some() { Underway::Nothing } else { Underway::Call };
        let figures = uncharged(held);
        let finding = judge::judge(&figures, own_bytes, &expected, named, underway);
        let is_more = matches!(finding, Finding::Unasked { .. } | Finding::Exceeds { .. });
        // By their own figures alone it's not to be seen.
        let by_names = is_more && judge::judge(&figures, 0, &expected, None, underway) != finding;
        if !by_names && named.is_some() {
            self.auditor.names.dispel(gpu);
        }
        if lane.is_some() || !is_more {
            self.auditor.doubts.dispel(gpu);
        } else if !self.auditor.doubts.last(gpu) {
            books.schedule(Instant::now());
            drop(books);
            self.auditor.wake();
            return None;
        }
        if by_names && !self.auditor.names.have_been_more(gpu) {
            books.schedule_by(Instant::now() + NAMES_DOUBT);
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
                    judge::judge(&figures, own_bytes, &expected, named, underway)
                {
                    books.enter(Entry::Reconcile { gpu, driver_bytes });
                    books.schedule(Instant::now());
                    let culprits = culprits(&books, pid);
                    drop(books);
                    tracing::debug!(excess_bytes, pid, "taken past the monitor");
                    self.auditor.abroad.suspect();
                    let event = || self.past_the_monitor(gpu, excess_bytes);
                    culprits.into_iter().for_each(|culprit| self.kill(culprit, event()));
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
        let files = self.uvm_files.all();
        let outlived = self.outlived(dead);
        let mut books = self.books();
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
                self.address_spaces.look_at_all();
            }
            if holds || has_files || outlived.contains(process) {
                continue;
            }
            let space = Space::Managed(*process);
            books.enter(Entry::ReleaseSpace { space: space.number() });
            for (base, _) in books.ranges_of(space) {
                books.withdraw(space, base);
            }
            books.enter(Entry::Left { process: *process });
            self.shares.wake();
            self.address_spaces.look_at_all();
            self.auditor.abroad.buried(*process);
            has_buried = true;
        }
        if has_buried {
            // No figure tells that they are gone. Should one be in use all the same, nothing
            // of it counted.
            for client in books.ledger.weightless_orphans() {
                books.enter(Entry::Free { client, handle: Handle(client.0) });
                books.unlearn_all(client.0);
            }
            if books.processes.is_empty() {
                drop(books);
                self.clear_up(&files);
            } else {
                // What they had is looked at once more.
                books.schedule(Instant::now());
                self.auditor.wake();
            }
        }
    }

    /// Nobody is left who called. What only a file maps has nobody to look for it; what was
    /// exported, somebody may have who never called, and passes it on.
    fn clear_up(&self, files: &[Arc<UvmFile>]) {
        self.unregister_each(files);
        let kept = self.uvm_files.all().iter().map(|file| file.number).collect();
        let mut books = self.books();
        if books.processes.is_empty() {
            books.close_all(&kept);
        } else {
            books.schedule(Instant::now());
            self.auditor.wake();
        }
    }

    /// The worker before may have buried the last one, and not have come to clear up.
    fn clear_up_what_is_left(&self) {
        let files = self.uvm_files.all();
        let is_deserted = {
            let books = self.books();
            let is_left = !books.has_nothing() || self.exports.has_any() || !files.is_empty();
            books.processes.is_empty() && is_left
        };
        if is_deserted {
            self.clear_up(&files);
        }
    }

    /// A process took so much of a GPU that wasn't given.
    fn past_the_monitor(&self, gpu: usize, excess_bytes: u64) -> Event {
        let gpu = self.settings.gpus.get(gpu);
        Event {
            gpu: gpu.map(|gpu| gpu.index),
            gpu_uuid: gpu.map(|gpu| gpu.uuid.clone()),
            excess_bytes: Some(excess_bytes),
            ..Event::killed_past_the_monitor()
        }
    }

    /// Ends a process that took or keeps what wasn't given; the event says why.
    pub(crate) fn kill(&self, process: Process, event: Event) {
        let pid = process_id(process);
        // A pidfd names whoever has the pid when it's opened: who that is, is asked after.
        let Ok(pidfd) = pidfd_open(pid.pid, 0) else { return };
        if ProcessId::of(pid.pid) != Some(pid) {
            return;
        }
        let first = {
            let mut killed = self.auditor.killed.lock().unwrap_or_else(PoisonError::into_inner);
            killed.retain(|killed| process_id(*killed).alive());
            killed.insert(process)
        };
        let event = first.then(|| described(event, pid.pid));
        // Whoever sees it gone finds it counted.
        if first {
            self.count_killed();
        }
        let _ = pidfd_send_signal(pidfd, Signal::KILL);
        if let Some(event) = event {
            self.killed(event);
        }
    }
}

fn has_duplicates(held: &[Held]) -> bool {
    held.iter().any(|held| held.duplicated_bytes > 0)
}

/// Figures, whoever is charged for what.
fn uncharged(held: &[Held]) -> Vec<Figure> {
    held.iter().map(|held| Figure { held: *held, charged_bytes: 0 }).collect()
}

/// What each process was charged, by the clients it was seen with.
fn with_charges(books: &Books, gpu: usize, held: &[Held]) -> Vec<Figure> {
    let charges = books.ledger.charged_by_client(gpu);
    // The first that used a client is who made it, mostly.
    let mut owners: BTreeMap<Client, Process> = BTreeMap::new();
    for (client, process) in books.ledger.processes() {
        owners.entry(client).or_insert(process);
    }
    let charged = |pid: u32| {
        let of_pid = charges.iter().filter(|(client, _)| {
            owners.get(client).is_some_and(|of| process_id(*of).pid.cast_unsigned() == pid)
        });
        of_pid.fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes))
    };
    held.iter().map(|held| Figure { held: *held, charged_bytes: charged(held.pid) }).collect()
}

/// Who is to be killed for what the driver shows under `pid`: that process, or where it's dead
/// those who were seen with a client of its; or else all.
fn culprits(books: &Books, pid: u32) -> BTreeSet<Process> {
    let callers = callers(books);
    let of_pid = |process: &&Process| process_id(**process).pid.cast_unsigned() == pid;
    if let Some(named) = callers.iter().find(of_pid) {
        return [*named].into();
    }
    let heirs = seen_with(books, pid);
    if heirs.is_empty() { callers } else { heirs }
}

impl Shared {
    /// The log says that an audit can't look.
    fn is_blind(&self, why: &Unanswered) {
        if self.auditor.told.is_due(why, Instant::now()) {
            let container = self.settings.short_id.as_str();
            let driver = self.settings.driver.as_str();
            tracing::warn!(container, driver, "an audit can't see what the driver has: {why}");
        }
    }

    /// What the driver answered of a GPU; where it didn't, the log says so.
    pub(crate) fn answered<T>(
        &self,
        gpu: usize,
        amount: Amount,
        answer: Result<T, Failure>,
    ) -> Option<T> {
        let failed = |failure: Failure| {
            let index = self.settings.gpus.get(gpu).map_or(0, |gpu| gpu.index);
            self.is_blind(&Unanswered::Amount { amount, index, reason: failure.into() });
        };
        answer.map_err(failed).ok()
    }
}

/// Our client of the driver, opened where it isn't yet.
fn opened(
    mut own: MutexGuard<'_, Option<Arc<MonitorClient>>>,
    shared: &Shared,
) -> Option<Arc<MonitorClient>> {
    if own.is_none() {
        match MonitorClient::open(&shared.settings.nodes, &shared.release, &shared.uuids) {
            Ok(opened) => {
                for gpu in opened.missing().filter_map(|gpu| shared.settings.gpus.get(gpu)) {
                    shared.is_blind(&Unanswered::NoGpu { index: gpu.index });
                }
                *own = Some(Arc::new(opened));
            }
            Err(unanswered) => shared.is_blind(&unanswered),
        }
    }
    own.clone()
}
