//! `NV_ESC_RM_FREE`: has the driver free an object, and then takes the object out of the books.

use crate::ledger::{Client, Entry, Handle};
use crate::monitor::caller::Reply;
use crate::monitor::calls::case::retry::begin_on_lane;
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::identify::note_user;
use crate::rm::Meaning;
use crate::rm::number::{
    NV_ERR_INVALID_CLIENT, NV_ERR_INVALID_OBJECT_HANDLE, NV_ERR_OBJECT_NOT_FOUND, NV_OK,
};

pub(crate) fn free(case: &mut Case<'_>, client: u32, handle: u32) -> Result<Reply, EarlyReply> {
    let lane = begin_on_lane(case)?;
    let (of, object) = (Client(client), Handle(handle));
    note_user(case, client)?;
    let is_memory = case.books().ledger.charge_of(of, object).is_some();
    case.call()?;
    let is_done = case.status() == NV_OK;
    let is_gone = match case.status() {
        NV_ERR_OBJECT_NOT_FOUND => true,
        NV_ERR_INVALID_CLIENT | NV_ERR_INVALID_OBJECT_HANDLE => handle == client,
        _ => false,
    };
    if case.retry.repeats && is_gone {
        // The first time freed it, and the books know.
        case.patch(Meaning::Status, NV_OK.into());
    }
    if is_done {
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
