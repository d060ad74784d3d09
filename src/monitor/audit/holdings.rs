//! What the container's processes hold on a GPU, as the driver says.
//!
//! Asked on the [lane](crate::monitor::state::lane), so that figures and books are of one moment: the driver rounds up what
//! it gives a call, and shows that before the call is back. Where a call doesn't leave the lane in time,
//! the driver is asked all the same: what that call gets may be missing in the books, and is no shield for
//! long: see [`Doubts`]. Knows no verdicts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::ledger::Process;
use crate::monitor::journal::process_number::process_id;
use crate::monitor::lock::Lock;
use crate::monitor::state::books::Books;
use crate::rm::about::Held;

/// How long it may look as if there were more than was asked for, while a call hangs.
pub(crate) const DOUBT: Duration = Duration::from_millis(400);

/// Numbers of processes that are dead.
#[derive(Debug, Default)]
pub(crate) struct DeadPids {
    /// Of processes that are forgotten: nobody has them.
    pub(crate) former: BTreeSet<u32>,
    /// Processes that are known, and whose numbers others have by now: what the driver shows there is
    /// those'.
    pub(crate) lost: BTreeSet<Process>,
}

impl DeadPids {
    /// Those under which the driver shows what is the container's.
    pub(crate) fn asked_for(&self, books: &Books) -> BTreeSet<u32> {
        let processes = books.processes.difference(&self.lost);
        let pids = processes.map(|process| process_id(*process).pid.cast_unsigned());
        // Somebody may have a client of those who are dead.
        pids.chain(self.former.iter().copied()).collect()
    }
}

/// What the driver said of a GPU.
#[derive(Debug)]
pub(crate) struct Holdings {
    pub(crate) held: Vec<Held>,
    /// What of the container's is ours by its stakes, in bytes.
    pub(crate) own_bytes: u64,
}

/// GPUs that seem to have more than was asked for while a call hangs, and since when.
#[derive(Debug, Default)]
pub(crate) struct Doubts(Lock<BTreeMap<usize, Instant>>);

impl Doubts {
    /// Takes note that it seems so: whether it has for too long.
    pub(crate) fn note(&self, gpu: usize) -> bool {
        let mut all = self.0.lock();
        all.entry(gpu).or_insert_with(Instant::now).elapsed() > DOUBT
    }

    /// It doesn't any more.
    pub(crate) fn dispel(&self, gpu: usize) {
        self.0.lock().remove(&gpu);
    }
}
