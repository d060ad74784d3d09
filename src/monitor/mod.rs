//! The monitor: answers the driver calls of one container.
//!
//! The monitor is two processes of `cgpu-monitor`. The *keeper* holds what must not be lost: the sockets, the
//! listeners, the ledger's [`journal`](journal). The *worker* answers calls, and can be replaced at any moment. The
//! [`gate`](crate::gate) brings the container's calls to the monitor.

mod audit;
mod caller;
mod calls;
mod compute;
pub mod decide;
mod driver;
pub mod journal;
pub mod keeper;
mod keeper_socket;
mod lock;
mod log;
#[cfg(test)]
mod model;
mod node;
mod notifier;
mod peer;
mod processes;
mod resident;
mod state;
mod thread;
mod uvm;
pub mod worker;
