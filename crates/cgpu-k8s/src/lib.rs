//! `cgpu-k8s`: GPUs that Kubernetes shares by memory, `aliyun.com/gpu-mem`.
//!
//! Owns what is reported to the kubelet of a node's GPUs and which of their memory a container gets.
//! Enforces nothing: the variables that a container is made with are the runtime's to read. A crate
//! of its own, so that no runtime links gRPC.

pub mod pod_request;

pub mod authority;

pub mod cluster;

mod server;

pub mod dra;

pub mod environment;

pub mod extender;

pub mod grant;

pub mod inspect;

pub mod node;

pub mod placement;

pub mod plugin;

pub mod pods;

pub mod setup;

pub mod units;

pub mod gpu_modes;

pub mod exclusive;

pub mod annotations;

pub mod xid;

mod args;

mod certificate;

mod complaint;

mod directory;

mod health;

mod identity;

mod kernel_log;

mod lifecycle;

mod node_record;

mod engine_check;

mod inspect_command;

mod pod_events;

mod lease;

pub use args::{Args, InspectArgs};
pub use inspect_command::inspect_cluster;
pub use lifecycle::run;
