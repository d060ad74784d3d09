//! Takes over the stakes of a former worker's client.
//!
//! Before a worker's client gets its first stake, the keeper gets the client's files. Otherwise the client's objects
//! would be freed at the worker's end, and nothing would stand before the memory of its stakes. But the driver shows a
//! client in the figures of the process that made it, and its pid may be another process's after the worker's end. So
//! the next worker makes a client of its own, puts a duplicate of each stake in that stake's place, and ends the former
//! client. The worker does so before it answers any call and before it audits: until then the stakes are in the figure
//! of no process that an audit asks for. Where the driver hangs over a stake, the container's calls wait until the
//! driver answers, as they do behind a call that hangs on the lane.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::ledger::{Entry, StakePlace};
use crate::monitor::driver::monitor_client::{MonitorClient, handle_of, stake_of, stakes_of};
use crate::monitor::driver::stakes::Stakes;
use crate::monitor::journal::KeptFile;
use crate::monitor::node::Device;

/// A stake in the books: what it stands before, the GPU of its memory, and its number.
type Stake = (StakePlace, usize, u64);

/// The monitor's client that has the stake.
fn client_of((_, _, number): &Stake) -> u32 {
    (number >> 32) as u32
}

impl Stakes {
    /// Keeps a file of a former worker's client, which the keeper hands over.
    pub(crate) fn take_over_client_file(&self, client: u32, place: u8, file: OwnedFd) {
        self.former_clients.lock().entry(client).or_default().insert(place, file);
    }

    /// Puts stakes of this worker's client in the places of former workers' stakes, and ends the former clients.
    pub(crate) fn take_over(&self) {
        let stakes: Vec<Stake> = self.state.books().ledger.stakes().collect();
        // The keeper may have no files of a client that has stakes: the worker couldn't reach the keeper, say.
        let mut clients: BTreeSet<u32> = stakes.iter().map(client_of).collect();
        clients.extend(self.former_clients.lock().keys());
        for client in clients {
            self.take_over_from(client, stakes.iter().filter(|of| client_of(of) == client));
        }
    }

    fn take_over_from<'a>(&self, client: u32, stakes: impl Iterator<Item = &'a Stake>) {
        let files = self.former_clients.lock().remove(&client).unwrap_or_default();
        let control = files.values().next().and_then(|control| control.try_clone().ok());
        let control = control.and_then(|control| Device::of(&self.state.settings.nodes, control));
        if let Some(control) = control {
            let former = MonitorClient::former(control, client, &self.state.release);
            for stake in stakes {
                if let Some((own, successor)) = self.successor(&former, stake) {
                    let number = stake_of(&own, successor);
                    self.state.books().enter(Entry::Stake { before: stake.0, number });
                }
            }
            former.end();
        }
        let (first, last) = stakes_of(client);
        self.state.books().enter(Entry::RemoveStakes { first, last });
        for place in files.into_keys() {
            // Where this fails, the keeper is told in a moment that the worker is gone.
            let _ = self.keeper.tell(KeptFile::Client { client, place }.let_go());
        }
    }

    /// Duplicates a former worker's stake. `None` where the stake stands before nothing, or the driver refuses.
    fn successor(
        &self,
        former: &MonitorClient,
        (before, gpu, number): &Stake,
    ) -> Option<(Arc<MonitorClient>, u32)> {
        let handle = handle_of(former, *number)?;
        if matches!(before, StakePlace::Loose { .. }) {
            return None;
        }
        let own = self.driver.kept_client()?;
        let new = own.duplicate_from(&former.rm(), (former.client, handle), Some(*gpu)).ok()?;
        Some((own, new))
    }
}
