//! Takes stock: asks the driver for what the books have, and strikes out what is gone.
//!
//! Its figures say how much there is, and not whose; so clients are asked for, and objects, by
//! their handles. When that is done is not known here.

use std::collections::{BTreeMap, BTreeSet};

use crate::ledger::{Client, Entry, Handle};
use crate::monitor::audit::look::Audit;
use crate::monitor::audit::memory::MOST_ASKED;
use crate::monitor::driver::monitor_client::{MonitorClient, Presence};
use crate::monitor::state::lane::OnLane;
use crate::monitor::state::occasion::Depth;

impl Audit {
    /// Looks what of the ledger's is gone, where the driver shows less than that.
    ///
    /// Its figures alone don't tell: what a client holds is shown under the process that made it,
    /// which may be one that was never seen, and dead. So the driver is asked for each client, and
    /// for its objects, and what is there counts, whoever's it is.
    pub(crate) fn take_stock(
        &self,
        _: &OnLane<'_>,
        own: &MonitorClient,
        gpu: usize,
        driver_bytes: u64,
    ) {
        let names = self.state.books().ledger.names(gpu);
        let names = self.memory.in_turn(gpu, names);
        if !self.strike_out(own, &names, Depth::Objects) {
            return;
        }
        let mut books = self.state.books();
        let Some(expected) = books.ledger.expected(gpu) else { return };
        let driver_bytes = driver_bytes.max(expected.charged_bytes);
        if driver_bytes < expected.usage.used_bytes {
            books.enter(Entry::Reconcile { gpu, driver_bytes });
        }
    }

    /// Enters what of `names` is gone. Whether that can be told.
    ///
    /// Calls may be underway: a name is struck out only while it's the same.
    pub(crate) fn strike_out(
        &self,
        own: &MonitorClient,
        names: &[(Client, Handle, u32)],
        depth: Depth,
    ) -> bool {
        if names.is_empty() {
            return true;
        }
        if !own.can_tell() {
            return false;
        }
        let mut clients = BTreeMap::new();
        let mut gone = Vec::new();
        let mut asked = 0;
        for (client, handle, serial) in names.iter().copied() {
            let there = *clients
                .entry(client)
                .or_insert_with(|| own.presence(client.0, client.0) != Presence::NoClient);
            // Of a client that is there whatever is freed was seen, but for a call that was killed.
            let mut is_there = || {
                asked += 1;
                asked > MOST_ASKED || own.presence(client.0, handle.0) == Presence::There
            };
            if !there || depth == Depth::Objects && !is_there() {
                gone.push((client, handle, serial));
            }
        }
        let mut books = self.state.books();
        for (client, handle, serial) in gone {
            // What has this handle now may be another, of the same memory even.
            if books.ledger.serial_of(client, handle) == Some(serial) {
                books.enter(Entry::Free { client, handle });
            }
        }
        let charged = books.ledger.names_of_all().into_iter().map(|(client, ..)| client);
        let charged: BTreeSet<Client> = charged.collect();
        for (client, there) in clients {
            if !there && !charged.contains(&client) {
                books.enter(Entry::Free { client, handle: Handle(client.0) });
                books.devices.forget_client(client.0);
            }
        }
        true
    }
}
