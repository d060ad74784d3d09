//! Computing time: which part of a GPU each container gets, as slices of its channel groups.
//!
//! A GPU runs the groups that have work in turn, each for its slice (`NVA06C_CTRL_CMD_SET_TIMESLICE`). What a
//! container has in one turn of all is its [`Round`]: containers share as their rounds do, and
//! who has no work leaves its part to the others. Pure: rules and tenants in, microseconds out.

mod slices;

pub use slices::{MOST_US, Round, Tenant, rounds, slice_us};
