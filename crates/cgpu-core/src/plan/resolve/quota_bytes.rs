//! From an amount of memory to the bytes of a quota, rounded down to a multiple of 1 MiB.

use super::ResolveError;
use super::choice::Chosen;
use super::error::label;
use crate::gpu::Gpu;
use crate::request::{GIB, Measure, Quota, Spelling};
use crate::units::{MIB, bytes_to_mib};

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

/// The same of GPUs that are still to be chosen.
pub(super) fn check_count(quota: &Quota, count: usize) -> Result<(), ResolveError> {
    let (memory, amounts) = (quota.memory.clone(), quota.amounts.len());
    if amounts <= count {
        return Ok(());
    }
    Err(ResolveError::MoreAmountsThanGpus { memory, amounts, count })
}

/// Refuses a measure by which the amounts are worth more than units of a GiB, or of what the source names,
/// would be: an image may have set the other half of what its user says.
pub(super) fn check_measure(quota: &Quota, gpu: &Gpu) -> Result<(), ResolveError> {
    let memory = || quota.memory.clone();
    // An amount with its own unit is all of one setting.
    let Some(unit_bytes) = quota.unit_bytes else { return Ok(()) };
    if unit_bytes > GIB.into() {
        return Err(ResolveError::LargeUnit { memory: memory() });
    }
    // At most a GiB.
    let unit_bytes = u64::try_from(unit_bytes).unwrap_or(GIB).max(1);
    let whole = gpu.memory_bytes / unit_bytes;
    match quota.measure {
        Measure::Parts(parts) if parts < whole => {
            Err(ResolveError::SmallTotal { memory: memory(), parts, whole, gpu: label(gpu) })
        }
        _ => Ok(()),
    }
}

/// The amount for the `nth` GPU. The last repeats; a list is never empty.
fn amount(quota: &Quota, nth: usize) -> u64 {
    quota.amounts.get(nth).or(quota.amounts.last()).copied().unwrap_or(0)
}

/// Whether `gpu` has less than a size that is asked for, which a quota on it would be cut to.
pub(super) fn is_cut(quota: &Quota, nth: usize, gpu: &Gpu) -> bool {
    let amount = amount(quota, nth);
    match quota.measure {
        Measure::Parts(_) => false,
        Measure::UnitBytes(unit_bytes) => {
            unit_bytes.saturating_mul(amount.into()) > gpu.divisible_bytes().into()
        }
    }
}

/// The quota on `gpu`, the `nth` of the shared GPUs in the order of the quota's source.
pub(super) fn limit_bytes(quota: &Quota, nth: usize, gpu: &Gpu) -> Result<u64, ResolveError> {
    let amount = amount(quota, nth);
    // The neutral names offer what can be had; the documents' ratios are of all the GPU's memory.
    let whole_bytes = match quota.spelling {
        Spelling::Neutral => gpu.divisible_bytes(),
        Spelling::Aliyun | Spelling::Nvidia | Spelling::HostDefault => gpu.memory_bytes,
    };
    let total_bytes = u128::from(whole_bytes);
    let asked_bytes = match quota.measure {
        // Two factors of 64 bits each fit.
        Measure::Parts(parts) => {
            (total_bytes * u128::from(amount)).checked_div(parts.into()).unwrap_or(0)
        }
        Measure::UnitBytes(unit_bytes) => unit_bytes.saturating_mul(amount.into()),
    };
    if quota.spelling == Spelling::Neutral && asked_bytes > total_bytes {
        return Err(ResolveError::MoreThanGpu {
            memory: quota.memory.clone(),
            gpu: label(gpu),
            total_mib: bytes_to_mib(whole_bytes),
        });
    }
    // Capped at a u64, so it is one.
    let bytes = u64::try_from(asked_bytes.min(total_bytes)).unwrap_or(whole_bytes);
    match bytes / MIB * MIB {
        0 => Err(ResolveError::NoMemory { memory: quota.memory.clone(), gpu: label(gpu) }),
        limit_bytes => Ok(limit_bytes),
    }
}
