//! The container's shares of its GPUs' computing time: slices and turns.

pub(crate) mod groups;
pub(crate) mod last_turn;
pub(crate) mod orphan_turns;
pub(crate) mod orphans;
pub(crate) mod reach;
pub(crate) mod shares;
pub(crate) mod slices;
pub(crate) mod turns;
pub(crate) mod turns_thread;
