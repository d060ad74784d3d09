//! The audit's thread: when it looks, and what else it looks after.
//!
//! A thread of its own, so that calls that hang don't keep it from looking.

use std::time::{Duration, Instant};

use crate::monitor::caller::deaths::{WaitEnd, Watched};
use crate::monitor::caller::target::pidfd_open;
use crate::monitor::calls::parts::Parts;
use crate::monitor::journal::process_number::process_id;
use crate::monitor::log::container_log::When;
use crate::monitor::resident::{give_back_the_heap, give_back_the_start};
use crate::monitor::state::due::Due;
use crate::monitor::state::occasion::Occasion;
use crate::monitor::worker::Worker;
use crate::process::ProcessId;

/// How often at least while it has exported memory, whose file somebody may close.
const EXPORTS: Duration = Duration::from_millis(250);

/// How often mappings are looked at.
const MAPPINGS: Duration = Duration::from_millis(500);

/// How often is looked once the container is gone.
const LAST_LOOK: Duration = Duration::from_millis(25);

/// How often pages are given back that calls took which are over, while there are calls: a program calls most
/// when it starts.
const TIDY: Duration = Duration::from_secs(10);

impl Worker {
    /// Audits, forever.
    pub(crate) fn audit_forever(&self) -> nix::Result<()> {
        let Parts {
            state, driver, callers, processes, stakes, exports, uvm, mappings, audit, ..
        } = &*self.parts;
        let mut watched = Watched::new();
        let mut mapped = Instant::now();
        let mut tidied = Instant::now();
        let mut tidied_after = None;
        audit.clear_up_what_is_left();
        // Nobody looked since the worker before did.
        state.books().due.schedule(Instant::now());
        loop {
            self.watch(&mut watched)?;
            let woken = audit.deaths.wait(self.next(Instant::now()));
            let now = Instant::now();
            callers.undo_unclaimed();
            let occasion = if woken == WaitEnd::Death { Occasion::Death } else { Occasion::Tick };
            if state.books().due.take(now) || woken != WaitEnd::Rung {
                audit.audit(occasion);
                processes.look_abroad();
            }
            state.log.tell_left_out(When::Due);
            self.see_out();
            exports.sweep_exports();
            uvm.sweep(occasion);
            stakes.free_stakes_soon();
            driver.let_go(processes.escaped.is_watched());
            if self.is_idle() {
                processes.meet();
            }
            let calls = state.journal.calls().received();
            if tidied.elapsed() > TIDY && tidied_after != Some(calls) {
                give_back_the_start();
                if state.is_at_rest(now) {
                    give_back_the_heap();
                    tidied_after = Some(calls);
                }
                tidied = Instant::now();
            }
            let are_due =
                mapped.elapsed() > MAPPINGS || woken == WaitEnd::Late || mappings.spaces.has_new();
            if are_due && (mappings.spaces.has_any() || !uvm.files.all().is_empty()) {
                mappings.spaces.ring();
                mapped = Instant::now();
            }
        }
    }

    /// Waits for the deaths of processes that were seen.
    fn watch(&self, watched: &mut Watched) -> nix::Result<()> {
        let Parts { state, processes, audit, .. } = &*self.parts;
        let callers = state.books().processes.clone();
        watched.retain(|process, _| callers.contains(process));
        for process in callers {
            let pid = process_id(process);
            if watched.contains_key(&process) || ProcessId::of(pid.pid) != Some(pid) {
                continue;
            }
            let Ok(pidfd) = pidfd_open(pid.pid, 0) else { continue };
            processes.settle(pid.pid);
            audit.deaths.watch(watched, process, pidfd)?;
        }
        Ok(())
    }

    /// Whether none of the container's processes has called yet, and somebody is to be met.
    fn is_idle(&self) -> bool {
        let Parts { state, processes, .. } = &*self.parts;
        state.settings.state_file.is_some()
            && !processes.escaped.has_called()
            && state.books().processes.is_empty()
    }

    /// How long nothing is due; `None` where nothing will be by itself.
    fn next(&self, now: Instant) -> Option<Duration> {
        let Parts { state, callers, processes, exports, uvm, .. } = &*self.parts;
        let idle = self.is_idle();
        let has_files = !uvm.files.all().is_empty();
        let was_used = !(idle && processes.escaped.is_watched());
        let tick = state.pace(was_used, now).tick;
        let tick = if exports.all.has_any() { tick.min(EXPORTS) } else { tick };
        let mut books = state.books();
        let watched = idle
            || !books.processes.is_empty()
            || processes.escaped.is_watched()
            || exports.all.has_any()
            || state.log.has_left_out()
            || has_files;
        let ending = self.is_ending();
        if !watched && !ending && callers.unclaimed.is_empty() {
            // Or whoever comes next would find something due already, and wake nobody.
            books.due = Due::default();
            return None;
        }
        let wait =
            books.due.next().map_or(tick, |due| due.saturating_duration_since(now).min(tick));
        Some(if ending { wait.min(LAST_LOOK) } else { wait })
    }
}
