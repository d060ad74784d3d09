//! Finds the GPU of a device or subdevice of the caller's: in the books, or by asking the driver for the GPU's UUID.
//! The driver's answer is remembered only on the lane: elsewhere the handle may be another object's soon.

use crate::gate::settings::NodeKind;
use crate::ledger::{Client, Handle, Shown};
use crate::monitor::calls::case::Case;
use crate::monitor::state::OnLane;
use crate::rm::about::Uuid;

/// The driver's answer about the GPU of a device or subdevice.
#[derive(Debug, Clone, Copy)]
struct GpuAnswer {
    uuid: Uuid,
    /// Whether the driver was asked about a device, not about a subdevice.
    is_device: bool,
}

/// The container's GPU; `None` where it has several.
pub(crate) fn only_gpu(case: &Case<'_>) -> Option<usize> {
    (case.parts.state.uuids.len() == 1).then_some(0)
}

/// The GPU of a channel group. Where it isn't known: the container's only GPU, or one where slices are set.
pub(crate) fn gpu_of_group(case: &Case<'_>, client: u32, handle: u32) -> Option<usize> {
    let known = case.books().groups.gpu(client, handle);
    let shares = &case.parts.slices.shares;
    let sliced = || (0..case.parts.state.uuids.len()).find(|gpu| shares.round(*gpu).is_some());
    known.or_else(|| only_gpu(case)).or_else(sliced)
}

/// The container's GPU of a device or subdevice, for a call that isn't on the lane. For a call that is on the lane see
/// [`find_gpu_on_lane`].
pub(crate) fn find_gpu(case: &mut Case<'_>, client: u32, handle: u32) -> Option<usize> {
    known_gpu(case, client, handle).or_else(|| find_gpu_of_caller(case, client, handle))
}

/// Like [`find_gpu`], but whichever node the call is made on. An answer of the driver's proves that the client is the
/// caller's: the driver answers through the client's own file alone. A GPU that the books know proves nothing: any
/// process of the container can name the object.
pub(crate) fn find_gpu_of_caller(case: &mut Case<'_>, client: u32, handle: u32) -> Option<usize> {
    let known = case.books().devices.gpu(client, handle);
    if known.is_some() {
        return known;
    }
    if let Some(asked) = ask_existing_subdevice(case, client, handle) {
        return case.parts.state.gpu_of(&asked.uuid);
    }
    let lane = case.parts.lane.enter();
    remember_gpu(case, &lane, client, handle)
}

/// The container's GPU of a device or subdevice, for a call on the lane.
pub(crate) fn find_gpu_on_lane(
    case: &Case<'_>,
    lane: &OnLane<'_>,
    client: u32,
    handle: u32,
) -> Option<usize> {
    known_gpu(case, client, handle).or_else(|| remember_gpu(case, lane, client, handle))
}

fn known_gpu(case: &Case<'_>, client: u32, handle: u32) -> Option<usize> {
    case.books().devices.gpu(client, handle).or_else(|| gpu_of_file(case))
}

/// The GPU whose node the call is made on; `None` for another node.
pub(crate) fn gpu_of_file(case: &Case<'_>) -> Option<usize> {
    match case.device.as_ref()?.kind {
        NodeKind::Gpu(gpu) => Some(gpu),
        _ => None,
    }
}

/// The GPU of a subdevice that was just made, as the driver says.
pub(crate) fn gpu_of_new_subdevice(
    case: &Case<'_>,
    _: &OnLane<'_>,
    client: u32,
    handle: u32,
) -> Option<usize> {
    case.parts.state.gpu_of(&case.rm().ok()?.uuid(client, handle).ok()?)
}

/// Asks the driver for the GPU of a device or subdevice, whichever node the call is made on, and remembers the GPU.
fn remember_gpu(case: &Case<'_>, lane: &OnLane<'_>, client: u32, handle: u32) -> Option<usize> {
    let asked = ask_subdevice(case, lane, client, handle)?;
    let gpu = case.parts.state.gpu_of(&asked.uuid)?;
    let mut books = case.books();
    books.devices.set_gpu(client, handle, gpu);
    if asked.is_device && !books.ledger.contains(Client(client), Handle(handle)) {
        books.note(client, client, handle);
    }
    Some(gpu)
}

/// On which GPU another name of memory shows. The name hangs below `parent`, and the GPU `of` has the memory.
pub(crate) fn shown_below(
    case: &Case<'_>,
    lane: &OnLane<'_>,
    client: u32,
    parent: u32,
    of: Option<usize>,
) -> Shown {
    let Some(of) = of.filter(|_| case.parts.state.uuids.len() > 1) else { return Shown::Here };
    let known = case.books().devices.gpu(client, parent);
    let gpu = known.or_else(|| remember_gpu(case, lane, client, parent));
    match gpu.map(|gpu| (gpu, u16::try_from(gpu))) {
        Some((gpu, Ok(number))) if gpu != of => Shown::On(number),
        _ => Shown::Here,
    }
}

/// Asks a subdevice for its GPU's UUID: the one that the device has, or the object itself where it is a subdevice.
fn ask_existing_subdevice(case: &Case<'_>, client: u32, handle: u32) -> Option<GpuAnswer> {
    let rm = case.rm().ok()?;
    if let Ok(subdevice) = rm.find_subdevice(client, handle) {
        let uuid = rm.uuid(client, subdevice).ok()?;
        return Some(GpuAnswer { uuid, is_device: true });
    }
    rm.uuid(client, handle).ok().map(|uuid| GpuAnswer { uuid, is_device: false })
}

/// Does as [`ask_existing_subdevice`]. Where that finds none, makes a subdevice of the device, asks it, and frees it.
fn ask_subdevice(case: &Case<'_>, _: &OnLane<'_>, client: u32, handle: u32) -> Option<GpuAnswer> {
    if let Some(asked) = ask_existing_subdevice(case, client, handle) {
        return Some(asked);
    }
    let rm = case.rm().ok()?;
    let subdevice = rm.make_subdevice(client, handle).ok()?;
    let uuid = rm.uuid(client, subdevice);
    let _ = rm.free(client, handle, subdevice);
    uuid.ok().map(|uuid| GpuAnswer { uuid, is_device: true })
}
