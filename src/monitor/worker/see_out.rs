//! The end of a container: nobody is left behind its listeners.
//!
//! What it has in the driver may be in others' hands, so they are looked for once more, and
//! only then the keeper is told.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::gate::wire::Notice;
use crate::monitor::log::container_log::When;
use crate::monitor::processes::escaped_fds::Charge;
use crate::monitor::thread::spawn;
use crate::monitor::worker::Worker;

const LAST_SEARCH: Duration = Duration::from_millis(100);

const QUIET: Duration = Duration::from_millis(400);

/// How long the keeper is kept waiting at most.
const LIMIT: Duration = Duration::from_secs(10);

impl Worker {
    /// Whether a container is gone that the keeper isn't told of yet.
    pub(crate) fn is_ending(&self) -> bool {
        !self.ending.lock().is_empty()
    }

    /// Nobody is left behind a listener. The keeper is told, of the last one once nothing
    /// is left of the container in the driver.
    pub(crate) fn deserted(self: &Arc<Self>, number: u64) -> io::Result<()> {
        let escaped = &self.parts.processes.escaped;
        let others = !self.listeners.is_empty();
        if !others {
            self.parts.state.log.tell_left_out(When::End);
        }
        let unseen = self.parts.processes.our_pids().is_empty()
            && !escaped.is_watched()
            && !self.parts.exports.all.has_any();
        if others || unseen || escaped.is_unknown() {
            return self.keeper.tell(Notice::Gone { number });
        }
        self.ending.lock().push(number);
        self.parts.audit.deaths.ring();
        // The driver may keep the auditor for ever.
        let seen_out = Arc::clone(self);
        let limited = spawn("end", move || {
            std::thread::sleep(LIMIT);
            if seen_out.is_ending() {
                tracing::error!(
                    container = seen_out.parts.state.settings.short_id,
                    limit_s = LIMIT.as_secs(),
                    "the container is gone, and the driver still has memory of it: nobody was found who uses it"
                );
                seen_out.tell_all_gone();
            }
        });
        if limited.is_err() {
            self.tell_all_gone();
        }
        Ok(())
    }

    fn tell_all_gone(&self) {
        let mut ending = self.ending.lock();
        for number in std::mem::take(&mut *ending) {
            if let Err(error) = self.keeper.tell(Notice::Gone { number }) {
                self.finish(Err(error));
            }
        }
    }

    /// Looks after what is left of a container that is gone, and tells the keeper when
    /// nothing is.
    pub(crate) fn see_out(&self) {
        let escaped = &self.parts.processes.escaped;
        if !self.is_ending() {
            return;
        }
        if !self.listeners.is_empty() {
            // Somebody came after all.
            return self.tell_all_gone();
        }
        self.parts.exports.take_all_back();
        let mut pids = escaped.former();
        pids.extend(self.parts.processes.our_pids());
        let pids: Vec<u32> = pids.into_iter().collect();
        let used = self.parts.driver.figures(&pids).is_none_or(|(figures, _)| !figures.is_empty());
        let charge = if used { Charge::Theirs } else { Charge::Own };
        let due = escaped.since_search() >= LAST_SEARCH;
        let found = due && self.parts.processes.search(&BTreeSet::new(), charge);
        let mut quiet = self.quiet.lock();
        if used || found {
            *quiet = None;
            return;
        }
        let since = *quiet.get_or_insert_with(Instant::now);
        drop(quiet);
        if since.elapsed() >= QUIET {
            self.tell_all_gone();
        }
    }
}
