//! Asks the driver what the container's processes hold on a GPU.

use crate::monitor::audit::holdings::{DeadPids, Holdings};
use crate::monitor::audit::look::Audit;
use crate::monitor::driver::monitor_client::MonitorClient;
use crate::monitor::driver::unanswered::Amount;
use crate::monitor::state::lane::OnLane;
use crate::rm::about::Held;

impl Audit {
    /// What the driver says of the container's processes, and those before them. `None` of the lane is
    /// that a call hangs on it.
    pub(crate) fn ask(
        &self,
        lane: Option<&OnLane<'_>>,
        own: &MonitorClient,
        gpu: usize,
        numbers: &DeadPids,
    ) -> Option<Holdings> {
        // All of one moment: a process that came and took memory after the list was made would be missing
        // in the driver's figure, and what it holds be taken for given back.
        let (pids, named) = {
            let mut books = self.state.books();
            books.ledger.watch();
            let shows_names = self.memory.names.show() && lane.is_some();
            let named = shows_names.then(|| books.named(gpu));
            // Ours first: memory becomes ours, and never somebody else's again.
            let ours = books.ledger.has_stakes().then(std::process::id);
            let pids: Vec<u32> = ours.into_iter().chain(numbers.asked_for(&books)).collect();
            (pids, named)
        };
        let held = own.held(gpu, &pids);
        let held = self.driver.answered(gpu, Amount::Held, held)?;
        let (ours, held): (Vec<Held>, Vec<Held>) =
            held.into_iter().partition(|held| held.pid == std::process::id());
        let own_bytes = ours.iter().fold(0_u64, |sum, held| sum.saturating_add(held.made_bytes));
        Some(Holdings { held, own_bytes, named })
    }
}
