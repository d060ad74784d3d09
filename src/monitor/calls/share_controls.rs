//! Controls that matter for shares of computing time: a channel group gets its slice before it is scheduled.

use crate::monitor::calls::case::{Case, EarlyReply};
use crate::monitor::calls::gpu_lookup::gpu_of_group;
use crate::monitor::calls::groups::{
    enter_unseen_channel, enter_unseen_group, room_outside_groups,
};
use crate::monitor::compute::set_slice;
use crate::monitor::snapshot::Reach;
use crate::monitor::state::{ChannelName, DueSlice};
use crate::rm::call::Object;
use crate::rm::number::{
    NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE, NVA06C_CTRL_CMD_GPFIFO_SCHEDULE,
    NVA06C_CTRL_CMD_SET_TIMESLICE, NVA06F_CTRL_CMD_GPFIFO_SCHEDULE,
};
use crate::sched::slice_us;

/// Places in `NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS` (ctrl2080gr.h): the flags, whose lowest bit sets the
/// compute mode, and the compute mode. In the mode [`CILP`] no kernel outlasts a slice.
const MODE_FLAGS: usize = 0;

const MODE_COMPUTE: usize = 12;

const SETS_COMPUTE: u32 = 1;

const CILP: u32 = 2;

/// Prepares a control that matters for shares, before the control is made. `true` where the control is not made and
/// its program is told that it was.
pub(crate) fn before_control(
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
            room_for_unseen_channel(case, (client, object))?;
            Ok(false)
        }
        NVA06C_CTRL_CMD_SET_TIMESLICE => {
            let us = case.scratch.params.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
            let Some(gpu) = gpu_of_group(case, client, object) else { return Ok(false) };
            if let Some(us) = us {
                case.books().groups.note_asked_slice(client, object, us);
            }
            Ok(case.parts.slices.shares.round(gpu).is_some())
        }
        NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE if case.parts.slices.shares.sets_modes() => {
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
    let Some(round) = case.parts.slices.round_of_groups(gpu) else { return Ok(()) };
    if !case.books().groups.contains(client, handle) {
        let reach = Reach { process: case.target()?.process, descriptor: 0, engine: 0 };
        let due = DueSlice { client, handle, reach, us: slice_us(round, 1) };
        // An object that takes no slice is no group, and the driver will not schedule it.
        if set_slice(case.rm()?, &due).is_err() {
            return Ok(());
        }
        enter_unseen_group(case, gpu, Object { client, parent: 0, handle })?;
    }
    let due = {
        let books = case.books();
        let resting = case.parts.slices.shares.resting(gpu);
        let due = books.groups.due_slices(gpu, Some(round), &books.processes, &resting);
        due.into_iter().find(|due| (due.client, due.handle) == (client, handle))
    };
    if let Some(due) = due {
        let done = set_slice(case.rm()?, &due);
        if done.is_ok() {
            case.books().groups.note_slice(&due);
        }
        case.parts.slices.note_slice_tried(gpu, done);
    }
    Ok(())
}

/// Acts on a control of the object `name` that was made; `done`: whether the driver did it. A channel that is off the
/// GPU stays off when its program schedules it (H100, `tests/gpu/results`, 2026-11-27).
pub(crate) fn after_control(case: &mut Case<'_>, name: ChannelName, control: u32, done: bool) {
    if control == NVA06C_CTRL_CMD_GPFIFO_SCHEDULE || schedules_a_channel(control) {
        if done && schedules_a_channel(control) && !case.parts.state.books().knows_channel(name) {
            enter_unseen_channel(case, name);
        }
        // The channels that were scheduled may be new, or the first that take turns.
        case.parts.slices.shares.wake();
    }
}

/// Refuses a channel that the books don't know where no more may compute outside groups: it counts as one of these.
fn room_for_unseen_channel(case: &mut Case<'_>, channel: ChannelName) -> Result<(), EarlyReply> {
    if !case.parts.state.books().knows_channel(channel)
        && let Some(gpu) = gpu_of_group(case, channel.0, channel.1)
    {
        room_outside_groups(case, gpu)?;
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
    fn a_channel_of_each_generation_is_scheduled_by_the_same_control() {
        assert!([0xa06f_0103, 0xa16f_0103, 0xc36f_0103].into_iter().all(schedules_a_channel));
        assert!(![0xa06c_0101, 0xc36f_0104, 0xa06f_0111].into_iter().any(schedules_a_channel));
    }

    #[test]
    fn a_compute_mode_that_is_asked_for_is_cilp() {
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
