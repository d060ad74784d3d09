//! The monitor's client of the driver outlives its worker, once something of it shall: the keeper has its files, too.
//!
//! Else its objects would go at the worker's end, and with them the stakes, before whose memory nothing would stand any
//! more. But the driver shows a client in the figures of the process that made it, whose pid may be another process's by
//! then. So the next worker makes a client of its own, puts a duplicate of each stake in that stake's place, and ends the
//! client of the worker before. It does so before it answers any call: where the driver hangs over a stake, the container's
//! calls wait until the driver answers, as they do behind a call that hangs on the lane.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::ledger::{Entry, StakePlace};
use crate::monitor::driver::monitor_client::{MonitorClient, handle_of, known, of_client};
use crate::monitor::driver::stakes::Stakes;
use crate::monitor::journal::kept_file::KeptFile;
use crate::monitor::node::device::Device;

/// A stake in the books: what it stands before, the GPU of its memory, and its number.
type Stake = (StakePlace, usize, u64);

/// The client of the monitor that a stake is of.
fn client_of((_, _, own): &Stake) -> u32 {
    (own >> 32) as u32
}

impl Stakes {
    /// The keeper hands over a file of a client of a worker before.
    pub(crate) fn take_over_client_file(&self, client: u32, place: u8, file: OwnedFd) {
        self.former_clients.lock().entry(client).or_default().insert(place, file);
    }

    /// Puts stakes of this worker's client in the places of those of workers before, and ends the clients of these.
    pub(crate) fn take_over(&self) {
        let stakes: Vec<Stake> = self.state.books().ledger.stakes().collect();
        // Of some clients the keeper has no files: a worker couldn't tell the keeper, say.
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
                    let own = known(&own, successor);
                    self.state.books().enter(Entry::Stake { before: stake.0, number: own });
                }
            }
            former.end();
        }
        let (first, last) = of_client(client);
        self.state.books().enter(Entry::RemoveStakes { first, last });
        for place in files.into_keys() {
            // Where the keeper can't be told, it is told that the worker is gone in a moment.
            let _ = self.keeper.tell(KeptFile::Client { client, place }.let_go());
        }
    }

    /// A duplicate of a stake of a worker before, if that one stands before something. `None` where the driver makes none.
    fn successor(
        &self,
        former: &MonitorClient,
        (before, gpu, own): &Stake,
    ) -> Option<(Arc<MonitorClient>, u32)> {
        let handle = handle_of(former, *own)?;
        if matches!(before, StakePlace::Loose { .. }) {
            return None;
        }
        let own = self.driver.kept_client()?;
        let successor = own.borrow(&former.rm(), (former.client, handle), Some(*gpu)).ok()?;
        Some((own, successor))
    }
}
