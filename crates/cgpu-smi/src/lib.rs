//! `cgpu-smi`: shows the GPUs of a host and the containers that share them.
//!
//! Owns how a [`Snapshot`](cgpu_cli::view::Snapshot) looks: once, again and again, full screen, and for
//! programs. Must not know where its figures come from. A crate of its own, so that no runtime links
//! what a full screen needs.

mod args;
mod cells;
mod choose;
mod collector;
mod environment;
mod history;
mod print;
mod query;
mod run;
mod sheet;
mod socket;
mod watch;

pub use args::{Args, Format};
pub use print::is_broken_pipe;
pub use run::run;
