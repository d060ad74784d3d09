//! The monitor: answers the driver calls of one container.
//!
//! The monitor is a process of `cgpu-monitor` ([`daemon`]). The [`gate`] brings the container's calls to it, and is how other
//! programs speak with it. The other modules are the monitor's rooms: each uses those below it alone (`tests/rooms.rs`).

mod audit;
mod caller;
mod calls;
mod case;
mod compute;
#[cfg(test)]
mod counted;
pub mod daemon;
pub mod decide;
mod driver;
pub mod gate;
mod log;
#[cfg(test)]
mod model;
mod node;
mod own_ranges;
mod processes;
mod shared;
mod snapshot;
mod state;
mod sync;
mod uvm;
