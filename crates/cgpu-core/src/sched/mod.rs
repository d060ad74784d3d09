//! Computing time: which part of a GPU each container gets.
//!
//! A GPU runs the channel groups that have work in turn, each for its slice
//! (`NVA06C_CTRL_CMD_SET_TIMESLICE`). What a container has in one turn of all is its [`Period`]: containers
//! share as their periods do, and an idle container leaves its part to the others. Where parts are fixed, a
//! container may run in its [`Span`]s of a [`Frame`] alone. Pure: rules and tenants in, microseconds out.

mod frame;
mod slices;

pub use frame::{Frame, Idle, Span, Turn, batch_windows, frame, part, turn_at};
pub use slices::{DEFAULT_SLICE_US, MOST_US, Period, Tenant, batches, periods, slice_us};
