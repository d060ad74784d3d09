//! The audit's thread: when it looks, and what else it looks after.
//!
//! The audit has a thread of its own, so that calls that hang don't keep it from looking.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::monitor::caller::{WaitEnd, Watched};
use crate::monitor::calls::Parts;
use crate::monitor::daemon::container_end::ContainerEnd;
use crate::monitor::log::When;
use crate::monitor::resident::{give_back_heap, give_back_startup_code};
use crate::monitor::state::{Due, Occasion};
use crate::monitor::thread::spawn;
use crate::process::ProcessId;

/// How often the thread looks at least while the monitor keeps exported memory, whose file somebody may close.
const EXPORTS: Duration = Duration::from_millis(250);

/// How often mappings are looked at.
const MAPPINGS: Duration = Duration::from_millis(500);

/// How often pages are given back that finished calls took, while there are calls: a program calls most when it
/// starts.
const GIVE_BACK: Duration = Duration::from_secs(10);

/// The audit's thread.
#[derive(Debug)]
pub(crate) struct AuditThread {
    parts: Arc<Parts>,
    container_end: Arc<ContainerEnd>,
}

impl AuditThread {
    /// Starts the thread.
    pub(crate) fn start(parts: Arc<Parts>, container_end: Arc<ContainerEnd>) -> io::Result<()> {
        let thread = AuditThread { parts, container_end };
        spawn("audit", move || thread.audit_forever())
    }

    fn audit_forever(&self) {
        let Parts { state, driver, callers, processes, stakes, exports, uvm, audit, .. } =
            &*self.parts;
        let mut watched = Watched::new();
        let mut mapped = Instant::now();
        let mut given_back = Instant::now();
        let mut heap_given_after = None;
        // Nothing was looked at during an update.
        state.books().due.schedule(Instant::now());
        loop {
            self.watch(&mut watched);
            let woken = audit.audit_wait.wait(&mut watched, self.plan_wait(Instant::now()));
            let _at_work = state.work.begin();
            let now = Instant::now();
            callers.undo_unclaimed();
            let occasion =
                if woken == WaitEnd::ProcessExited { Occasion::Death } else { Occasion::Tick };
            if state.books().due.take(now) || woken != WaitEnd::Woken {
                audit.audit(occasion);
                // Once the container ends, its end searches.
                if self.container_end.most_wait().is_none() {
                    audit.escapes.end_escapes();
                }
            }
            state.log.tell_left_out(When::Due);
            self.container_end.end_what_is_left();
            exports.sweep_exports();
            uvm.sweep(occasion);
            stakes.free_stakes_soon();
            driver.close_if_unused(processes.origins.is_watched());
            if self.awaits_first_process() {
                processes.origins.find_first_process();
            }
            let calls = state.counters.calls().received();
            if given_back.elapsed() > GIVE_BACK && heap_given_after != Some(calls) {
                give_back_startup_code();
                if state.is_idle(now) {
                    give_back_heap();
                    heap_given_after = Some(calls);
                }
                given_back = Instant::now();
            }
            let are_due =
                mapped.elapsed() > MAPPINGS || woken == WaitEnd::Timeout || uvm.spaces.has_new();
            if are_due && (uvm.spaces.has_any() || !uvm.files.all().is_empty()) {
                uvm.spaces.wake();
                mapped = Instant::now();
            }
        }
    }

    /// Has the wait end by the death of each process that called.
    fn watch(&self, watched: &mut Watched) {
        let Parts { state, processes, .. } = &*self.parts;
        let callers = state.books().processes.clone();
        watched.retain(|process, _| callers.contains(process));
        for process in callers {
            let pid = ProcessId::from(process);
            if watched.contains_key(&process) || ProcessId::of(pid.pid) != Some(pid) {
                continue;
            }
            let Ok(pidfd) = crate::process::pidfd(pid.pid) else { continue };
            processes.origins.note_process(pid.pid);
            watched.insert(process, Some(pidfd));
        }
    }

    /// Whether the container's first process is to be found: none has called yet, and its state file is known.
    fn awaits_first_process(&self) -> bool {
        let Parts { state, processes, .. } = &*self.parts;
        state.settings.state_file.is_some()
            && !processes.origins.has_dead_caller()
            && state.books().processes.is_empty()
    }

    /// How long nothing is due; `None` where nothing will be due by itself, and then nothing stays scheduled.
    fn plan_wait(&self, now: Instant) -> Option<Duration> {
        let Parts { state, callers, processes, exports, uvm, .. } = &*self.parts;
        let awaits_first = self.awaits_first_process();
        let has_files = !uvm.files.all().is_empty();
        let mut interval = state.pace(!awaits_first, now).interval;
        if awaits_first {
            interval = interval.min(processes.origins.finding_interval());
        }
        if exports.all.has_any() {
            interval = interval.min(EXPORTS);
        }
        let last_wait = self.container_end.most_wait();
        let mut books = state.books();
        let watched = awaits_first
            || !books.processes.is_empty()
            || processes.origins.is_watched()
            || exports.all.has_any()
            || state.log.has_left_out()
            || has_files;
        if !watched && last_wait.is_none() && !callers.has_unclaimed() {
            // Otherwise the next process would find something scheduled already, and wake no thread.
            books.due = Due::default();
            return None;
        }
        let wait = books
            .due
            .next()
            .map_or(interval, |due| due.saturating_duration_since(now).min(interval));
        Some(last_wait.map_or(wait, |most| wait.min(most)))
    }
}
