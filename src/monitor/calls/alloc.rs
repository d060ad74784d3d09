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
use crate::monitor::calls::charge::{NewObject, make_charged, refuse_without_gpu};
use crate::monitor::calls::gpu_lookup::{find_gpu_on_lane, gpu_of_new_subdevice};
use crate::monitor::calls::groups::{enter_group, make_room_for_group};
use crate::monitor::calls::identify::note_user;
use crate::monitor::node::Buffer;
use crate::monitor::state::OnLane;
use crate::rm::call::{Alloc, Object};
use crate::rm::memory::{self, Memory, Use, class_use};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;
use crate::rm::{Answer, Key, Meaning};

/// The size of a mask of access rights, in bytes (`RS_ACCESS_MASK`, rs_access.h).
const RIGHTS_BYTES: usize = 4;

pub(crate) fn allocate(case: &mut Case<'_>, alloc: &Alloc) -> Result<Reply, EarlyReply> {
    let Alloc { object, class, .. } = *alloc;
    let size = memory::params_size(&case.parts.state.release, class, alloc.params_size);
    let size = size.map_err(|refusal| case.refused(&refusal))?;
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
    note_user(case, object.client)?;

    let does = class_use(class).does;
    let mut asked: Option<Memory> = None;
    match (does, size) {
        (Use::Takes, None) => {
            return Err(case.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT)));
        }
        (Use::Takes, Some(_)) => {
            let memory = memory::decode(&case.parts.state.release, class, &case.scratch.params);
            asked = Some(memory.map_err(|refusal| case.refused(&refusal))?);
        }
        _ => {}
    }
    let charge = match asked {
        None => None,
        Some(memory) => match find_gpu_on_lane(case, &lane, object.client, object.parent) {
            Some(gpu) => Some((gpu, memory.size_bytes)),
            None => return Err(refuse_without_gpu(case, object)),
        },
    };

    if class == NV_SEMAPHORE_SURFACE && is_over_gpu_memory(case, object.client) {
        return Err(case.answer(Answer::Status(NV_ERR_INVALID_PARAMETER)));
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
    let made = make_charged(case, &mut lane, new_object, charge, |case| {
        memory::given_bytes(asked?.layout, &case.scratch.params)
    });
    case.patch(Meaning::Params, alloc.params);
    case.patch(Meaning::Rights, alloc.rights);
    let made = made?;
    if size.is_some() && made.is_some() {
        case.write_back(1, alloc.params, Copy::Params);
    }
    if let (Some(gpu), Some(made)) = (group, made) {
        let engine = memory::group_engine(&case.parts.state.release, &case.scratch.params);
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
    let shown = gpu.and_then(|gpu| case.books().ledger.usage(gpu));
    if let (Some(_), Some(limit)) = (made, case.scratch.field(case.head(), Meaning::Limit)) {
        let most = shown.map_or(0, |usage| usage.limit_bytes.saturating_sub(1));
        case.patch(Meaning::Limit, limit.min(most));
    }
    Ok(case.executed(made))
}

/// Whether a surface of semaphores is to lie in memory of a GPU. The surface would keep that memory in nobody's figure.
/// The driver refuses this, too: the memory has to be the host's (`semsurfConstruct_IMPL`, sem_surf.c, from 535.43.02
/// to 595.45.04).
fn is_over_gpu_memory(case: &Case<'_>, client: u32) -> bool {
    let layout = case.parts.state.release.layouts(Key::Class(NV_SEMAPHORE_SURFACE)).first();
    let view = layout.and_then(|layout| layout.view(&case.scratch.params));
    let named = [Meaning::SourceHandle, Meaning::Handle];
    let mut handles = named.into_iter().filter_map(|of| view.and_then(|view| view.u32(of)));
    let ledger = &case.books().ledger;
    handles.any(|handle| {
        ledger.bytes_of(Client(client), Handle(handle)).is_some_and(|bytes| bytes > 0)
    })
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
