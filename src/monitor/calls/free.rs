//! `NV_ESC_RM_FREE`: has the driver free an object, and then takes the object out of the books.

use crate::ledger::{Client, Entry, Handle};
use crate::monitor::caller::Reply;
use crate::monitor::calls::case::retry::begin_on_lane;
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::identify::note_user;
use crate::monitor::decide::{Earlier, freed};
use crate::monitor::driver::Presence;
use crate::monitor::journal::CallObject;
use crate::rm::Meaning;

pub(crate) fn free(case: &mut Case<'_>, client: u32, handle: u32) -> Result<Reply, EarlyReply> {
    let lane = begin_on_lane(case)?;
    let (of, object) = (Client(client), Handle(handle));
    note_user(case, client)?;
    let is_memory = case.books().ledger.charge_of(of, object).is_some();
    case.slot.set_executing(CallObject::one(client, handle, true));
    let called = case.call();
    let (asked_before, repeats) = (case.asked_before, case.retry.repeats);
    let earlier = Earlier { asked_before, repeats };
    let freed = freed(case.status(), handle == client, earlier, || is_no_client(case, client));
    case.patch(Meaning::Status, freed.status.into());
    called?;
    if freed.is_done {
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

/// Whether the driver has no such client.
fn is_no_client(case: &Case<'_>, client: u32) -> bool {
    case.parts.driver.presence(client, client) == Some(Presence::NoClient)
}
