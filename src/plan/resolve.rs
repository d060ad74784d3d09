//! Which GPUs of the host a request means, and the quota on each: [`resolve`].
//!
//! Knows the request, the host's GPUs and the rules. Must not know what other
//! containers hold: that is admission. Invariants of a plan made here: each GPU stands
//! in it once; a quota is at least 1 MiB, a whole number of MiB, and at most the GPU's
//! total; the weight is at most `max_inst`.

mod choice;
mod error;
mod limit;

pub use error::ResolveError;

use super::{Kind, Plan, PlannedGpu, Rules};
use crate::inventory::{Gpu, Inventory};
use crate::request::{Quota, Request};
use choice::{Choice, Purpose};

/// The plan that `request` comes to on the GPUs of `inventory`.
///
/// # Errors
///
/// Where the request names what isn't there, contradicts itself, or asks for what a GPU
/// can't give; and where there is nothing to plan ([`Request::not_in_effect`]).
pub fn resolve(
    request: &Request,
    inventory: &Inventory,
    backend: Kind,
    rules: &Rules,
) -> Result<Plan, ResolveError> {
    if let Some(reason) = request.not_in_effect(rules) {
        return Err(ResolveError::NotInEffect { reason });
    }
    let quotas = &request.quotas;
    if let Some(naming) = request.selections.naming_variable()
        && quotas.is_empty()
        && rules.require_quota
    {
        return Err(ResolveError::QuotaRequired { selection: naming.setting.clone() });
    }
    let weight = weight(quotas, rules.max_inst)?;

    let purpose = match quotas.first() {
        Some(quota) => {
            Purpose::Shared { memory: &quota.memory, require_quota: rules.require_quota }
        }
        None => Purpose::Whole,
    };
    let choice = choice::choose(&request.selections, inventory, purpose)?;
    for quota in quotas {
        limit::check_length(quota, choice.shared_in_order_of(quota.source))?;
    }

    let planned = |gpu: &&Gpu| {
        Ok(PlannedGpu {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            minor: gpu.minor,
            memory_total_bytes: gpu.memory_bytes,
            memory_limit_bytes: smallest_limit(quotas, gpu, &choice)?,
        })
    };
    Ok(Plan {
        backend,
        gpus: choice.gpus.iter().map(planned).collect::<Result<_, ResolveError>>()?,
        weight,
        high_priority: !quotas.is_empty() && quotas.iter().all(|quota| quota.high_priority),
    })
}

/// The smaller quota on `gpu`, or `None` where it is the container's as a whole.
fn smallest_limit(
    quotas: &[Quota],
    gpu: &Gpu,
    choice: &Choice<'_>,
) -> Result<Option<u64>, ResolveError> {
    let mut smallest: Option<u64> = None;
    for quota in quotas {
        let shared = choice.shared_in_order_of(quota.source);
        let Some(nth) = shared.iter().position(|other| other.index == gpu.index) else {
            continue;
        };
        let limit_bytes = limit::limit_bytes(quota, nth, gpu)?;
        smallest = Some(smallest.map_or(limit_bytes, |bytes| bytes.min(limit_bytes)));
    }
    Ok(smallest)
}

/// The smallest weight asked for, where saying nothing asks for 1.
fn weight(quotas: &[Quota], max_inst: u32) -> Result<u32, ResolveError> {
    let mut smallest: Option<u32> = None;
    for quota in quotas {
        let weight = match &quota.weight {
            None => 1,
            Some(weight) => {
                u32::try_from(weight.value).ok().filter(|&value| value <= max_inst).ok_or_else(
                    || ResolveError::WeightTooHigh { setting: weight.setting.clone(), max_inst },
                )?
            }
        };
        smallest = Some(smallest.map_or(weight, |other| other.min(weight)));
    }
    Ok(smallest.unwrap_or(1))
}
