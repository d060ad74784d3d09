//! The end of a listener, when the last process behind it has ended; and the end of the container with its last
//! listener.
//!
//! Outside processes may have the container's descriptors and memory, so the monitor searches for them once more before
//! it exits. If a program of the host has one, and isn't killed for it, the monitor stays until that program has closed
//! it or exited: as long as there is a way to the container's memory, the memory stays reserved.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::audit::{clear_exports, has_left_clients, search_after_end, since_search};
use crate::caller::Listeners;
use crate::daemon::status::StatusWriter;
use crate::driver::driver_usage_of;
use crate::gate::wire::{End, Holder};
use crate::log::When;
use crate::processes::{Evidence, caller_pids};
use crate::shared::Monitor;
use crate::sync::{ChangeFlag, Lock, spawn};

/// How often descriptors are searched, and how long nothing may be found before the monitor may exit.
const LAST_SEARCH: Duration = Duration::from_millis(100);
const CLEAR: Duration = Duration::from_millis(400);

/// How often descriptors are searched while a program of the host has one: that can be for days.
const SEARCH_WHILE_LEAKED: Duration = Duration::from_secs(5);

/// How often the audit thread checks whether a search is due.
const LAST_CHECK: Duration = Duration::from_millis(25);

/// How long the monitor stays at most after a search that found no program of the host.
const MOST_WAIT: Duration = Duration::from_secs(10);

/// The most programs that a status lists.
const MOST_HOLDERS_REPORTED: usize = 16;

/// Notices the end of the container, and ends what is left.
#[derive(Debug)]
pub(crate) struct ContainerEnd {
    monitor: Arc<Monitor>,
    listeners: Arc<Listeners>,
    /// Wakes the first thread, which ends the monitor.
    wake: Arc<ChangeFlag>,
    status_writer: Arc<StatusWriter>,
    ending: Lock<Ending>,
}

/// How far the end has come.
#[derive(Debug, Default)]
struct Ending {
    /// Whether the last listener has ended, and it isn't known yet that nothing is left.
    is_in_progress: bool,
    /// Whether a search found no process while the driver still had a client of the container's.
    is_in_flight: bool,
    /// Since when a search finds nothing that a container has whose listeners have all ended.
    clear_since: Option<Instant>,
    /// Until when the monitor stays at most.
    limit: Option<Instant>,
}

impl ContainerEnd {
    pub(crate) fn new(
        monitor: Arc<Monitor>,
        listeners: Arc<Listeners>,
        wake: Arc<ChangeFlag>,
        status_writer: Arc<StatusWriter>,
    ) -> Self {
        ContainerEnd { monitor, listeners, wake, status_writer, ending: Lock::default() }
    }

    /// Whether the last listener has ended, and it isn't known yet that nothing is left of the container.
    pub(crate) fn is_in_progress(&self) -> bool {
        self.ending.lock().is_in_progress
    }

    /// How long the audit thread may wait at most while the container ends; `None` if it doesn't end.
    pub(crate) fn most_wait(&self) -> Option<Duration> {
        let wait = if self.is_leaked() { SEARCH_WHILE_LEAKED } else { LAST_CHECK };
        self.is_in_progress().then_some(wait)
    }

    /// Whether a program of the host has a way to the container's memory.
    fn is_leaked(&self) -> bool {
        matches!(self.monitor.end(), End::Over { holders } if !holders.is_empty())
    }

    /// Removes a listener whose last process has exited. After the container's last listener, the end is in progress
    /// until the driver has nothing of the container's any more, and no program has a way to it.
    pub(crate) fn end_listener(self: &Arc<Self>, number: u64) {
        let monitor = &*self.monitor;
        let unseen = caller_pids(monitor).is_empty()
            && !monitor.provenances.is_watched()
            && !monitor.exports.has_any();
        let has_ended = unseen || monitor.provenances.is_unknown();
        // One step for the audit thread, which may be about to find a new listener.
        let mut ending = self.ending.lock();
        self.listeners.remove(number);
        if !self.listeners.is_empty() {
            return;
        }
        if has_ended {
            monitor.set_end(End::Over { holders: Vec::new() });
        } else {
            monitor.set_end(End::Searching);
            ending.is_in_flight = false;
            ending.limit = Some(Instant::now() + MOST_WAIT);
            ending.is_in_progress = true;
        }
        drop(ending);
        monitor.log.report_left_out(When::End);
        self.status_writer.write_now();
        if has_ended {
            return;
        }
        self.monitor.audit_wait.wake();
        // The audit thread may hang in the driver for ever.
        let end = Arc::clone(self);
        let limited = spawn("end", move || end.wait_for_limit());
        if limited.is_err() {
            self.finish();
        }
    }

