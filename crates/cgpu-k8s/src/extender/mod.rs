//! `cgpu-scheduler-extender`: which GPU of a node a pod gets, decided before the pod is on the node.
//!
//! Kubernetes' scheduler knows the sum of a node's units, and asks us which nodes have the capacity on as many
//! GPUs as the pod's memory is to be on, and has us bind the pod. What is decided is written on the pod; the
//! node's device plugin follows it.

pub mod choice;

pub mod fleet;

pub mod preemption;

pub mod protocol;

mod args;

mod bind;

mod certificates;

mod leadership;

mod lifecycle;

mod server;

mod watcher;

pub use args::ExtenderArgs;
pub use lifecycle::run;
