//! The end of a container: the last process behind its listeners has ended.
//!
//! Outside processes may have the container's descriptors and memory, so the worker looks for them once more and
//! tells the keeper only then.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::gate::wire::Notice;
use crate::monitor::audit::Evidence;
use crate::monitor::caller::Listeners;
use crate::monitor::calls::Parts;
use crate::monitor::keeper_socket::KeeperSocket;
use crate::monitor::lock::Lock;
use crate::monitor::log::When;
use crate::monitor::thread::spawn;
use crate::monitor::worker::worker_end::WorkerEnd;

/// How often descriptors are searched, and how long nothing may be found before the keeper is told.
const LAST_SEARCH: Duration = Duration::from_millis(100);
const CLEAR: Duration = Duration::from_millis(400);

/// How long the keeper is kept waiting at most.
const MOST_WAIT: Duration = Duration::from_secs(10);

/// Notices the end of the container, and ends what is left.
#[derive(Debug)]
pub(crate) struct ContainerEnd {
    parts: Arc<Parts>,
    listeners: Arc<Listeners>,
    keeper: Arc<KeeperSocket>,
    worker_end: Arc<WorkerEnd>,
    /// Listeners whose last process has ended, of which the keeper isn't told yet.
    ended_listeners: Lock<Vec<u64>>,
    /// Since when a search finds nothing that a container has whose listeners have all ended.
    clear_since: Lock<Option<Instant>>,
}

impl ContainerEnd {
    pub(crate) fn new(
        parts: Arc<Parts>,
        listeners: Arc<Listeners>,
        keeper: Arc<KeeperSocket>,
        worker_end: Arc<WorkerEnd>,
    ) -> Self {
        let (ended_listeners, clear_since) = (Lock::default(), Lock::default());
        ContainerEnd { parts, listeners, keeper, worker_end, ended_listeners, clear_since }
    }

    /// Whether a listener has ended that the keeper isn't told of yet.
    pub(crate) fn is_ending(&self) -> bool {
        !self.ended_listeners.lock().is_empty()
    }

    /// Notes that the last process behind a listener has ended, and tells the keeper. For the container's last
    /// listener, that waits until the driver has nothing of the container's any more.
    pub(crate) fn note_listener_ended(self: &Arc<Self>, number: u64) -> io::Result<()> {
        let origins = &self.parts.processes.origins;
        let others = !self.listeners.is_empty();
        if !others {
            self.parts.state.log.tell_left_out(When::End);
        }
        let unseen = self.parts.processes.caller_pids().is_empty()
            && !origins.is_watched()
            && !self.parts.exports.all.has_any();
        if others || unseen || origins.is_unknown() {
            return self.keeper.tell(Notice::Gone { number });
        }
        self.ended_listeners.lock().push(number);
        self.parts.audit.audit_wait.ring();
        // The auditor may hang in the driver for ever.
        let end = Arc::clone(self);
        let limited = spawn("end", move || {
            std::thread::sleep(MOST_WAIT);
            if end.is_ending() {
                tracing::error!(
                    container = end.parts.state.settings.short_id,
                    limit_s = MOST_WAIT.as_secs(),
                    "the container is gone, and the driver still has memory of it: nobody was found who uses it"
                );
                end.tell_all_gone();
            }
        });
        if limited.is_err() {
            self.tell_all_gone();
        }
        Ok(())
    }

    fn tell_all_gone(&self) {
        let mut ended = self.ended_listeners.lock();
        for number in std::mem::take(&mut *ended) {
            if let Err(error) = self.keeper.tell(Notice::Gone { number }) {
                self.worker_end.finish(Err(error));
            }
        }
    }

    /// Ends what is left of a container that has ended, and tells the keeper when nothing is left.
    pub(crate) fn end_what_is_left(&self) {
        let origins = &self.parts.processes.origins;
        if !self.is_ending() {
            return;
        }
        if !self.listeners.is_empty() {
            // A new listener came after all.
            return self.tell_all_gone();
        }
        self.parts.exports.clear_all();
        let mut pids = origins.unused_dead_pids();
        pids.extend(self.parts.processes.caller_pids());
        let pids: Vec<u32> = pids.into_iter().collect();
        let used = self.parts.driver.figures(&pids).is_none_or(|(figures, _)| !figures.is_empty());
        let evidence = if used { Evidence::ContainerMemory } else { Evidence::OwnMemory };
        let due = self.parts.audit.escapes.since_search() >= LAST_SEARCH;
        let found = due && self.parts.audit.escapes.end_holders(&BTreeSet::new(), evidence);
        let mut clear_since = self.clear_since.lock();
        if used || found {
            *clear_since = None;
            return;
        }
        let since = *clear_since.get_or_insert_with(Instant::now);
        drop(clear_since);
        if since.elapsed() >= CLEAR {
            self.tell_all_gone();
        }
    }
}
