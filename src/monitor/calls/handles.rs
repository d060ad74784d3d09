//! Has the driver make an object, under a handle that the caller or the monitor chooses. The slot has the handle before
//! the driver is asked: so the next worker can free an object that this worker did not enter.

use crate::ledger::{Client, Handle};
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::journal::{CallObject, nth_handle};
use crate::monitor::state::OnLane;
use crate::rm::call::Object;
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;
use crate::rm::{Layout, Meaning};

/// An object that is to be made, and where the call's struct has its handle.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewObject {
    pub(crate) object: Object,
    /// The part of the struct that has the handle; `None` where the struct has the handle itself.
    pub(crate) part: Option<&'static Layout>,
}

/// How many handles the monitor tries before it lets the driver choose one.
const TRIES: u32 = 4;

/// Asks the driver to make an object, and returns the handle that the object got; `None` where the driver made none,
/// and the struct says why.
pub(crate) fn make(case: &mut Case<'_>, new_object: NewObject) -> Result<Option<u32>, EarlyReply> {
    let NewObject { object, part } = new_object;
    let place = part.unwrap_or(case.head());
    let chosen = object.handle != 0;
    let was_there = case.asked_before && case.slot.call_object().was_there;
    let mut handle = if chosen { object.handle } else { next_handle(case) };
    let known = |case: &Case<'_>, handle| {
        let books = case.books();
        let is_group = books.groups.contains(object.client, handle);
        is_group || books.ledger.contains(Client(object.client), Handle(handle))
    };
    for attempt in 0..=TRIES {
        case.scratch.patch(place, Meaning::Handle, handle.into());
        case.patch(Meaning::Status, NV_OK.into());
        let there = was_there || known(case, handle);
        case.slot.set_executing(CallObject::one(object.client, handle, there));
        case.call()?;
        match case.status() {
            NV_OK => break,
            NV_ERR_INSERT_DUPLICATE_NAME if !chosen && attempt < TRIES => {
                handle = if attempt + 1 < TRIES { next_handle(case) } else { 0 };
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

/// The handle of the object that a worker before may have made for this call; `None` where it can have made none.
fn former_handle(case: &Case<'_>, object: Object) -> Option<u32> {
    let before = case.slot.call_object();
    let handle = if object.handle == 0 { before.handle } else { object.handle };
    (case.asked_before && !before.was_there && handle != 0).then_some(handle)
}

/// Frees the object that a worker before may have made for this call, and even entered: the call begins anew.
pub(crate) fn undo_former_attempt(case: &Case<'_>, lane: &OnLane<'_>, object: Object) {
    if let Some(handle) = former_handle(case, object) {
        unmake(case, lane, object.client, object.parent, handle);
        case.parts.slices.forget_freed(object.client, handle);
    }
}

fn next_handle(case: &Case<'_>) -> u32 {
    next_handles(case, 1)
}

/// Takes `count` handles, and returns the first; [`nth_handle`] tells the others.
pub(crate) fn next_handles(case: &Case<'_>, count: u32) -> u32 {
    nth_handle(case.parts.state.journal.next_handles(count), 0)
}

/// Frees an object that a call made and that the caller doesn't get.
pub(crate) fn unmake(case: &Case<'_>, lane: &OnLane<'_>, client: u32, parent: u32, handle: u32) {
    if let Some(device) = &case.device {
        case.parts.callers.unmake(lane, device, Object { client, parent, handle });
    }
}
