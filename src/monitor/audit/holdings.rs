//! The driver's figures of the container's processes. [`judge`](crate::monitor::audit::judge) judges them.
//!
//! The driver is asked on the [lane](crate::monitor::state::Lane), so that figures and books are of one moment: the
//! driver rounds up the memory that it gives a call, and shows that memory before the call is back. Where a call
//! doesn't leave the lane in time, the driver is asked all the same. The memory that such a call gets may be missing
//! in the books, so an excess is tolerated, but not for long ([`Doubts`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::ledger::Process;
use crate::monitor::lock::Lock;
use crate::monitor::state::Books;
use crate::rm::about::Held;

/// How long a GPU may show more memory than was asked for while a call hangs.
const DOUBT: Duration = Duration::from_millis(400);

/// The pids of dead processes.
#[derive(Debug, Default)]
pub(crate) struct DeadPids {
    /// The pids of forgotten processes that no process has now.
    pub(crate) former: BTreeSet<u32>,
    /// Dead processes in the books whose pids other processes have now. The memory that the driver shows under such a
    /// pid is the other process's.
    pub(crate) reused: BTreeSet<Process>,
}

impl DeadPids {
    /// The pids under which the driver shows the container's memory.
    pub(crate) fn pids_to_ask(&self, books: &Books) -> BTreeSet<u32> {
        let processes = books.processes.difference(&self.reused);
        let pids = processes.map(|process| process.pid());
        // A living process may have a client of a forgotten process.
        pids.chain(self.former.iter().copied()).collect()
    }
}

/// The driver's figures of a GPU.
#[derive(Debug)]
pub(crate) struct Holdings {
    pub(crate) held: Vec<Held>,
    /// The memory of the container that is in the monitor's figure, because of stakes, in bytes.
    pub(crate) own_bytes: u64,
}

/// The GPUs that show more memory than was asked for while a call hangs, and since when.
#[derive(Debug, Default)]
pub(crate) struct Doubts(Lock<BTreeMap<usize, Instant>>);

impl Doubts {
    /// Notes that a GPU shows more. `true` where it has done so for longer than [`DOUBT`].
    pub(crate) fn note(&self, gpu: usize) -> bool {
        let mut all = self.0.lock();
        all.entry(gpu).or_insert_with(Instant::now).elapsed() > DOUBT
    }

    /// Notes that a GPU shows no more than was asked for.
    pub(crate) fn clear(&self, gpu: usize) {
        self.0.lock().remove(&gpu);
    }
}
