//! Calls that make and free ranges of files of nvidia-uvm, and have UVM map memory in them.

use std::collections::BTreeSet;

use crate::caller::Reply;
use crate::case::{Case, EarlyReply, note_user, take_rm_lock};
use crate::decide::{RefusalReason, chargeable_mapping, freed_spans, plan_map};
use crate::driver::{free_pins, own_client, pin_mappings};
use crate::node::{Device, Failure, Rm};
use crate::state::{Space, UnderRmLock};
use crate::uvm::callers_file::{call_uvm, change_under_rm_lock, gpu_of, refuse_denied};
use crate::uvm::files::UvmFile;
use crate::uvm::queries::{PAGE_BYTES, Ranges};
use crate::uvm::retained_files::has_capacity_for_range;
use cgpu_core::ledger::{ChargeId, Client, Handle, Span, Tree};
use nvrm::number::{NV_ERR_INVALID_ADDRESS, NV_ERR_INVALID_ARGUMENT, NV_ERR_INVALID_DEVICE, NV_OK};
use nvrm::uvm::{self, Range, Source};
use nvrm::{Answer, Meaning};

/// The pages of a range; `None` if its bounds aren't multiples of a page, so that the driver refuses the range
/// (`uvm_api_range_invalid_4k`).
fn pages(range: Range) -> Option<Span> {
    let is_whole = (range.base | range.length).is_multiple_of(PAGE_BYTES);
    Span::of(range.base, range.length).filter(|_| is_whole)
}

/// Has the driver make a range, and enters the range before the caller gets the reply.
pub(crate) fn make_range(
    case: &mut Case<'_>,
    range: Range,
    make: impl FnOnce(&mut Case<'_>, &UnderRmLock<'_>, u32) -> Result<Reply, EarlyReply>,
) -> Result<Reply, EarlyReply> {
    change_under_rm_lock(case, |case, rm_lock, UvmFile { number: file, .. }| {
        let file = *file;
        let space = Space::File(file);
        let capacity = has_capacity_for_range(case.monitor);
        if !capacity || !case.state().ranges.has_capacity_for(space, range.base, range.length) {
            return Err(case.deny(&RefusalReason::Full("ranges")));
        }
        let done = make(case, rm_lock, file)?;
        if case.status() == NV_OK {
            case.state().add_range(space, range.base, range.length);
        }
        Ok(done)
    })
}

/// Forgets the ranges of a file that the driver doesn't have any more.
pub(crate) fn remove_gone_ranges(case: &Case<'_>, file: u32) {
    let Ok(device) = case.device() else { return };
    let known = case.state().ranges.of(Space::File(file));
    for (base, length) in known {
        if Ranges::of(&case.monitor.release, device).is_whole(Range { base, length }) == Some(false)
        {
            case.state().remove_range(Space::File(file), base);
        }
    }
}

/// The pages of a range. Refuses the call if the range's bounds aren't multiples of a page.
pub(crate) fn span(case: &mut Case<'_>, range: Range) -> Result<Span, EarlyReply> {
    let span = pages(range);
    span.ok_or_else(|| case.answer(Answer::Status(NV_ERR_INVALID_ADDRESS)))
}

/// Makes a call that ends mappings, and has `enter` enter what ended, if the driver did it. `enter` gets the file.
pub(crate) fn end_mappings(
    case: &mut Case<'_>,
    enter: impl FnOnce(&Case<'_>, u32),
) -> Result<Reply, EarlyReply> {
    let rm_lock = take_rm_lock(case)?;
    let file = case.monitor.uvm_files.find(case.device()?);
    file.iter().try_for_each(|file| refuse_denied(case, file))?;
    call_uvm(case)?;
    // In a struct that is larger than the known one, what is read as the status isn't the status.
    let is_done = case.status() == NV_OK && !case.scratch.bytes.was_exceeded();
    if let Some(file) = file.filter(|_| is_done) {
        enter(case, file.number);
    }
    free_pins(case.monitor, &rm_lock);
    drop(rm_lock);
    Ok(case.executed(None))
}

/// Ends a GPU's mappings within a range.
pub(crate) fn unmap(
    case: &mut Case<'_>,
    uuid: [u8; 16],
    range: Range,
) -> Result<Reply, EarlyReply> {
    end_mappings(case, |case, file| {
        if let (Some(gpu), Some(span)) = (gpu_of(case, uuid), pages(range)) {
            case.state().unmap(Tree { file, gpu }, span);
        }
    })
}

/// Frees the range that begins at `base`, and ends all mappings in it.
pub(crate) fn free_range(
    case: &mut Case<'_>,
    base: u64,
    length: Option<u64>,
) -> Result<Reply, EarlyReply> {
    end_mappings(case, |case, file| {
        enter_freed(case, file, base, length);
        case.state().remove_range(Space::File(file), base);
    })
}

/// Enters that the range at `base` is freed. `length` is in bytes; `None` where it isn't known.
fn enter_freed(case: &Case<'_>, file: u32, base: u64, length: Option<u64>) {
    let ranges: Vec<(Tree, Span)> = {
        let state = case.state();
        let ranges = state.ledger.ranges(file).map(|(tree, span, _)| (tree, span));
        ranges.filter(|(_, span)| span.last >= base).collect()
    };
    let freed = freed_spans(file, &ranges, (base, length), |at| is_in_range(case, at));
    let mut state = case.state();
    freed.into_iter().for_each(|(tree, span)| state.unmap(tree, span));
}

fn is_in_range(case: &Case<'_>, address: u64) -> Option<bool> {
    Ranges::of(&case.monitor.release, case.device().ok()?).is_external(address)
}

/// The GPUs that a mapping is for.
pub(crate) fn mapping_gpus(case: &mut Case<'_>) -> Result<Vec<u16>, EarlyReply> {
    let Some(uuids) = uvm::mapping_gpus(case.head(), &case.scratch.bytes) else {
        return Err(case.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT)));
    };
    // A GPU that isn't the container's can't be registered.
    let gpus: Option<Vec<u16>> = uuids.into_iter().map(|uuid| gpu_of(case, uuid)).collect();
    gpus.ok_or_else(|| case.answer(Answer::Status(NV_ERR_INVALID_DEVICE)))
}

