//! Makes objects, and charges their memory before the driver gives it.
//!
//! [`make_charged`] reserves the memory in the books, asks the driver, and enters what the driver gave. So the driver
//! never has more than the books, except for what it rounds up: the quota is checked again after the entry.
//!
//! [`make`] has the driver make an object, under a handle that the caller or the monitor chooses.

use std::time::Instant;

use crate::ledger::{Client, Entry, Handle, Reservation, Usage};
use crate::monitor::calls::case::{Case, EarlyReply, tell_refused};
use crate::monitor::calls::gpu_lookup::{find_gpu_on_lane, gpu_of_file};
use crate::monitor::calls::identify::note_user;
use crate::monitor::decide::{self, Denial, nth_handle};
use crate::monitor::driver::Presence;
use crate::monitor::log::Refuser;
use crate::monitor::state::{Books, OnLane};
use crate::rm::call::Object;
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;
use crate::rm::{Answer, Layout, Meaning};

/// An object that is to be made, and where the call's struct has its handle.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewObject {
    pub(crate) object: Object,
    /// The part of the struct that has the handle; `None` where the struct has the handle itself.
    pub(crate) part: Option<&'static Layout>,
}

/// How many handles the monitor tries before it lets the driver choose one.
const TRIES: u32 = 4;

/// Reserves memory for an object on the GPU above it, and notes that the caller uses the client. If the quota has no
/// room, asks the driver what the container has, and tries once more. Returns the GPU's place in the container's order.
fn reserve(
    case: &mut Case<'_>,
    lane: &mut OnLane<'_>,
    Object { client, parent, .. }: Object,
    bytes: u64,
) -> Result<(usize, Reservation), EarlyReply> {
    let (process, of_file) = (case.target()?.process, gpu_of_file(case));
    let reserve =
        |books: &mut Books, gpu| (gpu, decide::reserve_within_quota(&mut books.ledger, gpu, bytes));
    let mut books = case.books();
    books.note_user(client, process);
    let known = books.devices.gpu(client, parent).or(of_file);
    let decided = known.map(|gpu| reserve(&mut books, gpu));
    drop(books);
    let (gpu, mut decision) = match decided {
        Some(decided) => decided,
        None => match find_gpu_on_lane(case, lane, client, parent) {
            Some(gpu) => reserve(&mut case.books(), gpu),
            None => return Err(case.deny(&Denial::NoGpu { client, parent })),
        },
    };
    if let Err(Denial::OverQuota { usage, .. }) = decision
        && bytes <= usage.limit_bytes
    {
        case.parts.audit.reconcile(lane, case.came);
        // Other calls may have been on the lane meanwhile.
        if find_gpu_on_lane(case, lane, client, parent) != Some(gpu) {
            return Err(case.deny(&Denial::ParentGone));
        }
        (_, decision) = reserve(&mut case.books(), gpu);
    }
    Ok((gpu, case.or_deny(decision)?))
}

/// Makes an object, and charges its memory where it takes some: checks that the memory fits the quota, asks the driver,
/// and enters what the driver gave. No other function grants an allocation of the resource manager's.
///
/// `asked_bytes` is what the object takes, if it takes memory. `given` reads from the copies how many bytes the driver
/// gave. Notes that the caller uses the client. `None` where the driver made no object, and the call's struct says why.
pub(crate) fn make_charged(
    case: &mut Case<'_>,
    lane: &mut OnLane<'_>,
    new_object: NewObject,
    asked_bytes: Option<u64>,
    given: impl Fn(&Case<'_>) -> Option<u64>,
) -> Result<Option<Object>, EarlyReply> {
    let object = new_object.object;
    if case.retry.repeats && exists(case, object) {
        let duplicate = Answer::Status(NV_ERR_INSERT_DUPLICATE_NAME);
        return Err(case.answer(duplicate));
    }
    let Some(asked_bytes) = asked_bytes.map(decide::charged_bytes) else {
        note_user(case, object.client)?;
        let made = make(case, new_object)?;
        return Ok(made.map(|handle| note_made(case, object, handle)));
    };
    let (gpu, reservation) = reserve(case, lane, object, asked_bytes)?;
    let made = make(case, new_object);
    let given_bytes = given(case).unwrap_or(asked_bytes).max(asked_bytes);
    let mut books = case.books();
    books.ledger.cancel(reservation);
    let Ok(Some(handle)) = made else {
        let usage = books.ledger.usage(gpu);
        drop(books);
        if let (Ok(None), NV_ERR_NO_MEMORY, Some(usage)) = (&made, case.status(), usage) {
            tell_refused(case, Refuser::Driver, gpu, asked_bytes, usage);
        }
        return made.map(|_| None);
    };
    let (client, parent) = (Client(object.client), Handle(object.parent));
    let entry = Entry::Commit { gpu, bytes: given_bytes, client, parent, handle: Handle(handle) };
    books.enter(entry);
    let is_within = |books: &Books| decide::is_within_quota(&books.ledger, gpu);
    let mut is_granted = is_within(&books);
    let serial = books.ledger.serial_of(client, Handle(handle));
    drop(books);
    if !is_granted {
        // Without an audit, memory that the driver showed before it was entered may count twice.
        case.parts.audit.reconcile(lane, Instant::now());
        is_granted = is_within(&case.books());
    }
    if !is_granted {
        // Other calls may have been on the lane meanwhile, and may have freed the object.
        if case.books().ledger.serial_of(client, Handle(handle)) == serial {
            unmake(case, lane, object.client, object.parent, handle);
        }
        let usage = case.books().ledger.usage(gpu);
        let usage = usage.unwrap_or(Usage { limit_bytes: 0, used_bytes: 0 });
        return Err(case.deny(&Denial::OverQuota { gpu, asked_bytes: given_bytes, usage }));
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

/// Asks the driver to make an object, and returns the handle that the object got; `None` where the driver made none,
/// and the struct says why.
pub(crate) fn make(case: &mut Case<'_>, new_object: NewObject) -> Result<Option<u32>, EarlyReply> {
    let NewObject { object, part } = new_object;
    let place = part.unwrap_or(case.head());
    let chosen = object.handle != 0;
    let mut handle = if chosen { object.handle } else { next_handles(case, 1) };
    for attempt in 0..=TRIES {
        case.scratch.patch(place, Meaning::Handle, handle.into());
        case.patch(Meaning::Status, NV_OK.into());
        case.call()?;
        match case.status() {
            NV_OK => break,
            NV_ERR_INSERT_DUPLICATE_NAME if !chosen && attempt < TRIES => {
                handle = if attempt + 1 < TRIES { next_handles(case, 1) } else { 0 };
            }
            _ => {
                case.scratch.patch(place, Meaning::Handle, object.handle.into());
                return Ok(None);
            }
        }
    }
    let made = case.scratch.field(place, Meaning::Handle).and_then(|made| u32::try_from(made).ok());
    Ok(Some(made.unwrap_or(handle)).filter(|_| case.status() == NV_OK))
}

/// Takes `count` handles, and returns the first; [`nth_handle`] tells the others.
pub(crate) fn next_handles(case: &Case<'_>, count: u32) -> u32 {
    nth_handle(case.parts.state.counters.next_handles(count), 0)
}

/// Frees an object that a call made and that the caller doesn't get.
pub(crate) fn unmake(case: &Case<'_>, lane: &OnLane<'_>, client: u32, parent: u32, handle: u32) {
    if let Some(device) = &case.device {
        case.parts.callers.unmake(lane, device, Object { client, parent, handle });
    }
}
