//! Makes objects, and charges their memory to a GPU before the driver gives it.
//!
//! [`make_charged`] reserves the memory in the state, asks the driver, and enters what the driver gave. So the driver
//! never has more than the state, except for what it rounds up: the quota is checked again after the entry. [`make`]
//! has the driver make an object, under a handle that the caller or the monitor chooses.
//!
//! [`find_gpu`] and others find the GPU of the caller's device or subdevice: in the state, or by asking the driver for
//! the GPU's UUID. The driver's answer is remembered only under the RM lock: otherwise the handle may be another
//! object's soon.

use std::time::Instant;

use crate::audit::reconcile;
use crate::case::{Case, EarlyReply, note_user, report_refused, unmake_object};
use crate::decide::{self, RefusalReason, nth_handle};
use crate::driver::{Presence, presence};
use crate::gate::settings::NodeKind;
use crate::log::Refuser;
use crate::state::{ContainerState, UnderRmLock};
use cgpu_core::ledger::{Attribution, Client, Entry, Handle, Reservation, Usage};
use nvrm::about::Uuid;
use nvrm::call::Object;
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use nvrm::number::*;
use nvrm::{Answer, Layout, Meaning};

/// An object that is to be made, and where the call's struct has its handle.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewObject {
    pub(crate) object: Object,
    /// The part of the struct that has the handle; `None` if the struct has the handle itself.
    pub(crate) part: Option<&'static Layout>,
}

/// How many handles the monitor tries before it lets the driver choose one.
const TRIES: u32 = 4;

/// Reserves memory for an object on the GPU above it, and notes that the caller uses the client. If the memory doesn't
/// fit the quota, asks the driver what the container has, and tries once more. Returns the GPU's place in the
/// container's order.
fn reserve(
    case: &mut Case<'_>,
    rm_lock: &mut UnderRmLock<'_>,
    Object { client, parent, .. }: Object,
    bytes: u64,
) -> Result<(usize, Reservation), EarlyReply> {
    let (process, of_file) = (case.target()?.process, gpu_of_file(case));
    let reserve = |state: &mut ContainerState, gpu| {
        (gpu, decide::reserve_within_quota(&mut state.ledger, gpu, bytes))
    };
    let mut state = case.state();
    state.note_user(client, process);
    let known = state.devices.gpu(client, parent).or(of_file);
    let decided = known.map(|gpu| reserve(&mut state, gpu));
    drop(state);
    let (gpu, mut decision) = match decided {
        Some(decided) => decided,
        None => match find_gpu_under_rm_lock(case, rm_lock, client, parent) {
            Some(gpu) => reserve(&mut case.state(), gpu),
            None => return Err(case.deny(&RefusalReason::NoGpu { client, parent })),
        },
    };
    if let Err(RefusalReason::OverQuota { usage, .. }) = decision
        && bytes <= usage.limit_bytes
    {
        reconcile(case.monitor, rm_lock, case.came);
        // Other calls may have held the RM lock meanwhile.
        if find_gpu_under_rm_lock(case, rm_lock, client, parent) != Some(gpu) {
            return Err(case.deny(&RefusalReason::ParentGone));
        }
        (_, decision) = reserve(&mut case.state(), gpu);
    }
    Ok((gpu, case.or_deny(decision)?))
}