/// Has UVM map memory. Enters the new mapping next to the old ones before the driver is asked: if the driver fails
/// midway, either may be mapped.
pub(crate) fn map_memory(
    case: &mut Case<'_>,
    rm_lock: &UnderRmLock<'_>,
    trees: &BTreeSet<Tree>,
    span: Span,
    (memory, control): (Source, Option<&Device>),
) -> Result<Reply, EarlyReply> {
    let object = (Client(memory.client), Handle(memory.handle));
    note_user(case, memory.client)?;
    let mut state = case.state();
    let charge = state.ledger.charge_of(object.0, object.1);
    let plan = plan_map(&state.ledger, trees, span, charge);
    plan.iter().flat_map(|plan| &plan.before).for_each(|entry| state.enter(*entry));
    drop(state);
    let plan = case.or_deny(plan)?;
    let status = match control {
        Some(control) => map_from_own_client(case, rm_lock, (memory, control), charge),
        None => Ok(NV_ERR_INVALID_ARGUMENT),
    };
    let after = if matches!(status, Ok(NV_OK)) { plan.mapped } else { plan.not_mapped };
    let mut state = case.state();
    after.into_iter().for_each(|entry| state.enter(entry));
    drop(state);
    free_pins(case.monitor, rm_lock);
    case.patch(Meaning::Status, status?.into());
    Ok(case.executed(None))
}

/// Maps memory from the monitor's client, and returns the driver's status: memory of a GPU from the pin for its
/// mappings, other memory from a duplicate that is freed afterwards. Refuses memory of a GPU that isn't charged in
/// full, which the mapping would keep alive, and memory that can't be pinned.
fn map_from_own_client(
    case: &mut Case<'_>,
    _: &UnderRmLock<'_>,
    (memory, control): (Source, &Device),
    charge: Option<ChargeId>,
) -> Result<u32, EarlyReply> {
    let Some(own) = own_client(case.monitor) else {
        return Ok(NV_ERR_INVALID_ARGUMENT);
    };
    let source_rm = Rm { release: &case.monitor.release, device: control };
    let object = (Client(memory.client), Handle(memory.handle));
    let gpu = case.state().ledger.memory_of(object.0, object.1).map(|(gpu, _)| gpu);
    let duplicate = match own.duplicate_from(&source_rm, (memory.client, memory.handle), gpu) {
        Ok(duplicate) => duplicate,
        Err(Failure::Status(status)) => return Ok(status),
        Err(Failure::Errno(errno)) => return Err(errno.into()),
    };
    let own_rm = Rm { release: &case.monitor.release, device: &own.control };
    let bytes = case.state().ledger.bytes_of(object.0, object.1);
    let is_larger = |bytes| own_rm.is_larger_than(own.client, duplicate, bytes);
    let is_of_gpu = || own_rm.is_gpu_memory(own.client, duplicate);
    let decision = chargeable_mapping(bytes, charge, is_larger, is_of_gpu);
    if decision.is_err() {
        own.free_duplicate(duplicate);
    }
    let charge = case.or_deny(decision)?;
    let pin = charge.map(|charge| pin_mappings(case.monitor, &own, charge, duplicate));
    let handle =
        case.or_deny(pin.unwrap_or(Some(duplicate)).ok_or(RefusalReason::Full("mappings")))?;
    let descriptor = u64::from(own.control.descriptor().cast_unsigned());
    case.patch(Meaning::Descriptor, descriptor);
    case.patch(Meaning::Client, own.client.into());
    case.patch(Meaning::Handle, handle.into());
    let asked = call_uvm(case);
    if pin.is_none() {
        own.free_duplicate(duplicate);
    }
    let descriptor = u64::from(memory.descriptor.cast_unsigned());
    case.patch(Meaning::Descriptor, descriptor);
    case.patch(Meaning::Client, memory.client.into());
    case.patch(Meaning::Handle, memory.handle.into());
    asked?;
    Ok(case.status())
}
