//! `cgpu-kubelet`: the kubelet's APIs for devices, and one question of the API by which it uses an engine. By one a
//! plugin reports which devices a node has, and is asked what a container gets; by another the kubelet reports which
//! container has which devices; by the third (CRI) an engine reports which runtimes it has.
//!
//! Owns the messages and their clients. Must not know what a device is: that is the plugin's business.

pub mod api;

mod engine;
mod kubelet;

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
    pub mod cri {
        include!(concat!(env!("OUT_DIR"), "/runtime.v1.RuntimeService.rs"));
    }
    pub mod older_cri {
        include!(concat!(env!("OUT_DIR"), "/runtime.v1alpha2.RuntimeService.rs"));
    }
}

pub use engine::{Engine, Runtimes};
pub use generated::{
    device_plugin_client, device_plugin_server, pod_resources_lister_client,
    pod_resources_lister_server, registration_client, registration_server,
};
pub use kubelet::{Kubelet, connect};
