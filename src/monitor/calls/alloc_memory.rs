//! `NV_ESC_RM_ALLOC_MEMORY`.

use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::case::retry::begin_on_lane;
use crate::monitor::calls::case::{Case, Over};
use crate::monitor::calls::charge::make_charged;
use crate::monitor::calls::gpu_lookup::gpu_on;
use crate::monitor::calls::handles::ToMake;
use crate::rm::Meaning;
use crate::rm::call::Object;

/// `NV_ESC_RM_ALLOC_MEMORY` of a class that shows how much memory there is.
pub(crate) fn allocate_memory(case: &mut Case<'_>, object: Object) -> Result<Reply, Over> {
    let mut lane = begin_on_lane(case)?;
    let gpu = gpu_on(case, &lane, object.client, object.parent);
    let address = case.scratch.field(case.head(), Meaning::Params).unwrap_or(0);
    let descriptor = case.scratch.field(case.head(), Meaning::Descriptor).unwrap_or(0);
    case.patch(Meaning::Params, 0);
    case.patch(Meaning::Descriptor, u64::from(u32::MAX));
    let making = ToMake { object, part: None };
    let made = make_charged(case, &mut lane, making, None, |_| None);
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
