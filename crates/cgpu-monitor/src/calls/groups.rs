//! Calls that make channel groups and channels: what they make is entered, and its number is limited.

use crate::calls::charge::{
    find_gpu_of_caller, find_gpu_under_rm_lock, gpu_of_group, next_handles, only_gpu,
};
use crate::case::{Case, EarlyReply};
use crate::compute::forget_gone_groups;
use crate::decide::{self, RefusalReason};
use crate::shared::OpenState;
use crate::snapshot::{Reach, Record};
use crate::state::{UnderRmLock, computes};
use nvrm::call::{Alloc, Object};
use nvrm::channel::{ANY_CHANNEL, ENGINE_GRAPHICS};

/// A class above this number that ends in [`ANY_CHANNEL`] is a channel's.
const HIGHEST_OBJECT: u32 = 0xff;

/// Makes space for a group that is to be made: at the limit, forgets groups that are gone. Returns the GPU, or refuses
/// the call.
pub(crate) fn evict_for_group(
    case: &mut Case<'_>,
    rm_lock: &UnderRmLock<'_>,
    group: Object,
) -> Result<usize, EarlyReply> {
    match only_gpu(case)
        .or_else(|| find_gpu_under_rm_lock(case, rm_lock, group.client, group.parent))
    {
        Some(gpu) => capacity_on(case, gpu),
        None => {
            Err(case.deny(&RefusalReason::NoGpu { client: group.client, parent: group.parent }))
        }
    }
}

/// The GPU of a group that is to get another handle, which keeps the group when the first handle is freed. The GPU has
/// capacity for the handle. `None` if the object is no known group.
pub(crate) fn evict_for_handle_of_group(
    case: &mut Case<'_>,
    (client, handle): (u32, u32),
) -> Result<Option<usize>, EarlyReply> {
    let gpu = case.state().groups.gpu(client, handle);
    gpu.map(|gpu| capacity_on(case, gpu)).transpose()
}

/// Enters a channel whose call is passed through. Outside a group it is entered as a group, whether the driver makes it
/// or not. A channel whose handle the driver chooses is entered under another handle, and counts until its client ends.
pub(crate) fn enter_passing_channel(case: &mut Case<'_>, alloc: &Alloc) -> Result<(), EarlyReply> {
    let Alloc { object, class, .. } = *alloc;
    let is_channel = class > HIGHEST_OBJECT && class & 0xff == ANY_CHANNEL;
    if !is_channel {
        return Ok(());
    }
    let known = case.state().groups.engine(object.client, object.parent);
    if let Some((gpu, engine)) = known {
        return match computes(engine) {
            true => enter_computing_channel(case, gpu, object),
            false => Ok(()),
        };
    }
    // A channel below a group that isn't known is no channel outside groups.
    let caller_gpu = find_gpu_of_caller(case, object.client, object.parent);
    let Some(gpu) = caller_gpu.or_else(|| only_gpu(case)) else { return Ok(()) };
    let handle = match object.handle {
        0 => next_handles(case, 1),
        handle => handle,
    };
    let group = group(gpu, Object { handle, ..object }, false, None);
    with_capacity_on(case, gpu, |state| state.write(group))?;
    // Without `caller_gpu`, client and channel may be another container's, which would lose its channel on the GPU.
    if caller_gpu.is_none() || !computes(engine_of_channel(case, alloc)) {
        return Ok(());
    }
    capacity_outside_groups(case, gpu)?;
    enter_computing_channel(case, gpu, object)
}

/// The engine of a channel that is to be made outside a group: `NV_CHANNEL_ALLOC_PARAMS.engineType` (alloc_channel.h,
/// alike in nvos.h before); 0 if it can't be read. The program can change it until the driver reads it.
fn engine_of_channel(case: &Case<'_>, alloc: &Alloc) -> u32 {
    const ENGINE_TYPE: u64 = 128;
    let mut engine = [0; 4];
    let address = alloc.params.checked_add(ENGINE_TYPE).filter(|_| alloc.params != 0);
    let target = case.target().ok();
    let read = address.zip(target).map(|(address, target)| target.read(address, &mut engine));
    read.and_then(Result::ok).map_or(0, |()| u32::from_le_bytes(engine))
}

