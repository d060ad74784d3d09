//! From an amount of memory to the bytes of a quota, rounded down to whole MiB.

use super::ResolveError;
use super::choice::Chosen;
use super::error::label;
use crate::gpu::Gpu;
use crate::request::{Measure, Quota};
use crate::units::MIB;

/// Refuses a memory list with more values than there are GPUs to share.
pub(super) fn check_length(quota: &Quota, shared: &[Chosen<'_>]) -> Result<(), ResolveError> {
    if quota.amounts.len() <= shared.len() {
        return Ok(());
    }
    Err(ResolveError::TooManyAmounts {
        memory: quota.memory.clone(),
        amounts: quota.amounts.len(),
        gpus: shared.iter().map(|chosen| label(chosen.gpu)).collect(),
    })
}

/// The quota on `gpu`, the `nth` of the shared GPUs in the order of the quota's source.
pub(super) fn limit_bytes(quota: &Quota, nth: usize, gpu: &Gpu) -> Result<u64, ResolveError> {
    // The last value repeats; a list is never empty.
    let amount = quota.amounts.get(nth).or(quota.amounts.last()).copied().unwrap_or(0);
    let total_bytes = u128::from(gpu.memory_bytes);
    let asked_bytes = match quota.measure {
        // Two factors of 64 bits each fit.
        Measure::Parts(parts) => {
            (total_bytes * u128::from(amount)).checked_div(parts.into()).unwrap_or(0)
        }
        Measure::UnitBytes(unit_bytes) => unit_bytes.saturating_mul(amount.into()),
    };
    // Capped at a u64, so it is one.
    let bytes = u64::try_from(asked_bytes.min(total_bytes)).unwrap_or(gpu.memory_bytes);
    match bytes / MIB * MIB {
        0 => Err(ResolveError::NoMemory { memory: quota.memory.clone(), gpu: label(gpu) }),
        limit_bytes => Ok(limit_bytes),
    }
}
