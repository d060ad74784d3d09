//! What the container's processes hold on a GPU, as the driver says.
//!
//! Asked on the [lane](super::lane), so that figures and books are of one moment: the driver rounds up what
//! it gives a call, and shows that before the call is back. Where a call doesn't leave the lane in time,
//! the driver is asked all the same: what that call gets may be missing in the books, and is no shield for
//! long: see [`Doubts`]. Knows no verdicts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Shared;
use super::books::Books;
use super::lane::OnLane;
use super::own::Own;
use super::target::process_id;
use super::unanswered::Amount;
use crate::gate::audit::Named;
use crate::ledger::Process;
use crate::rm::about::Held;

/// How long it may look as if there were more than was asked for, while a call hangs.
pub(super) const DOUBT: Duration = Duration::from_millis(400);

/// Numbers of processes that are dead.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    /// Of processes that are forgotten: nobody has them.
    pub(super) former: BTreeSet<u32>,
    /// Processes that are known, and whose numbers others have by now: what the driver shows there is
    /// those'.
    pub(super) lost: BTreeSet<Process>,
}

impl Numbers {
    /// Those under which the driver shows what is the container's.
    fn asked_for(&self, books: &Books) -> BTreeSet<u32> {
        let processes = books.processes.difference(&self.lost);
        let pids = processes.map(|process| process_id(*process).pid.cast_unsigned());
        // Somebody may have a client of those who are dead.
        pids.chain(self.former.iter().copied()).collect()
    }
}

/// What the driver said of a GPU.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) held: Vec<Held>,
    /// What of the container's is ours by its stakes, in bytes.
    pub(super) own_bytes: u64,
    /// The names that there were, where any show that aren't their makers', and nobody else was on the lane.
    pub(super) named: Option<Named>,
}

/// GPUs that seem to have more than was asked for while a call hangs, and since when.
#[derive(Debug, Default)]
pub(super) struct Doubts(Mutex<BTreeMap<usize, Instant>>);

impl Doubts {
    /// Whether it has seemed so for too long.
    pub(super) fn last(&self, gpu: usize) -> bool {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.entry(gpu).or_insert_with(Instant::now).elapsed() > DOUBT
    }

    /// It doesn't any more.
    pub(super) fn dispel(&self, gpu: usize) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&gpu);
    }
}

impl Shared {
    /// What the driver says of the container's processes, and those before them. `None` of the lane is
    /// that a call hangs on it.
    pub(super) fn ask(
        &self,
        lane: Option<&OnLane<'_>>,
        own: &Own,
        gpu: usize,
        numbers: &Numbers,
    ) -> Option<Found> {
        // All of one moment: a process that came and took memory after the list was made would be missing
        // in the driver's figure, and what it holds be taken for given back.
        let (pids, named) = {
            let mut books = self.books();
            books.ledger.watch();
            let shows_names = self.auditor.names.show() && lane.is_some();
            let named = shows_names.then(|| books.named(gpu));
            // Ours first: memory becomes ours, and never somebody else's again.
            let ours = books.ledger.has_stakes().then(std::process::id);
            let pids: Vec<u32> = ours.into_iter().chain(numbers.asked_for(&books)).collect();
            (pids, named)
        };
        let held = own.held(&self.release, gpu, &pids);
        let held = self.answered(gpu, Amount::Held, held)?;
        let (ours, held): (Vec<Held>, Vec<Held>) =
            held.into_iter().partition(|held| held.pid == std::process::id());
        let own_bytes = ours.iter().fold(0_u64, |sum, held| sum.saturating_add(held.made_bytes));
        Some(Found { held, own_bytes, named })
    }
}
