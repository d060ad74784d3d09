//! Serves calls: [`dispatch`] has the steps of one call, and the kinds of calls to the resource manager have files of
//! their own. Those to `nvidia-uvm` are in [`uvm`](crate::uvm).

mod alloc;
mod charge;
mod control;
mod copied_control;
mod dispatch;
mod duplicate;
mod exports;
mod groups;
mod processor_budget;
mod threads;

#[cfg(test)]
pub(crate) use dispatch::serve;
pub(crate) use threads::{CallService, CallThreads};
