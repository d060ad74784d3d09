//! The end of a container: nobody is left behind its listeners.
//!
//! What it has in the driver may be in others' hands, so they are looked for once more, and
//! only then the keeper is told.

use std::collections::BTreeSet;
use std::io;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::gate::wire::Notice;
use crate::monitor::audit::escaped_fds::Charge;
use crate::monitor::worker::Shared;
use crate::monitor::worker::facts::When;

const LAST_SEARCH: Duration = Duration::from_millis(100);

const QUIET: Duration = Duration::from_millis(400);

/// How long the keeper is kept waiting at most.
const LIMIT: Duration = Duration::from_secs(10);

impl Shared {
    /// Nobody is left behind a listener. The keeper is told, of the last one once nothing
    /// is left of the container in the driver.
    pub(crate) fn deserted(&'static self, number: u64) -> io::Result<()> {
        let abroad = &self.auditor.abroad;
        let others = !self.listeners.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
        if !others {
            self.tell_left_out(When::End);
        }
        let unseen = self.our_pids().is_empty() && !abroad.is_watched() && !self.exports.has_any();
        if others || unseen || abroad.is_unknown() {
            return self.keeper.tell(Notice::Gone { number });
        }
        let mut ending =
            self.auditor.ending.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        ending.push(number);
        drop(ending);
        self.auditor.wake();
        // The driver may keep the auditor for ever.
        let limited = self.spawn("end", move || {
            std::thread::sleep(LIMIT);
            if self.auditor.ending.is_under_way() {
                tracing::error!(
                    container = self.settings.short_id,
                    limit_s = LIMIT.as_secs(),
                    "the container is gone, and the driver still has memory of it: nobody was found who uses it"
                );
                self.tell_all_gone();
            }
        });
        if limited.is_err() {
            self.tell_all_gone();
        }
        Ok(())
    }

    fn tell_all_gone(&self) {
        let mut ending =
            self.auditor.ending.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        for number in std::mem::take(&mut *ending) {
            if let Err(error) = self.keeper.tell(Notice::Gone { number }) {
                self.finish(Err(error));
            }
        }
    }

    /// Looks after what is left of a container that is gone, and tells the keeper when
    /// nothing is.
    pub(crate) fn see_out(&self) {
        let abroad = &self.auditor.abroad;
        if !self.auditor.ending.is_under_way() {
            return;
        }
        if !self.listeners.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            // Somebody came after all.
            return self.tell_all_gone();
        }
        self.take_all_back();
        let mut pids = abroad.former();
        pids.extend(self.our_pids());
        let pids: Vec<u32> = pids.into_iter().collect();
        let used = self.figures(&pids).is_none_or(|(figures, _)| !figures.is_empty());
        let charge = if used { Charge::Theirs } else { Charge::Own };
        let due = abroad.since_search() >= LAST_SEARCH;
        let found = due && self.search(&BTreeSet::new(), charge);
        let mut quiet = self.auditor.ending.quiet.lock().unwrap_or_else(PoisonError::into_inner);
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
