//! `cgpu-k8s`: GPUs that Kubernetes shares by memory, `aliyun.com/gpu-mem`.
//!
//! Owns what the kubelet is told of a node's GPUs and which of their memory a container gets. Holds
//! nobody to anything: the variables that a container is made with are the runtime's to read. A crate
//! of its own, so that no runtime links gRPC.

pub mod api;

pub mod ask;

pub mod authority;

pub mod cluster;

mod server;

pub mod environment;

pub mod extender;

pub mod inspect;

pub mod kubelet;

pub mod node;

pub mod place;

pub mod plugin;

pub mod pods;

pub mod setup;

pub mod units;

pub mod uses;

pub mod whole;

pub mod written;

pub mod xid;

mod args;

mod health;

mod kernel_log;

mod life;

mod record;

mod show;

#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    reason = "it is generated"
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/v1beta1.DevicePlugin.rs"));
    include!(concat!(env!("OUT_DIR"), "/v1beta1.Registration.rs"));
    include!(concat!(env!("OUT_DIR"), "/v1.PodResourcesLister.rs"));
}

pub use args::{Args, InspectArgs};
pub use generated::{
    device_plugin_client, device_plugin_server, pod_resources_lister_client,
    pod_resources_lister_server, registration_client, registration_server,
};
pub use life::run;
pub use show::inspect_cluster;