/// Makes an object, and charges its memory if it takes some: checks that the memory fits the quota, asks the driver,
/// and enters what the driver gave. No other function grants an allocation of the resource manager's.
///
/// `asked_bytes` is what the object takes, if it takes memory. `given` reads from the copies how many bytes the driver
/// gave. Notes that the caller uses the client. `None` if the driver made no object, and the call's struct says why.
pub(crate) fn make_charged(
    case: &mut Case<'_>,
    rm_lock: &mut UnderRmLock<'_>,
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
    let (gpu, reservation) = reserve(case, rm_lock, object, asked_bytes)?;
    let made = make(case, new_object);
    let given_bytes = given(case).unwrap_or(asked_bytes).max(asked_bytes);
    let mut state = case.state();
    state.ledger.cancel(reservation);
    let Ok(Some(handle)) = made else {
        let usage = state.ledger.usage(gpu);
        drop(state);
        if let (Ok(None), NV_ERR_NO_MEMORY, Some(usage)) = (&made, case.status(), usage) {
            report_refused(case, Refuser::Driver, gpu, asked_bytes, usage);
        }
        return made.map(|_| None);
    };
    let (client, parent) = (Client(object.client), Handle(object.parent));
    let entry = Entry::Commit { gpu, bytes: given_bytes, client, parent, handle: Handle(handle) };
    state.enter(entry);
    let is_within = |state: &ContainerState| decide::is_within_quota(&state.ledger, gpu);
    let mut is_granted = is_within(&state);
    let serial = state.ledger.serial_of(client, Handle(handle));
    drop(state);
    if !is_granted {
        // Without an audit, memory that the driver reported before it was entered may count twice.
        reconcile(case.monitor, rm_lock, Instant::now());
        is_granted = is_within(&case.state());
    }
    if !is_granted {
        // Other calls may have held the RM lock meanwhile, and may have freed the object.
        if case.state().ledger.serial_of(client, Handle(handle)) == serial {
            unmake(case, rm_lock, object.client, object.parent, handle);
        }
        let usage = case.state().ledger.usage(gpu);
        let usage = usage.unwrap_or(Usage { limit_bytes: 0, used_bytes: 0 });
        return Err(case.deny(&RefusalReason::OverQuota { gpu, asked_bytes: given_bytes, usage }));
    }
    Ok(Some(Object { client: object.client, parent: object.parent, handle }))
}

/// Whether an object exists, as the state and the driver say.
fn exists(case: &Case<'_>, Object { client, handle, .. }: Object) -> bool {
    let known = case.state().ledger.contains(Client(client), Handle(handle));
    known && presence(case.monitor, client, handle) == Some(Presence::There)
}

/// Enters an object without memory that was made, if the state has an object with its handle.
fn note_made(case: &Case<'_>, object: Object, handle: u32) -> Object {
    let mut state = case.state();
    // The object that had the handle before is gone.
    if state.ledger.contains(Client(object.client), Handle(handle)) {
        state.note(object.client, object.parent, handle);
    }
    Object { client: object.client, parent: object.parent, handle }
}

/// Asks the driver to make an object, and returns the handle that the object got; `None` if the driver made none, and
/// the struct says why.
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

/// Takes `count` handles, and returns the first; [`nth_handle`] gives the others.
pub(crate) fn next_handles(case: &Case<'_>, count: u32) -> u32 {
    nth_handle(case.monitor.counters.next_handles(count), 0)
}

/// Frees an object that a call made and that the caller doesn't get.
pub(crate) fn unmake(
    case: &Case<'_>,
    rm_lock: &UnderRmLock<'_>,
    client: u32,
    parent: u32,
    handle: u32,
) {
    if let Some(device) = &case.device {
        unmake_object(case.monitor, rm_lock, device, Object { client, parent, handle });
    }
}

/// The driver's answer about the GPU of a device or subdevice.
#[derive(Debug, Clone, Copy)]
struct GpuAnswer {
    uuid: Uuid,
    /// Whether the driver was asked about a device, not about a subdevice.
    is_device: bool,
}

/// The container's GPU; `None` if it has several.
pub(crate) fn only_gpu(case: &Case<'_>) -> Option<usize> {
    (case.monitor.uuids.len() == 1).then_some(0)
}

/// The GPU of a channel group. If it isn't known: the container's only GPU, or one on which slices are set.
pub(crate) fn gpu_of_group(case: &Case<'_>, client: u32, handle: u32) -> Option<usize> {
    let known = case.state().groups.gpu(client, handle);
    let shares = &case.monitor.shares;
    let sliced = || (0..case.monitor.uuids.len()).find(|gpu| shares.round(*gpu).is_some());
    known.or_else(|| only_gpu(case)).or_else(sliced)
}

/// The container's GPU of a device or subdevice, for a call that doesn't hold the RM lock. For a call that holds the RM
/// lock see [`find_gpu_under_rm_lock`].
pub(crate) fn find_gpu(case: &mut Case<'_>, client: u32, handle: u32) -> Option<usize> {
    known_gpu(case, client, handle).or_else(|| find_gpu_of_caller(case, client, handle))
}

