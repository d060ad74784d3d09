//! `NV_ESC_RM_CONTROL`: makes a control on copies of its parameters and of what the parameters point at.
//!
//! [`control()`] looks the control up in the [table](nvrm::control), copies the parameters, checks the clients that
//! they name, and makes the control in the way of its kind. The driver follows addresses in the memory of the process
//! that asks it, the monitor. So no address that the caller chose is left in what the driver is given. An opaque
//! control is made as it is, unless its parameters hold an address of the monitor's own.
//!
//! - Controls that show how much memory a GPU has show the container's quota ([`show_memory`]). The driver usage of the
//!   whole GPU never goes to the caller. If the call's GPU, and so the quota, isn't known, the call shows 0 bytes.
//! - Before a control that schedules a channel group, the group gets its slice ([`before_control`]).

use nix::errno::Errno;

use crate::caller::{Copy, Reply};
use crate::calls::charge::{find_gpu, gpu_of_group};
use crate::calls::copied_control::{begin_control, make_control, write_params_back};
use crate::calls::exports::export_or_import;
use crate::calls::groups::{capacity_outside_groups, enter_unseen_channel, enter_unseen_group};
use crate::case::{Case, EarlyReply, faked_success};
use crate::compute::{note_slice_tried, period_of_groups, set_slice};
use crate::decide::{RefusalReason, shown_memory};
use crate::snapshot::Reach;
use crate::state::{ChannelName, ScheduledSlice};
use cgpu_core::sched::slice_us;
use nvrm::call::Object;
use nvrm::control::{
    ControlKind, Direction, MAX_PARAMS_BYTES, Pieces, check, clients, points_into, processes,
};
use nvrm::number::{
    NV_ERR_INVALID_ARGUMENT, NV_ERR_INVALID_PARAM_STRUCT,
    NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE, NVA06C_CTRL_CMD_GPFIFO_SCHEDULE,
    NVA06C_CTRL_CMD_SET_TIMESLICE, NVA06F_CTRL_CMD_GPFIFO_SCHEDULE,
};
use nvrm::{Answer, Call, Meaning, fbinfo};

/// Places in `NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS` (ctrl2080gr.h): the flags, whose lowest bit sets the
/// compute mode, and the compute mode. In the mode [`CILP`] no kernel outlasts a slice.
const MODE_FLAGS: usize = 0;
const MODE_COMPUTE: usize = 12;
const SETS_COMPUTE: u32 = 1;
const CILP: u32 = 2;

