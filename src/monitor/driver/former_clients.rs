//! Former workers' clients, and how their stakes are taken over.
//!
//! Before a worker's client gets its first stake, the keeper gets the client's files. Otherwise the client's objects
//! would be freed at the worker's end, and nothing would stand before the memory of its stakes. But the driver shows a
//! client in the figures of the process that made it, and its pid may be another process's after the worker's end. So
//! the next worker makes a client of its own, puts a duplicate of each stake in that stake's place, and ends the former
//! client. The worker does so before it answers any call and before it audits: until then the stakes are in the figure
//! of no process that an audit asks for. Where the driver hangs over a stake, the container's calls wait until the
//! driver answers, as they do behind a call that hangs on the lane.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::ledger::{Entry, StakePlace};
use crate::monitor::driver::access::DriverAccess;
use crate::monitor::driver::monitor_client::{MonitorClient, handle_of, stake_of, stakes_of};
use crate::monitor::journal::KeptFile;
use crate::monitor::lock::Lock;
use crate::monitor::node::Device;

/// A stake in the books: what it stands before, the GPU of its memory, and its number.
type Stake = (StakePlace, usize, u64);

/// The monitor's client that has the stake.
fn client_of((_, _, number): &Stake) -> u32 {
    (number >> 32) as u32
}

/// The files of former workers' clients, by client and place. The first file of a client is its control file.
#[derive(Debug, Default)]
pub(crate) struct FormerClients {
    files: Lock<BTreeMap<u32, BTreeMap<u8, OwnedFd>>>,
}

impl FormerClients {
    /// Keeps a file of a former worker's client, which the keeper hands over.
    pub(crate) fn keep(&self, client: u32, place: u8, file: OwnedFd) {
        self.files.lock().entry(client).or_default().insert(place, file);
    }

    /// Puts stakes of this worker's client in the places of former workers' stakes, and ends the former clients.
    pub(crate) fn take_over(&self, driver: &DriverAccess) {
        let stakes: Vec<Stake> = driver.state.books().ledger.stakes().collect();
        let mut files = std::mem::take(&mut *self.files.lock());
        // The keeper may have no files of a client that has stakes: the worker couldn't reach the keeper, say.
        let mut clients: BTreeSet<u32> = stakes.iter().map(client_of).collect();
        clients.extend(files.keys());
        for client in clients {
            let stakes = stakes.iter().filter(|of| client_of(of) == client);
            take_over_from(driver, client, files.remove(&client).unwrap_or_default(), stakes);
        }
    }
}

/// Takes over the stakes of one client, whose files are `files`.
fn take_over_from<'a>(
    driver: &DriverAccess,
    client: u32,
    files: BTreeMap<u8, OwnedFd>,
    stakes: impl Iterator<Item = &'a Stake>,
) {
    let control = files.values().next().and_then(|control| control.try_clone().ok());
    let control = control.and_then(|control| Device::of(&driver.state.settings.nodes, control));
    if let Some(control) = control {
        let former = MonitorClient::former(control, client, &driver.state.release);
        for stake in stakes {
            if let Some((own, successor)) = successor(driver, &former, stake) {
                let number = stake_of(&own, successor);
                driver.state.books().enter(Entry::Stake { before: stake.0, number });
            }
        }
        former.end();
    }
    let (first, last) = stakes_of(client);
    driver.state.books().enter(Entry::RemoveStakes { first, last });
    for place in files.into_keys() {
        // Where this fails, the keeper is told in a moment that the worker is gone.
        let _ = driver.keeper.tell(KeptFile::Client { client, place }.let_go());
    }
}

/// Duplicates a former worker's stake. `None` where the stake stands before nothing, or the driver refuses.
fn successor(
    driver: &DriverAccess,
    former: &MonitorClient,
    (before, gpu, number): &Stake,
) -> Option<(Arc<MonitorClient>, u32)> {
    let handle = handle_of(former, *number)?;
    if matches!(before, StakePlace::Loose { .. }) {
        return None;
    }
    let own = driver.kept_client()?;
    let new = own.duplicate_from(&former.rm(), (former.client, handle), Some(*gpu)).ok()?;
    Some((own, new))
}
