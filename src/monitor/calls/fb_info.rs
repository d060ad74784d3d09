//! Calls that show how much memory a GPU has: they show the container's quota.
//!
//! The driver's figures of the whole GPU never go to the caller. Where the call's GPU, and so the quota, isn't known,
//! the call shows 0 bytes.

use crate::monitor::caller::{Copy, Reply};
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::gpu_lookup::find_gpu;
use crate::monitor::calls::make_control::make_control;
use crate::monitor::decide::shown_memory;
use crate::rm::number::NV_ERR_INVALID_PARAM_STRUCT;
use crate::rm::{Answer, Layout, Meaning, fbinfo};

/// Puts the quota, and the free bytes of it, into the totals of an `NVOS32` and of `part`.
pub(crate) fn show_usage(case: &mut Case<'_>, part: Option<&'static Layout>, gpu: Option<usize>) {
    let shown = shown_memory(gpu.and_then(|gpu| case.books().ledger.usage(gpu)));
    let (total, free) = (shown.total_bytes, shown.free_bytes);
    // The GPU's own figures don't go to the caller, whatever the driver left in these fields.
    for part in [Some(case.head()), part].into_iter().flatten() {
        let largest = case.scratch.field(part, Meaning::LargestFree).unwrap_or(0).min(free);
        case.scratch.patch(part, Meaning::TotalMemory, total);
        case.scratch.patch(part, Meaning::FreeMemory, free);
        case.scratch.patch(part, Meaning::LargestFree, largest);
    }
}

/// Makes `NV2080_CTRL_CMD_FB_GET_INFO`, in either form: with its list in the parameters, or elsewhere.
pub(crate) fn show_memory(
    case: &mut Case<'_>,
    (client, object): (u32, u32),
    control: u32,
    (address, size): (u64, u32),
) -> Result<Reply, EarlyReply> {
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    let params = fbinfo::layout(&case.parts.state.release, control, size);
    let Some(params) = params else {
        let answer = Answer::Status(NV_ERR_INVALID_PARAM_STRUCT);
        return Err(case.answer(answer));
    };
    case.read_params(address, size)?;
    let list = fbinfo::list(&case.parts.state.release, control, &case.scratch.params);
    let list = case.or_deny(list)?;
    if let fbinfo::List::Elsewhere { address, entries } = list {
        case.scratch.list.reset_list(entries * fbinfo::ENTRY_BYTES);
        case.read_piece(address, (0, case.scratch.list.len()))?;
        let copy = case.scratch.list.address();
        if let Some(patch) = params.patch(Meaning::List, copy) {
            let _ = patch.apply(&mut case.scratch.params);
        }
    }
    case.still_waits()?;
    if make_control(case, address)? {
        show_quota(case, (client, object), list);
        case.write_back(1, address, Copy::Params);
    }
    if let fbinfo::List::Elsewhere { address, .. } = list {
        if let Some(patch) = params.patch(Meaning::List, address) {
            let _ = patch.apply(&mut case.scratch.params);
        }
        case.write_back(2, address, Copy::Piece(0, case.scratch.list.len()));
    }
    Ok(case.executed(None))
}

/// Puts the quota in the place of the GPU's memory, into the list that goes back.
fn show_quota(case: &mut Case<'_>, (client, object): (u32, u32), list: fbinfo::List) {
    let usage = find_gpu(case, client, object).and_then(|gpu| case.books().ledger.usage(gpu));
    let shown = shown_memory(usage);
    let (bytes, offset, entries) = match list {
        fbinfo::List::Inline { offset, entries } => (&mut case.scratch.params, offset, entries),
        fbinfo::List::Elsewhere { entries, .. } => (&mut case.scratch.list, 0, entries),
    };
    let patches: Vec<_> = fbinfo::patches(bytes, offset, entries, shown).collect();
    for patch in patches {
        let _ = patch.apply(bytes);
    }
}
