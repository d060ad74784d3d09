//! Frees: what is freed is taken out of the books after the driver did it.

use crate::ledger::{Client, Entry, Handle};
use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::case::retry::begin_on_lane;
use crate::monitor::calls::case::{Case, Over};
use crate::monitor::driver::monitor_client::Presence;
use crate::monitor::journal::call_id::{self};
use crate::rm::Meaning;
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;

pub(crate) fn free(case: &mut Case<'_>, client: u32, handle: u32) -> Result<Reply, Over> {
    let lane = begin_on_lane(case)?;
    let (of, object) = (Client(client), Handle(handle));
    let process = case.target()?.process;
    let mut books = case.books();
    books.note_user(client, process);
    let is_memory = books.ledger.charge_of(of, object).is_some();
    drop(books);
    case.slot.set_executing(call_id::CallObject::one(client, handle, true));
    let called = case.call();
    let mut status = case.status();
    // A client that is gone is no client.
    let is_client = handle == client;
    let is_gone = match status {
        NV_ERR_OBJECT_NOT_FOUND => true,
        NV_ERR_INVALID_CLIENT | NV_ERR_INVALID_OBJECT_HANDLE => is_client,
        _ => false,
    };
    let freed_before = case.asked_before && is_gone && (!is_client || is_no_client(case, client));
    if freed_before || case.retry.repeats && is_gone {
        // It was this call that freed it, when it was made before.
        case.patch(Meaning::Status, NV_OK.into());
    }
    if freed_before {
        // And the worker before didn't come to enter that.
        status = NV_OK;
    }
    called?;
    if status == NV_OK {
        let mut books = case.books();
        books.enter(Entry::Free { client: of, handle: object });
        if !is_memory {
            books.forget_freed_devices(client);
        }
        drop(books);
        case.parts.slices.forget_freed(client, handle);
        case.parts.stakes.free_stakes(&lane);
    }
    drop(lane);
    Ok(case.executed(None))
}

/// Whether the driver has no such client: by another's file it's told so of any.
fn is_no_client(case: &Case<'_>, client: u32) -> bool {
    case.parts.driver.presence(client, client) == Some(Presence::NoClient)
}