/// Like [`find_gpu`], but whichever node the call is made on. If a GPU is found, the client is the container's: the
/// state has devices of such clients alone, and the driver answers through a client's own file alone.
pub(crate) fn find_gpu_of_caller(case: &mut Case<'_>, client: u32, handle: u32) -> Option<usize> {
    let known = case.state().devices.gpu(client, handle);
    if known.is_some() {
        return known;
    }
    if let Some(asked) = ask_existing_subdevice(case, client, handle) {
        return case.monitor.gpu_of(&asked.uuid);
    }
    let rm_lock = case.monitor.rm_lock.enter();
    remember_gpu(case, &rm_lock, client, handle)
}

/// The container's GPU of a device or subdevice, for a call that holds the RM lock.
pub(crate) fn find_gpu_under_rm_lock(
    case: &Case<'_>,
    rm_lock: &UnderRmLock<'_>,
    client: u32,
    handle: u32,
) -> Option<usize> {
    known_gpu(case, client, handle).or_else(|| remember_gpu(case, rm_lock, client, handle))
}

fn known_gpu(case: &Case<'_>, client: u32, handle: u32) -> Option<usize> {
    case.state().devices.gpu(client, handle).or_else(|| gpu_of_file(case))
}

/// The GPU whose node the call is made on; `None` for another node.
fn gpu_of_file(case: &Case<'_>) -> Option<usize> {
    match case.device.as_ref()?.kind {
        NodeKind::Gpu(gpu) => Some(gpu),
        _ => None,
    }
}

/// The GPU of a subdevice that was just made, as the driver says.
pub(crate) fn gpu_of_new_subdevice(
    case: &Case<'_>,
    _: &UnderRmLock<'_>,
    client: u32,
    handle: u32,
) -> Option<usize> {
    case.monitor.gpu_of(&case.rm().ok()?.uuid(client, handle).ok()?)
}

/// Asks the driver for the GPU of a device or subdevice, whichever node the call is made on, and remembers the GPU.
fn remember_gpu(
    case: &Case<'_>,
    rm_lock: &UnderRmLock<'_>,
    client: u32,
    handle: u32,
) -> Option<usize> {
    let asked = ask_subdevice(case, rm_lock, client, handle)?;
    let gpu = case.monitor.gpu_of(&asked.uuid)?;
    let mut state = case.state();
    state.devices.set_gpu(client, handle, gpu);
    if asked.is_device && !state.ledger.contains(Client(client), Handle(handle)) {
        state.note(client, client, handle);
    }
    Some(gpu)
}

/// To which GPU another handle of memory is attributed. The handle is below `parent`, and the GPU `of` has the memory.
pub(crate) fn shown_below(
    case: &Case<'_>,
    rm_lock: &UnderRmLock<'_>,
    client: u32,
    parent: u32,
    of: Option<usize>,
) -> Attribution {
    let Some(of) = of.filter(|_| case.monitor.uuids.len() > 1) else { return Attribution::Here };
    let known = case.state().devices.gpu(client, parent);
    let gpu = known.or_else(|| remember_gpu(case, rm_lock, client, parent));
    match gpu.map(|gpu| (gpu, u16::try_from(gpu))) {
        Some((gpu, Ok(number))) if gpu != of => Attribution::On(number),
        _ => Attribution::Here,
    }
}

/// Asks a subdevice for its GPU's UUID: the one that the device has, or the object itself if it is a subdevice.
fn ask_existing_subdevice(case: &Case<'_>, client: u32, handle: u32) -> Option<GpuAnswer> {
    let rm = case.rm().ok()?;
    if let Ok(subdevice) = rm.find_subdevice(client, handle) {
        let uuid = rm.uuid(client, subdevice).ok()?;
        return Some(GpuAnswer { uuid, is_device: true });
    }
    rm.uuid(client, handle).ok().map(|uuid| GpuAnswer { uuid, is_device: false })
}

/// Does as [`ask_existing_subdevice`]. If that finds none, makes a subdevice of the device, asks it, and frees it.
fn ask_subdevice(
    case: &Case<'_>,
    _: &UnderRmLock<'_>,
    client: u32,
    handle: u32,
) -> Option<GpuAnswer> {
    if let Some(asked) = ask_existing_subdevice(case, client, handle) {
        return Some(asked);
    }
    let rm = case.rm().ok()?;
    let subdevice = rm.make_subdevice(client, handle).ok()?;
    let uuid = rm.uuid(client, subdevice);
    let _ = rm.free(client, handle, subdevice);
    uuid.ok().map(|uuid| GpuAnswer { uuid, is_device: true })
}
