//! The monitor: answers the driver calls of one container.
//!
//! The monitor is a process of `cgpu-monitor` ([`daemon`]). The [`gate`] brings the container's calls to it, and is how
//! other programs speak with it. The other modules are the monitor's layers: each uses those below it alone
//! (`tests/layers.rs`).

mod audit;
#[cfg(test)]
mod call_counters;
mod caller;
mod calls;
mod case;
mod compute;
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
