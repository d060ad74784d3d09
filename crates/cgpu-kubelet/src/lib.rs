//! `cgpu-kubelet`: the kubelet's APIs for devices, and one question of the API by which it uses an engine. By one a
//! plugin reports which devices a node has, and is asked what a container gets; by another the kubelet reports which
//! container has which devices; by [`dra`] it has a driver prepare claims; by the last (CRI) an engine reports which
//! runtimes it has.
//!
//! Owns the messages and their clients. Must not know what a device is: that is the plugin's business.

pub mod api;
pub mod dra;

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
    pub mod plugin_registration {
        include!(concat!(env!("OUT_DIR"), "/pluginregistration.Registration.rs"));
    }
    include!(concat!(env!("OUT_DIR"), "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin.rs"));
    include!(concat!(env!("OUT_DIR"), "/v1alpha1.DRAResourceHealth.rs"));
    pub mod older_cri {
        include!(concat!(env!("OUT_DIR"), "/runtime.v1alpha2.RuntimeService.rs"));
    }
}

pub use engine::{Cdi, Engine, Runtimes};
pub use generated::{
    d_r_a_plugin_client as dra_plugin_client, d_r_a_plugin_server as dra_plugin_server,
    d_r_a_resource_health_client as dra_resource_health_client,
    d_r_a_resource_health_server as dra_resource_health_server, device_plugin_client,
    device_plugin_server, plugin_registration, pod_resources_lister_client,
    pod_resources_lister_server, registration_client, registration_server,
};
pub use kubelet::{Kubelet, connect};
