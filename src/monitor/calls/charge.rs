//! Charges memory before the driver gives it.
//!
//! [`make_charged`] reserves the memory in the books, asks the driver, and enters what the driver gave. So the driver
//! never has more than the books, except for what it rounds up: the quota is checked again after the entry.

use crate::ledger::{Client, Entry, Handle, LedgerError, Reservation, Usage};
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::gpu_lookup::find_gpu_on_lane;
use crate::monitor::calls::handles::{NewObject, make, undo_former_attempt, unmake};
use crate::monitor::driver::Presence;
use crate::monitor::journal::SetAside;
use crate::monitor::state::{Books, OnLane};
use crate::rm::Answer;
use crate::rm::call::Object;
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;
use std::time::Instant;

/// The bytes of a page: memory is charged in whole pages.
const PAGE_BYTES: u64 = 4096;

/// Refuses memory below an object that isn't of a GPU of the container, as the driver does.
pub(crate) fn refuse_without_gpu(case: &mut Case<'_>, object: Object) -> EarlyReply {
    let Object { client, parent, .. } = object;
    case.log(&format!("memory below {parent:#x} of client {client:#x}, which is no GPU's"));
    case.answer(Answer::Status(NV_ERR_INVALID_OBJECT_PARENT))
}

/// Reserves memory. Where the quota has no room, asks the driver what the container has, and tries once more.
fn reserve(
    case: &mut Case<'_>,
    lane: &mut OnLane<'_>,
    memory: SetAside,
) -> Result<Reservation, EarlyReply> {
    let SetAside { gpu, bytes, .. } = memory;
    let mut asked = false;
    loop {
        let mut books = case.parts.state.books();
        // The worker before may have reserved memory for this call: the driver gave none, or what it gave is freed.
        books.cancel_former_reservation();
        match books.ledger.reserve(gpu, bytes) {
            Ok(reservation) => {
                case.slot.set_aside(Some(memory));
                return Ok(reservation);
            }
            Err(LedgerError::OverQuota { usage, .. }) if !asked && bytes <= usage.limit_bytes => {
                drop(books);
                asked = true;
                case.parts.audit.reconcile(lane, case.came);
            }
            Err(LedgerError::OverQuota { usage, .. }) => {
                drop(books);
                return Err(case.over_quota((gpu, bytes), usage));
            }
            Err(error) => {
                drop(books);
                case.log(&error.to_string());
                return Err(case.answer(Answer::Status(NV_ERR_NO_MEMORY)));
            }
        }
    }
}

/// Makes an object, and charges its memory where it takes some: checks that the memory fits the quota, asks the driver,
/// and enters what the driver gave. No other function grants an allocation of the resource manager's.
///
/// `memory` is the GPU and the bytes that are asked for. `given` reads from the copies how many bytes the driver gave.
/// `None` where the driver made no object, and the call's struct says why.
pub(crate) fn make_charged(
    case: &mut Case<'_>,
    lane: &mut OnLane<'_>,
    new_object: NewObject,
    memory: Option<(usize, u64)>,
    given: impl Fn(&Case<'_>) -> Option<u64>,
) -> Result<Option<Object>, EarlyReply> {
    let object = new_object.object;
    if case.retry.repeats && exists(case, object) {
        let duplicate = Answer::Status(NV_ERR_INSERT_DUPLICATE_NAME);
        return Err(case.answer(duplicate));
    }
    undo_former_attempt(case, lane, object);
    let Some((gpu, asked_bytes)) = memory else {
        let made = make(case, new_object)?;
        return Ok(made.map(|handle| note_made(case, object, handle)));
    };
    let asked_bytes = asked_bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
    let memory = SetAside { gpu, bytes: asked_bytes, client: object.client };
    let reservation = reserve(case, lane, memory)?;
    // Other calls may have been on the lane while this one waited for an audit.
    if find_gpu_on_lane(case, lane, object.client, object.parent) != Some(gpu) {
        case.books().ledger.cancel(reservation);
        case.slot.set_aside(None);
        case.log("memory below an object that was freed, or made anew, meanwhile");
        return Err(case.answer(Answer::Status(NV_ERR_OBJECT_NOT_FOUND)));
    }
    let made = make(case, new_object);
    let given_bytes = given(case).unwrap_or(asked_bytes).max(asked_bytes);
    let mut books = case.books();
    books.ledger.cancel(reservation);
    let Ok(Some(handle)) = made else {
        case.slot.set_aside(None);
        return made.map(|_| None);
    };
    let (client, parent) = (Client(object.client), Handle(object.parent));
    let entry = Entry::Commit { gpu, bytes: given_bytes, client, parent, handle: Handle(handle) };
    books.enter(entry);
    case.slot.set_aside(None);
    // The driver rounds up, maybe beyond the quota.
    let exceeds_quota = |books: &Books| {
        books.ledger.usage(gpu).is_none_or(|usage| usage.used_bytes > usage.limit_bytes)
    };
    let mut is_over = exceeds_quota(&books);
    let serial = books.ledger.serial_of(client, Handle(handle));
    drop(books);
    if is_over {
        // Without an audit, memory that the driver showed before it was entered may count twice.
        case.parts.audit.reconcile(lane, Instant::now());
        is_over = exceeds_quota(&case.books());
    }
    if is_over {
        // Other calls may have been on the lane meanwhile, and may have freed the object.
        if case.books().ledger.serial_of(client, Handle(handle)) == serial {
            unmake(case, lane, object.client, object.parent, handle);
        }
        let usage = case.books().ledger.usage(gpu);
        let usage = usage.unwrap_or(Usage { limit_bytes: 0, used_bytes: 0 });
        return Err(case.over_quota((gpu, given_bytes), usage));
    }
    Ok(Some(Object { client: object.client, parent: object.parent, handle }))
}

/// Whether an object exists, as the books and the driver say.
fn exists(case: &Case<'_>, Object { client, handle, .. }: Object) -> bool {
    let known = case.books().ledger.contains(Client(client), Handle(handle));
    known && case.parts.driver.presence(client, handle) == Some(Presence::There)
}

/// Enters an object without memory that was made, where the books have an object with its handle.
fn note_made(case: &Case<'_>, object: Object, handle: u32) -> Object {
    let mut books = case.books();
    // The object that had the handle before is gone.
    if books.ledger.contains(Client(object.client), Handle(handle)) {
        books.note(object.client, object.parent, handle);
    }
    Object { client: object.client, parent: object.parent, handle }
}
