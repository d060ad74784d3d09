//! `NV_ESC_RM_VID_HEAP_CONTROL`: a call of this number allocates memory, frees memory, or asks about memory.

use crate::monitor::caller::Reply;
use crate::monitor::calls::case::retry::begin_on_lane;
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::charge::{NewObject, make_charged};
use crate::monitor::calls::fb_info::show_usage;
use crate::monitor::calls::free::free;
use crate::monitor::calls::gpu_lookup::{find_gpu, find_gpu_on_lane};
use crate::rm::call::{Object, VidHeap};
use crate::rm::class::Use;
use crate::rm::memory;
use crate::rm::number::NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED;
use crate::rm::{Layout, Meaning};

pub(crate) fn serve_heap(
    case: &mut Case<'_>,
    client: u32,
    parent: u32,
    function: VidHeap,
) -> Result<Reply, EarlyReply> {
    match function {
        VidHeap::Free { handle } => return free(case, client, handle),
        VidHeap::Alloc { handle, does, size_bytes, layout: part, .. } => {
            let object = Object { client, parent, handle };
            let asked_bytes = (does == Use::Takes).then_some(size_bytes);
            return allocate_on_heap(case, part, object, asked_bytes);
        }
        _ => {}
    }
    case.still_waits()?;
    case.call()?;
    let part = if let VidHeap::Info { layout } = function { Some(layout) } else { None };
    let gpu = find_gpu(case, client, parent);
    show_usage(case, part, gpu);
    Ok(case.executed(None))
}

fn allocate_on_heap(
    case: &mut Case<'_>,
    part: &'static Layout,
    object: Object,
    asked_bytes: Option<u64>,
) -> Result<Reply, EarlyReply> {
    let mut lane = begin_on_lane(case)?;
    let flags = case.scratch.field(part, Meaning::Flags).unwrap_or(0);
    let provided = flags | u64::from(NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED);
    case.scratch.patch(part, Meaning::Flags, provided);
    let making = NewObject { object, part: Some(part) };
    let made = make_charged(case, &mut lane, making, asked_bytes, |case| {
        memory::given_bytes(part, &case.scratch.bytes)
    });
    case.scratch.patch(part, Meaning::Flags, flags);
    let made = made?;
    let gpu = find_gpu_on_lane(case, &lane, object.client, object.parent);
    show_usage(case, None, gpu);
    Ok(case.executed(made))
}
