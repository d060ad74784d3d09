//! The monitor: answers the driver calls of one container.
//!
//! It is two processes of `cgpu-monitor`. The *keeper* holds what must not be lost: the sockets, the listeners,
//! the ledger's [`journal`](journal). The *worker* answers calls, and can be replaced at any moment.
//! How calls come here is the [`gate`](crate::gate)'s.

mod audit;
mod bell;
mod caller;
pub mod calls;
mod compute;
mod driver;
pub mod journal;
pub mod keeper;
mod keeper_socket;
mod lock;
mod log;
#[cfg(test)]
mod model;
mod node;
mod processes;
mod resident;
mod state;
mod thread;
mod uvm;
pub mod worker;
