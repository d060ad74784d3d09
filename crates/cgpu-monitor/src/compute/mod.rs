//! The container's shares of its GPUs' computing time: slices and turns.

mod last_turn;
mod shares;
mod slices;
mod switch;
mod turns;
mod turns_thread;
mod unsupervised;
mod unsupervised_turns;

pub(crate) use shares::{Shares, set_slice};
pub(crate) use slices::{
    follow_shares_forever, forget_freed_groups, forget_gone_groups, note_slice_tried,
    period_of_groups, read_shares,
};
pub(crate) use turns::{end_turns, set_slices_forever};
pub(crate) use turns_thread::TurnsThread;
pub(crate) use unsupervised::UnsupervisedContainers;
