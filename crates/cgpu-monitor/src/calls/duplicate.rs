//! `NV_ESC_RM_DUP_OBJECT`: gives an object, and its memory, another handle. Under the RM lock, [`duplicate`] checks
//! that the state has space, has the driver make the object, and enters its handle. The memory is not charged again. A
//! duplicate of GPU memory that the state doesn't have is freed, and refused: that memory is untracked.

use crate::caller::Reply;
use crate::calls::charge::{NewObject, make, shown_below, unmake};
use crate::calls::groups::{enter_name_of_group, evict_for_handle_of_group};
use crate::case::{Case, EarlyReply, begin_under_rm_lock, note_user};
use crate::decide::{RefusalReason, capacity_for_handle};
use crate::driver::{pin_behind, pin_handle};
use crate::state::UnderRmLock;
use cgpu_core::ledger::{Client, Entry, Handle};
use nvrm::call::Object;

pub(crate) fn duplicate(
    case: &mut Case<'_>,
    object: Object,
    source: (u32, u32),
) -> Result<Reply, EarlyReply> {
    let rm_lock = begin_under_rm_lock(case)?;
    let new_object = NewObject { object, part: None };
    let group = evict_for_handle_of_group(case, source)?;
    let made = make_name(case, &rm_lock, new_object, source)?;
    if let (Some(gpu), Some(made)) = (group, made) {
        enter_name_of_group(case, gpu, made, source);
    }
    drop(rm_lock);
    Ok(case.executed(made))
}

/// Makes an object that keeps the memory of `source` alive. Driver usage attributes it to the GPU of the object above
/// it.
fn make_name(
    case: &mut Case<'_>,
    rm_lock: &UnderRmLock<'_>,
    new_object: NewObject,
    source: (u32, u32),
) -> Result<Option<Object>, EarlyReply> {
    let object = new_object.object;
    note_user(case, object.client)?;
    note_user(case, source.0)?;
    let state = case.state();
    let named = (Client(source.0), Handle(source.1));
    let memory = state.ledger.memory_of(named.0, named.1);
    let gpu = memory.filter(|(_, bytes)| *bytes > 0).map(|(gpu, _)| gpu);
    let is_known = state.ledger.contains(named.0, named.1);
    drop(state);
    // `shown_below` may have entered an object, too, so the objects are counted after it.
    let shown = shown_below(case, rm_lock, object.client, object.parent, gpu);
    let decision = capacity_for_handle(&case.state().ledger);
    case.or_deny(decision)?;
    let made = make(case, new_object)?;
    let Some(made) = made else { return Ok(None) };
    let (client, parent, handle) = (Client(object.client), Handle(object.parent), Handle(made));
    if is_known {
        let device = case.device.as_ref();
        let pin = device.and_then(|device| pin_behind(case.monitor, device, source, (shown, gpu)));
        let entry = Entry::Duplicate { source: named, client, parent, handle, shown };
        case.state().enter(entry);
        pin_handle(case.monitor, (client.0, made), pin);
    } else if case.rm()?.is_gpu_memory(object.client, made) {
        unmake(case, rm_lock, object.client, object.parent, made);
        return Err(case.deny(&RefusalReason::PastMonitor("duplicated")));
    }
    Ok(Some(Object { client: object.client, parent: object.parent, handle: made }))
}
