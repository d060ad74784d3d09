//! `NV_ESC_RM_ALLOC` and `NV_ESC_RM_ALLOC_MEMORY`: makes an object below another one.
//!
//! [`allocate`] copies the parameters and the access rights, and enters the lane. It reads from the parameters how much
//! memory the object takes, finds the GPU, and has the object made and [charged](crate::monitor::calls::charge). Last,
//! it enters what else is to be known of the object. Pointers in the copies lead to the monitor's buffers while the
//! driver has the copies, and are the caller's again when the copies go back.

use crate::ledger::{Client, Handle};
use crate::monitor::caller::{Copy, Reply};
use crate::monitor::calls::case::retry::begin_on_lane;
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::charge::{NewObject, make_charged};
use crate::monitor::calls::gpu_lookup::{find_gpu_on_lane, gpu_of_new_subdevice};
use crate::monitor::calls::groups::{enter_group, make_room_for_group};
use crate::monitor::decide::{memory_asked, semaphore_surface, shown_memory};
use crate::monitor::node::Buffer;
use crate::monitor::state::OnLane;
use crate::rm::Meaning;
use crate::rm::call::{Alloc, Object};
use crate::rm::memory;
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;

/// The size of a mask of access rights, in bytes (`RS_ACCESS_MASK`, rs_access.h).
const RIGHTS_BYTES: usize = 4;

pub(crate) fn allocate(case: &mut Case<'_>, alloc: &Alloc) -> Result<Reply, EarlyReply> {
    let Alloc { object, class, does, .. } = *alloc;
    let release = &case.parts.state.release;
    let size = case.or_deny(memory::params_size(release, class, alloc.params_size))?;
    let size = size.filter(|_| alloc.params != 0);
    if let Some(size) = size {
        case.read_params(alloc.params, size)?;
    }
    let mut rights = Buffer::zeroed(RIGHTS_BYTES);
    if alloc.rights != 0 {
        let target = case.target()?;
        target.read(alloc.rights, &mut rights)?;
    }
    let mut lane = begin_on_lane(case)?;
    let params = size.map(|_| &case.scratch.params[..]);
    let asked = case.or_deny(memory_asked(release, (class, does), params))?;
    if class == NV_SEMAPHORE_SURFACE {
        let params = &case.scratch.params;
        let decision = semaphore_surface(release, &case.books().ledger, object.client, params);
        case.or_deny(decision)?;
    }
    let group = match class {
        KEPLER_CHANNEL_GROUP_A => Some(make_room_for_group(case, &lane, object)?),
        _ => None,
    };
    let params = if size.is_some() { case.scratch.params.address() } else { 0 };
    case.patch(Meaning::Params, params);
    let rights_address = if alloc.rights == 0 { 0 } else { rights.address() };
    case.patch(Meaning::Rights, rights_address);
    let new_object = NewObject { object, part: None };
    let asked_bytes = asked.map(|memory| memory.size_bytes);
    let made = make_charged(case, &mut lane, new_object, asked_bytes, |case| {
        memory::given_bytes(asked?.layout, &case.scratch.params)
    });
    case.patch(Meaning::Params, alloc.params);
    case.patch(Meaning::Rights, alloc.rights);
    let made = made?;
    if size.is_some() && made.is_some() {
        case.write_back(1, alloc.params, Copy::Params);
    }
    if let (Some(gpu), Some(made)) = (group, made) {
        let engine = memory::group_engine(release, &case.scratch.params);
        enter_group(case, gpu, made, Some(engine));
    }
    if let (NV20_SUBDEVICE_0, Some(made)) = (class, made) {
        note_subdevice(case, &lane, made);
    }
    Ok(case.executed(made))
}

/// `NV_ESC_RM_ALLOC_MEMORY` of a class that shows how much memory there is: the caller is shown the quota.
pub(crate) fn allocate_memory(case: &mut Case<'_>, object: Object) -> Result<Reply, EarlyReply> {
    let mut lane = begin_on_lane(case)?;
    let gpu = find_gpu_on_lane(case, &lane, object.client, object.parent);
    let address = case.scratch.field(case.head(), Meaning::Params).unwrap_or(0);
    let descriptor = case.scratch.field(case.head(), Meaning::Descriptor).unwrap_or(0);
    case.patch(Meaning::Params, 0);
    case.patch(Meaning::Descriptor, u64::from(u32::MAX));
    let new_object = NewObject { object, part: None };
    let made = make_charged(case, &mut lane, new_object, None, |_| None);
    case.patch(Meaning::Params, address);
    case.patch(Meaning::Descriptor, descriptor);
    let made = made?;
    let shown = shown_memory(gpu.and_then(|gpu| case.books().ledger.usage(gpu)));
    if let (Some(_), Some(limit)) = (made, case.scratch.field(case.head(), Meaning::Limit)) {
        case.patch(Meaning::Limit, limit.min(shown.total_bytes.saturating_sub(1)));
    }
    Ok(case.executed(made))
}

/// Notes a subdevice that was made, and the device above it.
fn note_subdevice(case: &Case<'_>, lane: &OnLane<'_>, made: Object) {
    let Object { client, parent, handle } = made;
    let gpu = gpu_of_new_subdevice(case, lane, client, handle);
    let mut books = case.books();
    if !books.ledger.contains(Client(client), Handle(parent)) {
        books.note(client, client, parent);
    }
    books.note(client, parent, handle);
    match gpu {
        Some(gpu) => [parent, handle].iter().for_each(|of| books.devices.set_gpu(client, *of, gpu)),
        // The books may know the GPU of an earlier object with this handle.
        None => books.devices.forget(client, handle),
    }
}
