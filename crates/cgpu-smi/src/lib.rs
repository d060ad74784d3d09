//! `cgpu-smi`: shows the GPUs of a host and the containers that share them.
//!
//! Owns how a [`Snapshot`](cgpu_cli::view::Snapshot) looks: once, again and again, full screen, and for
//! programs. Must not know where its figures come from. A crate of its own, so that no runtime links
//! what a full screen needs.

mod args;
mod cells;
mod collector;
mod command;
mod environment;
mod gpu_choice;
mod history;
mod printer;
mod query;
mod sheet;
mod socket;
mod watch;

pub use args::{Args, Format};
pub use command::run;
pub use printer::is_broken_pipe;
