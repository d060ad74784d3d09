//! `NV_ESC_RM_CONTROL`: makes a control on copies of its parameters and of what the parameters point at.
//!
//! [`control()`] looks the control up in the [table](crate::rm::control), copies the parameters, checks the clients
//! that they name, and makes the control in the way of its kind. The driver follows addresses in the memory of the
//! process that asks it, the monitor. So no address that the caller chose is left in what the driver is given. An opaque
//! control is made as it is, unless its parameters hold an address of the monitor's own.

use nix::errno::Errno;

use crate::monitor::caller::{Copy, Reply};
use crate::monitor::calls::case::{Case, EarlyReply, pretended};
use crate::monitor::calls::export::export_or_import;
use crate::monitor::calls::fb_info::show_memory;
use crate::monitor::calls::make_control::{begin_control, make_control, write_params_back};
use crate::monitor::calls::share_controls::{after_control, before_control};
use crate::monitor::decide::Denial;
use crate::rm::control::{
    Direction, Known, MAX_PARAMS_BYTES, Pieces, check, clients, points_into, processes,
};
use crate::rm::number::{NV_ERR_INVALID_ARGUMENT, NV_ERR_INVALID_PARAM_STRUCT};
use crate::rm::{Answer, Call};

pub(crate) fn control(case: &mut Case<'_>, call: &Call) -> Result<Reply, EarlyReply> {
    let Call::Control { client, object, command: control, params, params_size, flags } = *call
    else {
        return Err(Errno::EINVAL.into());
    };
    let known = case.or_deny(check(&case.parts.state.release, control, flags))?;
    if let Known::Pretended(_) = known {
        return Err(pretended(case));
    }
    if known == Known::Memory {
        let params = (params, params_size);
        return show_memory(case, (client, object), control, params);
    }
    let size = usize::try_from(params_size).unwrap_or(usize::MAX);
    if size > MAX_PARAMS_BYTES {
        return Err(case.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT)));
    }
    // Where the caller gives no parameters, the driver answers by their size.
    if params != 0 {
        case.read_params(params, size)?;
    }
    if !clients::are_all(client, control, &case.scratch.params) {
        return Err(case.deny(&Denial::ForeignClient { control }));
    }
    match known {
        Known::Nested => nested(case, control, params),
        Known::Processes => processes(case, control, params),
        Known::Exports(does) => export_or_import(case, does, client, params),
        Known::Opaque if points_into(&case.scratch.params, &case.parts.state.own_ranges) => {
            Err(case.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT)))
        }
        // These kinds are answered above.
        Known::Memory | Known::Pretended(_) | Known::Refused(_) => {
            Err(case.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT)))
        }
        Known::Flat | Known::Opaque => {
            begin_control(case)?;
            if before_control(case, (client, object), control)? {
                return Err(pretended(case));
            }
            let done = make_control(case, params)?;
            after_control(case, (client, object), control, done);
            write_params_back(case, params, done);
            Ok(case.executed(None))
        }
    }
}

/// Makes a control whose parameters point at arrays, on copies of the arrays.
fn nested(case: &mut Case<'_>, control: u32, params: u64) -> Result<Reply, EarlyReply> {
    let pieces = Pieces::of(control, &case.scratch.params);
    let pieces = pieces.map_err(|answer| case.answer(answer))?;
    // The driver needs an address even where there are no bytes.
    case.scratch.list.reset_list(pieces.bytes().max(8));
    for piece in pieces.iter().filter(|piece| piece.direction != Direction::Out) {
        case.read_piece(piece.address, (piece.at, piece.bytes))?;
    }
    begin_control(case)?;
    let base = case.scratch.list.address();
    for patch in pieces.to_copies(base) {
        let _ = patch.apply(&mut case.scratch.params);
    }
    let made = make_control(case, params);
    for patch in pieces.back() {
        let _ = patch.apply(&mut case.scratch.params);
    }
    let done = made?;
    write_params_back(case, params, done);
    if done {
        for (place, piece) in pieces.iter().enumerate() {
            if piece.direction != Direction::In {
                case.write_back(2 + place, piece.address, Copy::Piece(piece.at, piece.bytes));
            }
        }
    }
    Ok(case.executed(None))
}

/// Makes a control that tells of processes: it tells of the container's, under the pids that the caller knows.
fn processes(case: &mut Case<'_>, control: u32, params: u64) -> Result<Reply, EarlyReply> {
    if !processes::is_size(control, case.scratch.params.len()) {
        return Err(case.answer(Answer::Status(NV_ERR_INVALID_PARAM_STRUCT)));
    }
    let container_processes = case.books().processes.clone();
    let target = case.target()?;
    let numbers = case.parts.callers.pid_maps.of(target.tid, target.process, &container_processes);
    case.still_waits()?;
    let scratch = &mut *case.scratch;
    scratch.list.reset(scratch.params.len());
    scratch.list.copy_from_slice(&scratch.params);
    processes::ask(control, &mut case.scratch.params, |pid| numbers.on_host(pid));
    if make_control(case, params)? {
        let scratch = &mut *case.scratch;
        processes::show(control, &mut scratch.params, &scratch.list, |pid| numbers.in_ns(pid));
        case.write_back(1, params, Copy::Params);
    }
    Ok(case.executed(None))
}
