//! Controls by which a debugger reads or writes much memory: made part by part.
//!
//! Core dumps and debuggers access megabytes at once, of which the worker keeps no copy. Each part is a call of its own
//! to the driver, on a copy of this part. The bytes that were read go to the caller at once, while the caller waits. A
//! control that is made again reads or writes the same bytes.

use crate::monitor::caller::Reply;
use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::make_control::make_control;
use crate::rm::control::Direction;
use crate::rm::control::debug::Access;

pub(crate) fn access(
    case: &mut Case<'_>,
    access: &Access,
    params: u64,
) -> Result<Reply, EarlyReply> {
    // No reply to this call is kept.
    case.scratch.input.clear();
    for part in access.parts() {
        case.scratch.list.reset(part.bytes);
        if access.direction == Direction::In {
            case.read_piece(part.address, (0, part.bytes))?;
        }
        case.still_waits()?;
        let copy = case.scratch.list.address();
        for patch in part.patches(copy) {
            let _ = patch.apply(&mut case.scratch.params);
        }
        let made = make_control(case, params);
        for patch in access.patches() {
            let _ = patch.apply(&mut case.scratch.params);
        }
        if !made? {
            break;
        }
        if access.direction == Direction::Out {
            case.still_waits()?;
            case.target()?.write(&[Some((part.address, &case.scratch.list))])?;
        }
    }
    Ok(case.executed(None))
}
