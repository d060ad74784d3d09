//! Makes an object below another one, and frees objects: `NV_ESC_RM_ALLOC`, `NV_ESC_RM_ALLOC_MEMORY`, `NV_ESC_RM_FREE`,
//! and `NV_ESC_RM_VID_HEAP_CONTROL`, by which a program allocates memory, frees memory, or asks about memory.
//!
//! [`allocate`] copies the parameters and the access rights, and takes the RM lock. It reads from the parameters how
//! much memory the object takes, finds the GPU, and has the object made and [charged](crate::calls::charge). Last, it
//! enters what else is to be known of the object. Pointers in the copies lead to the monitor's buffers while the driver
//! has the copies, and are the caller's again when the copies go back.
//!
//! [`free`] has the driver free an object, and then takes the object out of the state.

use crate::caller::{Copy, Reply};
use crate::calls::charge::{
    NewObject, find_gpu, find_gpu_under_rm_lock, gpu_of_new_subdevice, make_charged,
};
use crate::calls::groups::{enter_group, evict_for_group};
use crate::case::{Case, EarlyReply, begin_under_rm_lock, note_user};
use crate::compute::forget_freed_groups;
use crate::decide::{memory_asked, semaphore_surface, shown_memory};
use crate::driver::free_pins;
use crate::node::Buffer;
use crate::state::UnderRmLock;
use cgpu_core::ledger::{Client, Entry, Handle};
use nvrm::call::{Alloc, Object, VidHeap};
use nvrm::class::Use;
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use nvrm::number::*;
use nvrm::{Layout, Meaning, memory};

/// The size of a mask of access rights, in bytes (`RS_ACCESS_MASK`, rs_access.h).
const RIGHTS_BYTES: usize = 4;