/// Refuses a channel that computes outside groups if the container has too many of these.
pub(crate) fn capacity_outside_groups(case: &mut Case<'_>, gpu: usize) -> Result<(), EarlyReply> {
    // If slices are set, no slice can be set for such a channel.
    let are_slices_set = case.monitor.shares.round(gpu).is_some_and(|round| !round.each);
    if !are_slices_set {
        return Ok(());
    }
    decide_twice(case, gpu, |state| {
        decide::capacity_outside_groups(state.outside_groups(gpu).len())
    })
}

/// Enters a channel that is scheduled by itself and whose creation was not seen: it counts as one outside a group.
pub(crate) fn enter_unseen_channel(case: &mut Case<'_>, (client, handle): (u32, u32)) {
    let Some(gpu) = gpu_of_group(case, client, handle) else { return };
    let Ok(process) = case.target().map(|target| target.process) else { return };
    let channel = Record::Channel { gpu, client, parent: 0, handle, process };
    let mut state = case.state();
    if state.channels.has_capacity() {
        state.write(channel);
    }
}

/// Enters a channel that computes, and whose call is passed through.
fn enter_computing_channel(
    case: &mut Case<'_>,
    gpu: usize,
    object: Object,
) -> Result<(), EarlyReply> {
    let Object { client, parent, handle } = object;
    let process = case.target()?.process;
    let decision = {
        let mut state = case.state();
        let decision = decide::capacity_for_channel(&state.channels);
        if handle != 0 && decision.is_ok() {
            state.write(Record::Channel { gpu, client, parent, handle, process });
        }
        decision
    };
    case.or_deny(decision)
}

/// Enters a group that was made, for `engine` if it is known.
pub(crate) fn enter_group(case: &Case<'_>, gpu: usize, made: Object, engine: Option<u32>) {
    let reach = engine.and_then(|engine| reach(case, engine));
    case.state().write(group(gpu, made, true, reach));
    case.monitor.shares.wake();
}

/// Enters another handle of a group: it outlives the first handle, and counts as one more group.
pub(crate) fn enter_name_of_group(case: &Case<'_>, gpu: usize, made: Object, source: (u32, u32)) {
    let reach = case.state().groups.named(source).and_then(|group| group.reach);
    enter_group(case, gpu, made, reach.map(|reach| reach.engine));
}

/// Enters a group whose creation was not seen and that is about to run: it counts as one that computes from now on.
pub(crate) fn enter_unseen_group(
    case: &mut Case<'_>,
    gpu: usize,
    object: Object,
) -> Result<(), EarlyReply> {
    let record = group(gpu, object, true, reach(case, ENGINE_GRAPHICS));
    with_capacity_on(case, gpu, |state| state.write(record))?;
    case.monitor.shares.wake();
    Ok(())
}

/// How the monitor reaches an object that this call makes.
fn reach(case: &Case<'_>, engine: u32) -> Option<Reach> {
    let process = case.target().ok()?.process;
    Some(Reach { process, descriptor: case.descriptor(), engine })
}

/// Returns the GPU if it has capacity for one more group, and refuses the call otherwise.
fn capacity_on(case: &mut Case<'_>, gpu: usize) -> Result<usize, EarlyReply> {
    with_capacity_on(case, gpu, |_| ()).map(|()| gpu)
}

/// Calls `enter` if a GPU has capacity for one more group, and refuses the call otherwise.
fn with_capacity_on(
    case: &mut Case<'_>,
    gpu: usize,
    enter: impl Fn(&mut OpenState<'_>),
) -> Result<(), EarlyReply> {
    let most = case.monitor.settings.channel_groups;
    decide_twice(case, gpu, |state| {
        decide::capacity_for_group(&state.groups, gpu, most).map(|()| enter(state))
    })
}

/// Decides. If the capacity is used up, forgets the groups of a GPU that are gone, and decides again.
fn decide_twice(
    case: &mut Case<'_>,
    gpu: usize,
    decide: impl Fn(&mut OpenState<'_>) -> Result<(), RefusalReason>,
) -> Result<(), EarlyReply> {
    let mut decision = decide(&mut case.state());
    if decision.is_err() {
        forget_gone_groups(case.monitor, gpu);
        decision = decide(&mut case.state());
    }
    case.or_deny(decision)
}

fn group(gpu: usize, object: Object, certain: bool, reach: Option<Reach>) -> Record {
    let Object { client, parent, handle } = object;
    Record::Group { gpu, client, parent, handle, certain, reach }
}
