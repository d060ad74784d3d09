//! Calls that have UVM map memory.

use std::collections::BTreeSet;

use crate::ledger::{ChargeId, Client, Handle, Span, Tree};
use crate::monitor::caller::Reply;
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::identify::note_user;
use crate::monitor::calls::uvm_file::{call_uvm, gpu_of};
use crate::monitor::decide::{Denial, chargeable_mapping, plan_map};
use crate::monitor::node::{Device, Failure, Rm};
use crate::monitor::state::OnLane;
use crate::rm::number::{NV_ERR_INVALID_ARGUMENT, NV_ERR_INVALID_DEVICE, NV_OK};
use crate::rm::uvm::{self, Source};
use crate::rm::{Answer, Meaning};

/// The GPUs that a mapping is for.
pub(crate) fn mapping_gpus(case: &mut Case<'_>) -> Result<Vec<u16>, EarlyReply> {
    let Some(uuids) = uvm::mapping_gpus(case.head(), &case.scratch.bytes) else {
        return Err(case.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT)));
    };
    // A GPU that isn't the container's can't be registered.
    let gpus: Option<Vec<u16>> = uuids.into_iter().map(|uuid| gpu_of(case, uuid)).collect();
    gpus.ok_or_else(|| case.answer(Answer::Status(NV_ERR_INVALID_DEVICE)))
}

/// Has UVM map memory. Enters the new mapping beside the old ones before the driver is asked: where the driver fails
/// midway, either may be mapped.
pub(crate) fn map_memory(
    case: &mut Case<'_>,
    lane: &OnLane<'_>,
    trees: &BTreeSet<Tree>,
    span: Span,
    (memory, control): (Source, Option<&Device>),
) -> Result<Reply, EarlyReply> {
    let object = (Client(memory.client), Handle(memory.handle));
    note_user(case, memory.client)?;
    let mut books = case.books();
    let charge = books.ledger.charge_of(object.0, object.1);
    let plan = plan_map(&books.ledger, trees, span, charge);
    plan.iter().flat_map(|plan| &plan.before).for_each(|entry| books.enter(*entry));
    drop(books);
    let plan = case.or_deny(plan)?;
    let status = match control {
        Some(control) => map_from_own_client(case, lane, (memory, control), charge),
        None => Ok(NV_ERR_INVALID_ARGUMENT),
    };
    let after = if matches!(status, Ok(NV_OK)) { plan.mapped } else { plan.not_mapped };
    let mut books = case.books();
    after.into_iter().for_each(|entry| books.enter(entry));
    drop(books);
    case.parts.stakes.free_stakes(lane);
    case.patch(Meaning::Status, status?.into());
    Ok(case.executed(None))
}

/// Maps memory from the monitor's client, and returns the driver's status: memory of a GPU from the stake that stands
/// before its mappings, other memory from a duplicate that is freed afterwards. Refuses memory of a GPU that isn't
/// charged in full, which the mapping would keep alive, and memory for which no stake can stand.
fn map_from_own_client(
    case: &mut Case<'_>,
    _: &OnLane<'_>,
    (memory, control): (Source, &Device),
    charge: Option<ChargeId>,
) -> Result<u32, EarlyReply> {
    let Some(own) = case.parts.driver.own_client() else {
        return Ok(NV_ERR_INVALID_ARGUMENT);
    };
    let source_rm = Rm { release: &case.parts.state.release, device: control };
    let object = (Client(memory.client), Handle(memory.handle));
    let gpu = case.books().ledger.memory_of(object.0, object.1).map(|(gpu, _)| gpu);
    let duplicate = match own.duplicate_from(&source_rm, (memory.client, memory.handle), gpu) {
        Ok(duplicate) => duplicate,
        Err(Failure::Status(status)) => return Ok(status),
        Err(Failure::Errno(errno)) => return Err(errno.into()),
    };
    let own_rm = Rm { release: &case.parts.state.release, device: &own.control };
    let bytes = case.books().ledger.bytes_of(object.0, object.1);
    let is_larger = |bytes| own_rm.is_larger_than(own.client, duplicate, bytes);
    let is_of_gpu = || own_rm.is_gpu_memory(own.client, duplicate);
    let decision = chargeable_mapping(bytes, charge, is_larger, is_of_gpu);
    if decision.is_err() {
        own.free_duplicate(duplicate);
    }
    let charge = case.or_deny(decision)?;
    let stake = charge.map(|charge| case.parts.stakes.stake_mappings(&own, charge, duplicate));
    let handle = case.or_deny(stake.unwrap_or(Some(duplicate)).ok_or(Denial::Full("mappings")))?;
    let descriptor = u64::from(own.control.descriptor().cast_unsigned());
    case.patch(Meaning::Descriptor, descriptor);
    case.patch(Meaning::Client, own.client.into());
    case.patch(Meaning::Handle, handle.into());
    let asked = call_uvm(case);
    if stake.is_none() {
        own.free_duplicate(duplicate);
    }
    let descriptor = u64::from(memory.descriptor.cast_unsigned());
    case.patch(Meaning::Descriptor, descriptor);
    case.patch(Meaning::Client, memory.client.into());
    case.patch(Meaning::Handle, memory.handle.into());
    asked?;
    Ok(case.status())
}