pub(crate) fn allocate(case: &mut Case<'_>, alloc: &Alloc) -> Result<Reply, EarlyReply> {
    let Alloc { object, class, does, .. } = *alloc;
    let release = &case.monitor.release;
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
    let mut rm_lock = begin_under_rm_lock(case)?;
    let params = size.map(|_| &case.scratch.params[..]);
    let asked = case.or_deny(memory_asked(release, (class, does), params))?;
    if class == NV_SEMAPHORE_SURFACE {
        let params = &case.scratch.params;
        let decision = semaphore_surface(release, &case.state().ledger, object.client, params);
        case.or_deny(decision)?;
    }
    let group = match class {
        KEPLER_CHANNEL_GROUP_A => Some(evict_for_group(case, &rm_lock, object)?),
        _ => None,
    };
    let params = if size.is_some() { case.scratch.params.address() } else { 0 };
    case.patch(Meaning::Params, params);
    let rights_address = if alloc.rights == 0 { 0 } else { rights.address() };
    case.patch(Meaning::Rights, rights_address);
    let new_object = NewObject { object, part: None };
    let asked_bytes = asked.map(|memory| memory.size_bytes);
    let made = make_charged(case, &mut rm_lock, new_object, asked_bytes, |case| {
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
        note_subdevice(case, &rm_lock, made);
    }
    Ok(case.executed(made))
}

/// `NV_ESC_RM_ALLOC_MEMORY` of a class that shows how much memory there is: the caller is shown the quota.
pub(crate) fn allocate_memory(case: &mut Case<'_>, object: Object) -> Result<Reply, EarlyReply> {
    let mut rm_lock = begin_under_rm_lock(case)?;
    let gpu = find_gpu_under_rm_lock(case, &rm_lock, object.client, object.parent);
    let address = case.scratch.field(case.head(), Meaning::Params).unwrap_or(0);
    let descriptor = case.scratch.field(case.head(), Meaning::Descriptor).unwrap_or(0);
    case.patch(Meaning::Params, 0);
    case.patch(Meaning::Descriptor, u64::from(u32::MAX));
    let new_object = NewObject { object, part: None };
    let made = make_charged(case, &mut rm_lock, new_object, None, |_| None);
    case.patch(Meaning::Params, address);
    case.patch(Meaning::Descriptor, descriptor);
    let made = made?;
    let shown = shown_memory(gpu.and_then(|gpu| case.state().ledger.usage(gpu)));
    if let (Some(_), Some(limit)) = (made, case.scratch.field(case.head(), Meaning::Limit)) {
        case.patch(Meaning::Limit, limit.min(shown.total_bytes.saturating_sub(1)));
    }
    Ok(case.executed(made))
}

/// Notes a subdevice that was made, and the device above it.
fn note_subdevice(case: &Case<'_>, rm_lock: &UnderRmLock<'_>, made: Object) {
    let Object { client, parent, handle } = made;
    let gpu = gpu_of_new_subdevice(case, rm_lock, client, handle);
    let mut state = case.state();
    if !state.ledger.contains(Client(client), Handle(parent)) {
        state.note(client, client, parent);
    }
    state.note(client, parent, handle);
    match gpu {
        Some(gpu) => [parent, handle].iter().for_each(|of| state.devices.set_gpu(client, *of, gpu)),
        // The state may know the GPU of an earlier object with this handle.
        None => state.devices.forget(client, handle),
    }
}

pub(crate) fn serve_heap(
    case: &mut Case<'_>,
    client: u32,
    parent: u32,
    function: VidHeap,
) -> Result<Reply, EarlyReply> {
    match function {
        VidHeap::Free { handle } => return free(case, client, handle),
        VidHeap::Alloc { handle, does, size_bytes, layout: part, .. } => {
            let object = Object { client, parent, handle };
            let asked_bytes = (does == Use::Takes).then_some(size_bytes);
            return allocate_on_heap(case, part, object, asked_bytes);
        }
        _ => {}
    }
    case.still_waits()?;
    case.call()?;
    let part = if let VidHeap::Info { layout } = function { Some(layout) } else { None };
    let gpu = find_gpu(case, client, parent);
    show_usage(case, part, gpu);
    Ok(case.executed(None))
}

fn allocate_on_heap(
    case: &mut Case<'_>,
    part: &'static Layout,
    object: Object,
    asked_bytes: Option<u64>,
) -> Result<Reply, EarlyReply> {
    let mut rm_lock = begin_under_rm_lock(case)?;
    let flags = case.scratch.field(part, Meaning::Flags).unwrap_or(0);
    let provided = flags | u64::from(NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED);
    case.scratch.patch(part, Meaning::Flags, provided);
    let making = NewObject { object, part: Some(part) };
    let made = make_charged(case, &mut rm_lock, making, asked_bytes, |case| {
        memory::given_bytes(part, &case.scratch.bytes)
    });
    case.scratch.patch(part, Meaning::Flags, flags);
    let made = made?;
    let gpu = find_gpu_under_rm_lock(case, &rm_lock, object.client, object.parent);
    show_usage(case, None, gpu);
    Ok(case.executed(made))
}

pub(crate) fn free(case: &mut Case<'_>, client: u32, handle: u32) -> Result<Reply, EarlyReply> {
    let rm_lock = begin_under_rm_lock(case)?;
    let (of, object) = (Client(client), Handle(handle));
    note_user(case, client)?;
    let is_memory = case.state().ledger.charge_of(of, object).is_some();
    case.call()?;
    let is_done = case.status() == NV_OK;
    let is_gone = match case.status() {
        NV_ERR_OBJECT_NOT_FOUND => true,
        NV_ERR_INVALID_CLIENT | NV_ERR_INVALID_OBJECT_HANDLE => handle == client,
        _ => false,
    };
    if case.retry.repeats && is_gone {
        // The first time freed it, and the state has that.
        case.patch(Meaning::Status, NV_OK.into());
    }
    if is_done {
        let mut state = case.state();
        state.enter(Entry::Free { client: of, handle: object });
        if !is_memory {
            state.forget_freed_devices(client);
        }
        drop(state);
        forget_freed_groups(case.monitor, client, handle);
        free_pins(case.monitor, &rm_lock);
    }
    drop(rm_lock);
    Ok(case.executed(None))
}

/// Puts the quota, and the free bytes of it, into the totals of an `NVOS32` and of `part`.
fn show_usage(case: &mut Case<'_>, part: Option<&'static Layout>, gpu: Option<usize>) {
    let shown = shown_memory(gpu.and_then(|gpu| case.state().ledger.usage(gpu)));
    let (total, free) = (shown.total_bytes, shown.free_bytes);
    // The driver usage of the GPU doesn't go to the caller, whatever the driver left in these fields.
    for part in [Some(case.head()), part].into_iter().flatten() {
        let largest = case.scratch.field(part, Meaning::LargestFree).unwrap_or(0).min(free);
        case.scratch.patch(part, Meaning::TotalMemory, total);
        case.scratch.patch(part, Meaning::FreeMemory, free);
        case.scratch.patch(part, Meaning::LargestFree, largest);
    }
}
