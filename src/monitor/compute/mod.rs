//! The container's shares of its GPUs' computing time: slices and turns.

mod last_turn;
mod orphan_turns;
mod orphans;
mod reach;
mod shares;
mod slices;
mod switch;
mod turns;
mod turns_thread;

pub(crate) use shares::set_slice;
pub(crate) use slices::Slices;
pub(crate) use turns::Turns;
