//! `NV_ESC_RM_FREE`: has the driver free an object, and then takes the object out of the books.

use crate::ledger::{Client, Entry, Handle};
use crate::monitor::caller::Reply;
use crate::monitor::calls::case::retry::begin_on_lane;
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::identify::note_user;
use crate::monitor::driver::Presence;
use crate::monitor::journal::CallObject;
use crate::rm::Meaning;
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;

pub(crate) fn free(case: &mut Case<'_>, client: u32, handle: u32) -> Result<Reply, EarlyReply> {
    let lane = begin_on_lane(case)?;
    let (of, object) = (Client(client), Handle(handle));
    note_user(case, client)?;
    let is_memory = case.books().ledger.charge_of(of, object).is_some();
    case.slot.set_executing(CallObject::one(client, handle, true));
    let called = case.call();
    let mut status = case.status();
    // The pair of statuses says that the client is missing: the object is gone where it is the client itself.
    let is_client = handle == client;
    let is_gone = match status {
        NV_ERR_OBJECT_NOT_FOUND => true,
        NV_ERR_INVALID_CLIENT | NV_ERR_INVALID_OBJECT_HANDLE => is_client,
        _ => false,
    };
    let freed_before = case.asked_before && is_gone && (!is_client || is_no_client(case, client));
    if freed_before || case.retry.repeats && is_gone {
        // This call freed the object when it was made before.
        case.patch(Meaning::Status, NV_OK.into());
    }
    if freed_before {
        // The worker before ended before it took the object out of the books.
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

/// Whether the driver has no such client. The call's status doesn't tell: on a file that isn't the client's, the driver
/// says the same of any client.
fn is_no_client(case: &Case<'_>, client: u32) -> bool {
    case.parts.driver.presence(client, client) == Some(Presence::NoClient)
}
