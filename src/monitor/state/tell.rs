//! What the worker tells of its container: allocations over the quota, and processes that it ended.
//!
//! A program may ask for too much a million times a second. So each kind has a bucket, a refusal
//! beyond it costs a count, and the next event that is written says how many were left out. The
//! counts lie in the journal, so that they outlive the worker. Where a bucket has a token again, or
//! the container ends, and something was left out, the last refusal is told after all.

use std::sync::{Arc, PoisonError};

use crate::events::{Event, Kind};
use crate::gate::settings::Settings;
use crate::monitor::state::facts::{Facts, Refused, When, described};
use crate::monitor::state::journal_map::{JournalMap, LeftOut};
use crate::monitor::state::log_limit::LogLimit;
use crate::monitor::state::process_number::process_id;

/// What the host hears of the container, and the lines of the log that it may cause.
#[derive(Debug)]
pub(crate) struct ContainerLog {
    settings: Arc<Settings>,
    journal: &'static JournalMap,
    facts: Facts,
    /// Lines that what its programs do may cause.
    pub(crate) limit: LogLimit,
}

impl ContainerLog {
    pub(crate) fn new(settings: Arc<Settings>, journal: &'static JournalMap) -> Self {
        let facts = Facts::new(&settings);
        ContainerLog { settings, journal, facts, limit: LogLimit::new() }
    }

    /// An allocation was refused for the quota.
    pub(crate) fn refused_allocation(&self, refused: Refused) {
        let now_us = self.facts.now_us();
        let mut refusals = self.facts.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        if !refusals.bucket.take(now_us) {
            refusals.last = Some(refused);
            self.journal.leave_out(LeftOut::Refusals);
            return;
        }
        refusals.last = None;
        drop(refusals);
        let left_out = self.journal.take_left_out(LeftOut::Refusals);
        self.facts.teller.tell(Event { left_out, ..self.refusal(refused) });
    }

    /// Whether refusals were left out that nobody was told of.
    pub(crate) fn has_left_out(&self) -> bool {
        self.journal.has_left_out(LeftOut::Refusals)
    }

    /// Tells how many refusals were left out, where it's time for that.
    pub(crate) fn tell_left_out(&self, when: When) {
        if !self.has_left_out() {
            return;
        }
        let now_us = self.facts.now_us();
        let mut refusals = self.facts.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        if when == When::Due && !refusals.bucket.take(now_us) {
            return;
        }
        let last = refusals.last.take();
        drop(refusals);
        let left_out = self.journal.take_left_out(LeftOut::Refusals);
        let event = match last {
            // It was counted among them.
            Some(last) => Event { left_out: left_out.saturating_sub(1), ..self.refusal(last) },
            // A worker before knew more.
            None => Event { left_out, ..Event::new(Kind::AllocationRefused) },
        };
        self.facts.teller.tell(event);
    }

    fn refusal(&self, refused: Refused) -> Event {
        let gpu = self.settings.gpus.get(refused.gpu);
        let event = Event {
            gpu: gpu.map(|gpu| gpu.index),
            gpu_uuid: gpu.map(|gpu| gpu.uuid.clone()),
            asked_bytes: Some(refused.asked_bytes),
            used_bytes: Some(refused.usage.used_bytes),
            quota_bytes: Some(refused.usage.limit_bytes),
            ..Event::new(Kind::AllocationRefused)
        };
        match refused.process.map(process_id) {
            Some(process) if process.alive() => described(event, process.pid),
            Some(process) => event.by(process.pid, None, None),
            None => event,
        }
    }

    /// A process was ended: which, and for what reason, is in `event`.
    pub(crate) fn killed(&self, event: Event) {
        let now_us = self.facts.now_us();
        let mut bucket = self.facts.kills.lock().unwrap_or_else(PoisonError::into_inner);
        if !bucket.take(now_us) {
            return self.journal.leave_out(LeftOut::Kills);
        }
        drop(bucket);
        let left_out = self.journal.take_left_out(LeftOut::Kills);
        self.facts.teller.tell(Event { left_out, ..event });
    }
}
