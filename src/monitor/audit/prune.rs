//! Removes objects from the books that the driver does not have any more.
//!
//! The driver's figures tell how much memory there is, and not whose. So the driver is asked for clients and objects by
//! their handles. [`look`](crate::monitor::audit::look) decides when.

use std::collections::{BTreeMap, BTreeSet};

use crate::ledger::{Client, Entry, Handle};
use crate::monitor::audit::history::{AuditHistory, MOST_ASKED};
use crate::monitor::driver::{MonitorClient, Presence};
use crate::monitor::state::{ContainerState, Depth, OnLane};

/// Removes the ledger's objects on a GPU that are gone, where the driver shows less memory than the ledger.
///
/// The driver's figures alone don't tell which: the driver shows the memory of a client under the process that made
/// the client, which may be a dead process that was never seen. So the driver is asked for each client and for its
/// objects. An object that is there counts, whichever process has it.
pub(crate) fn remove_gone_objects(
    state: &ContainerState,
    history: &AuditHistory,
    _: &OnLane<'_>,
    own: &MonitorClient,
    gpu: usize,
    driver_bytes: u64,
) {
    let names = state.books().ledger.names(gpu);
    let names = history.in_turn(gpu, names);
    if !remove_gone_names(state, own, &names, Depth::Objects) {
        return;
    }
    let mut books = state.books();
    let Some(expected) = books.ledger.expected(gpu) else { return };
    let driver_bytes = driver_bytes.max(expected.charged_bytes);
    if driver_bytes < expected.usage.used_bytes {
        books.enter(Entry::Reconcile { gpu, driver_bytes });
    }
}

/// Enters as freed the objects of `names` that are gone. `false` where the driver can't tell.
///
/// Calls may be underway, so an object is removed only while its serial number is the one in `names`.
pub(crate) fn remove_gone_names(
    state: &ContainerState,
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
        // Where the client is there, the monitor saw each free of its objects, except by a call that was killed.
        let mut is_there = || {
            asked += 1;
            asked > MOST_ASKED || own.presence(client.0, handle.0) == Presence::There
        };
        if !there || depth == Depth::Objects && !is_there() {
            gone.push((client, handle, serial));
        }
    }
    let mut books = state.books();
    for (client, handle, serial) in gone {
        // Another object may have this handle now, even one of the same memory.
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