    /// Ends the end when the monitor has stayed long enough.
    fn wait_for_limit(&self) {
        loop {
            // In a statement of its own: the lock isn't held while this sleeps.
            let limit = self.ending.lock().limit;
            let Some(limit) = limit else { break };
            let left = match self.is_leaked() {
                // As long as a program is known, the monitor stays.
                true => MOST_WAIT,
                false => limit.saturating_duration_since(Instant::now()),
            };
            if left.is_zero() {
                break;
            }
            std::thread::sleep(left);
        }
        if self.is_in_progress() {
            tracing::error!(
                container = self.monitor.settings.short_id,
                limit_s = MOST_WAIT.as_secs(),
                "the container is gone, and the driver still has memory of it: no process was found that uses it"
            );
            self.finish();
        }
    }

    fn finish(&self) {
        let mut ending = self.ending.lock();
        (ending.limit, ending.is_in_progress) = (None, false);
        drop(ending);
        self.wake.set();
    }

    /// Ends what is left of a container that has ended, and notes when nothing is left.
    pub(crate) fn end_what_is_left(&self) {
        if !self.is_in_progress() {
            return;
        }
        let mut ending = self.ending.lock();
        if !self.listeners.is_empty() {
            // A new listener came after all.
            self.monitor.set_end(End::NotYet);
            (ending.limit, ending.is_in_progress) = (None, false);
            return;
        }
        drop(ending);
        clear_exports(&self.monitor);
        let mut pids = self.monitor.provenances.unused_dead_pids();
        pids.extend(caller_pids(&self.monitor));
        let pids: Vec<u32> = pids.into_iter().collect();
        let used = driver_usage_of(&self.monitor, &pids).is_none_or(|(usage, _)| !usage.is_empty());
        let has_killed = self.search_where_due(used);
        let is_leaked = self.is_leaked();
        let mut ending = self.ending.lock();
        if used || has_killed || is_leaked || ending.is_in_flight {
            ending.clear_since = None;
            return;
        }
        let since = *ending.clear_since.get_or_insert_with(Instant::now);
        drop(ending);
        if since.elapsed() >= CLEAR {
            self.finish();
        }
    }

    /// Searches for outside processes with the container's descriptors, if a search is due. `used`: whether the driver
    /// reports memory of the container's. `true` if one was killed.
    fn search_where_due(&self, used: bool) -> bool {
        let monitor = &*self.monitor;
        let is_in_flight = self.ending.lock().is_in_flight;
        if is_in_flight && !has_left_clients(monitor) {
            self.set_over(Vec::new());
        }
        let pause = match self.monitor.end() {
            End::Searching if !is_in_flight => Duration::ZERO,
            End::Searching => LAST_SEARCH,
            End::Over { holders } if !holders.is_empty() => SEARCH_WHILE_LEAKED,
            End::Over { .. } | End::NotYet => LAST_SEARCH,
        };
        if since_search(monitor) < pause {
            return false;
        }
        let evidence = if used { Evidence::ContainerMemory } else { Evidence::OwnMemory };
        let mut search = search_after_end(monitor, evidence);
        search.holders.truncate(MOST_HOLDERS_REPORTED);
        if search.holders.is_empty() && self.monitor.end() == End::Searching {
            // The driver closes files a moment after their process has ended, and a descriptor that was sent may not
            // have been received yet.
            let is_in_flight = has_left_clients(monitor);
            self.ending.lock().is_in_flight = is_in_flight;
            if is_in_flight {
                return search.has_killed;
            }
        }
        self.set_over(search.holders);
        search.has_killed
    }

    /// Sets that the search has finished and found these.
    fn set_over(&self, holders: Vec<Holder>) {
        let mut ending = self.ending.lock();
        ending.is_in_flight = false;
        if !holders.is_empty() {
            ending.limit = Some(Instant::now() + MOST_WAIT);
        }
        drop(ending);
        if self.monitor.set_end(End::Over { holders }) {
            self.status_writer.write_now();
        }
    }
}
