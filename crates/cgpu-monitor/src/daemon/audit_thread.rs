//! The audit thread: when it audits, and what else it does.
//!
//! The audit has a thread of its own, so that calls that hang don't prevent audits.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::audit::{audit, end_escapes, scan_exports};
use crate::caller::{WaitEnd, Watched};
use crate::case::{has_unclaimed, undo_unclaimed};
use crate::daemon::container_end::ContainerEnd;
use crate::daemon::resident::{give_back_heap, give_back_startup_code};
use crate::driver::{close_client_if_unused, free_pins_soon};
use crate::log::When;
use crate::shared::Monitor;
use crate::state::{Occasion, Schedule};
use crate::sync::spawn;
use crate::uvm::scan_files;
use cgpu_host::process::ProcessId;

/// How often the thread audits at least while the monitor retains exported memory, whose file a process may close.
const EXPORTS: Duration = Duration::from_millis(250);

/// How often mappings are checked.
const MAPPINGS: Duration = Duration::from_millis(500);

/// How often pages are given back that finished calls took, while there are calls: a program calls most when it
/// starts.
const GIVE_BACK: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct AuditThread {
    monitor: Arc<Monitor>,
    container_end: Arc<ContainerEnd>,
}

impl AuditThread {
    pub(crate) fn start(monitor: Arc<Monitor>, container_end: Arc<ContainerEnd>) -> io::Result<()> {
        let thread = AuditThread { monitor, container_end };
        spawn("audit", move || thread.audit_forever())
    }

    fn audit_forever(&self) {
        let monitor = &*self.monitor;
        let mut watched = Watched::new();
        let mut mapped = Instant::now();
        let mut given_back = Instant::now();
        let mut heap_given_after = None;
        // Nothing was checked during an update.
        monitor.state().due.schedule(Instant::now());
        loop {
            self.watch(&mut watched);
            let woken = monitor.audit_wait.wait(&mut watched, self.plan_wait(Instant::now()));
            let _at_work = monitor.work.begin();
            let now = Instant::now();
            undo_unclaimed(monitor);
            let occasion =
                if woken == WaitEnd::ProcessExited { Occasion::Death } else { Occasion::Tick };
            if monitor.state().due.take(now) || woken != WaitEnd::Woken {
                audit(monitor, occasion);
                // Once the container ends, its end searches.
                if self.container_end.most_wait().is_none() {
                    end_escapes(monitor);
                }
            }
            monitor.log.report_left_out(When::Schedule);
            self.container_end.end_what_is_left();
            scan_exports(monitor);
            scan_files(monitor, occasion);
            free_pins_soon(monitor);
            close_client_if_unused(monitor, monitor.provenances.is_watched());
            if self.awaits_first_process() {
                let scan_interval = monitor.audit_interval(false, now).scan_interval;
                monitor.provenances.find_first_process(&monitor.settings, scan_interval);
            }
            let calls = monitor.counters.calls().received();
            if given_back.elapsed() > GIVE_BACK && heap_given_after != Some(calls) {
                give_back_startup_code();
                if monitor.is_idle(now) {
                    give_back_heap();
                    heap_given_after = Some(calls);
                }
                given_back = Instant::now();
            }
            let are_due = mapped.elapsed() > MAPPINGS
                || woken == WaitEnd::Timeout
                || monitor.spaces.has_new();
            if are_due && (monitor.spaces.has_any() || !monitor.uvm_files.all().is_empty()) {
                monitor.spaces.wake();
                mapped = Instant::now();
            }
        }
    }

    /// Has the wait end by the death of each process that called.
    fn watch(&self, watched: &mut Watched) {
        let monitor = &*self.monitor;
        let callers = monitor.state().processes.clone();
        watched.retain(|process, _| callers.contains(process));
        for process in callers {
            let pid = ProcessId::from(process);
            if watched.contains_key(&process) || ProcessId::of(pid.pid) != Some(pid) {
                continue;
            }
            let Ok(pidfd) = cgpu_host::process::pidfd(pid.pid) else { continue };
            monitor.provenances.note_process(pid.pid, &monitor.settings);
            watched.insert(process, Some(pidfd));
        }
    }

    /// Whether the container's first process is to be found: none has called yet, and its state file is known.
    fn awaits_first_process(&self) -> bool {
        let monitor = &*self.monitor;
        monitor.settings.state_file.is_some()
            && !monitor.provenances.has_dead_caller()
            && monitor.state().processes.is_empty()
    }

    /// How long nothing is due; `None` if nothing will be due by itself, and then nothing stays scheduled.
    fn plan_wait(&self, now: Instant) -> Option<Duration> {
        let monitor = &*self.monitor;
        let awaits_first = self.awaits_first_process();
        let has_files = !monitor.uvm_files.all().is_empty();
        let mut interval = monitor.audit_interval(!awaits_first, now).interval;
        if awaits_first {
            let scan_interval = monitor.audit_interval(false, now).scan_interval;
            interval = interval.min(monitor.provenances.finding_interval(scan_interval));
        }
        if monitor.exports.has_any() {
            interval = interval.min(EXPORTS);
        }
        let last_wait = self.container_end.most_wait();
        let mut state = monitor.state();
        let watched = awaits_first
            || !state.processes.is_empty()
            || monitor.provenances.is_watched()
            || monitor.exports.has_any()
            || monitor.log.has_left_out()
            || has_files;
        if !watched && last_wait.is_none() && !has_unclaimed(monitor) {
            // Otherwise the next process would find something scheduled already, and wake no thread.
            state.due = Schedule::default();
            return None;
        }
        let wait = state
            .due
            .next()
            .map_or(interval, |due| due.saturating_duration_since(now).min(interval));
        Some(last_wait.map_or(wait, |most| wait.min(most)))
    }
}