pub(crate) fn control(case: &mut Case<'_>, call: &Call) -> Result<Reply, EarlyReply> {
    let Call::Control { client, object, command: control, params, params_size, flags } = *call
    else {
        return Err(Errno::EINVAL.into());
    };
    let known = case.or_deny(check(&case.monitor.release, control, flags))?;
    if let ControlKind::FakedSuccess(_) = known {
        return Err(faked_success(case));
    }
    if known == ControlKind::Memory {
        let params = (params, params_size);
        return show_memory(case, (client, object), control, params);
    }
    let size = usize::try_from(params_size).unwrap_or(usize::MAX);
    if size > MAX_PARAMS_BYTES {
        return Err(case.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT)));
    }
    // If the caller gives no parameters, the driver answers by their size.
    if params != 0 {
        case.read_params(params, size)?;
    }
    if !clients::are_all(client, control, &case.scratch.params) {
        return Err(case.deny(&RefusalReason::ForeignClient { control }));
    }
    match known {
        ControlKind::Nested => nested(case, control, params),
        ControlKind::Processes => processes(case, control, params),
        ControlKind::Exports(does) => export_or_import(case, does, client, params),
        ControlKind::Opaque if points_into(&case.scratch.params, &case.monitor.own_ranges) => {
            Err(case.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT)))
        }
        // These kinds are answered above.
        ControlKind::Memory | ControlKind::FakedSuccess(_) | ControlKind::Refused(_) => {
            Err(case.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT)))
        }
        ControlKind::Flat | ControlKind::Opaque => {
            begin_control(case)?;
            if before_control(case, (client, object), control)? {
                return Err(faked_success(case));
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
    // The driver needs an address even if there are no bytes.
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

/// Makes a control that lists processes: it lists the container's, under the pids that the caller knows.
fn processes(case: &mut Case<'_>, control: u32, params: u64) -> Result<Reply, EarlyReply> {
    if !processes::is_size(control, case.scratch.params.len()) {
        return Err(case.answer(Answer::Status(NV_ERR_INVALID_PARAM_STRUCT)));
    }
    let container_processes = case.state().processes.clone();
    let target = case.target()?;
    let numbers = case.monitor.pid_maps.of(target.tid, target.process, &container_processes);
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

/// Makes `NV2080_CTRL_CMD_FB_GET_INFO`, in either form: with its list in the parameters, or elsewhere.
fn show_memory(
    case: &mut Case<'_>,
    (client, object): (u32, u32),
    control: u32,
    (address, size): (u64, u32),
) -> Result<Reply, EarlyReply> {
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    let params = fbinfo::layout(&case.monitor.release, control, size);
    let Some(params) = params else {
        let answer = Answer::Status(NV_ERR_INVALID_PARAM_STRUCT);
        return Err(case.answer(answer));
    };
    case.read_params(address, size)?;
    let list = fbinfo::list(&case.monitor.release, control, &case.scratch.params);
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
    let usage = find_gpu(case, client, object).and_then(|gpu| case.state().ledger.usage(gpu));
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

/// Prepares a control that matters for shares, before the control is made. `true` if the control is not made and its
/// success is faked.
fn before_control(
    case: &mut Case<'_>,
    (client, object): (u32, u32),
    control: u32,
) -> Result<bool, EarlyReply> {
    match control {
        NVA06C_CTRL_CMD_GPFIFO_SCHEDULE => {
            set_slice_before_schedule(case, client, object)?;
            Ok(false)
        }
        control if schedules_a_channel(control) => {
            capacity_for_unseen_channel(case, (client, object))?;
            Ok(false)
        }
        NVA06C_CTRL_CMD_SET_TIMESLICE => {
            let us = case.scratch.params.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
            let Some(gpu) = gpu_of_group(case, client, object) else { return Ok(false) };
            if let Some(us) = us {
                case.state().groups.note_asked_slice(client, object, us);
            }
            Ok(case.monitor.shares.round(gpu).is_some())
        }
        NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE if case.monitor.shares.sets_modes() => {
            force_cilp(&mut case.scratch.params);
            Ok(false)
        }
        _ => Ok(false),
    }
}

/// Sets the slice of a group before the driver schedules the group.
fn set_slice_before_schedule(
    case: &mut Case<'_>,
    client: u32,
    handle: u32,
) -> Result<(), EarlyReply> {
    let Some(gpu) = gpu_of_group(case, client, handle) else { return Ok(()) };
    let Some(round) = period_of_groups(case.monitor, gpu) else { return Ok(()) };
    if !case.state().groups.contains(client, handle) {
        let reach = Reach { process: case.target()?.process, descriptor: 0, engine: 0 };
        let due = ScheduledSlice { client, handle, reach, us: slice_us(round, 1) };
        // An object that takes no slice is no group, and the driver will not schedule it.
        if set_slice(case.rm()?, &due).is_err() {
            return Ok(());
        }
        enter_unseen_group(case, gpu, Object { client, parent: 0, handle })?;
    }
    let due = {
        let state = case.state();
        let resting = case.monitor.shares.resting(gpu);
        let due = state.groups.scheduled_slices(gpu, Some(round), &state.processes, &resting);
        due.into_iter().find(|due| (due.client, due.handle) == (client, handle))
    };
    if let Some(due) = due {
        let done = set_slice(case.rm()?, &due);
        if done.is_ok() {
            case.state().groups.note_slice(&due);
        }
        note_slice_tried(case.monitor, gpu, done);
    }
    Ok(())
}

/// Acts on a control of the object `name` that was made; `done`: whether the driver did it. A channel that is off the
/// GPU stays off when its program schedules it (H100, `tests/gpu/results`, 2026-11-27).
fn after_control(case: &mut Case<'_>, name: ChannelName, control: u32, done: bool) {
    if control == NVA06C_CTRL_CMD_GPFIFO_SCHEDULE || schedules_a_channel(control) {
        if done && schedules_a_channel(control) && !case.monitor.state().knows_channel(name) {
            enter_unseen_channel(case, name);
        }
        // The channels that were scheduled may be new, or the first that take turns.
        case.monitor.shares.wake();
    }
}

/// Refuses a channel that the state doesn't have if no more may compute outside groups: it counts as one of these.
fn capacity_for_unseen_channel(
    case: &mut Case<'_>,
    channel: ChannelName,
) -> Result<(), EarlyReply> {
    if !case.monitor.state().knows_channel(channel)
        && let Some(gpu) = gpu_of_group(case, channel.0, channel.1)
    {
        capacity_outside_groups(case, gpu)?;
    }
    Ok(())
}

/// Whether a control schedules a channel: `NVA06F_CTRL_CMD_GPFIFO_SCHEDULE`, and the same control of the class of each
/// later generation.
fn schedules_a_channel(control: u32) -> bool {
    const ANY_GENERATION: u32 = 0xff << 24;
    control | ANY_GENERATION == NVA06F_CTRL_CMD_GPFIFO_SCHEDULE | ANY_GENERATION
}

/// Changes parameters that set a compute mode to set [`CILP`], in which a kernel is interrupted at any instruction.
/// Otherwise a program's slice would last as long as its kernels.
fn force_cilp(params: &mut [u8]) {
    let flags = params.get(MODE_FLAGS..).and_then(|rest| rest.first_chunk());
    let sets = flags.is_some_and(|bytes| u32::from_le_bytes(*bytes) & SETS_COMPUTE != 0);
    if let Some(mode) = params.get_mut(MODE_COMPUTE..MODE_COMPUTE + 4).filter(|_| sets) {
        mode.copy_from_slice(&CILP.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_control_schedules_channels_of_every_generation() {
        assert!([0xa06f_0103, 0xa16f_0103, 0xc36f_0103].into_iter().all(schedules_a_channel));
        assert!(![0xa06c_0101, 0xc36f_0104, 0xa06f_0111].into_iter().any(schedules_a_channel));
    }

    #[test]
    fn requested_compute_mode_becomes_cilp() {
        let params = |flags: u32, mode: u32| {
            let mut params = [0; 32];
            params[..4].copy_from_slice(&flags.to_le_bytes());
            params[12..16].copy_from_slice(&mode.to_le_bytes());
            force_cilp(&mut params);
            u32::from_le_bytes([params[12], params[13], params[14], params[15]])
        };
        assert_eq!([params(1, 0), params(3, 1), params(1, 2)], [CILP; 3]);
        assert_eq!(params(2, 0), 0, "it sets the mode of graphics alone");
        force_cilp(&mut [1, 0, 0]);
    }
}
