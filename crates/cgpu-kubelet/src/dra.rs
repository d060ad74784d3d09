//! The messages of the kubelet's APIs for drivers of Dynamic Resource Allocation: of plugin registration
//! (`k8s.io/kubelet/pkg/apis/pluginregistration/v1/api.proto`), of DRA v1 (`k8s.io/kubelet/pkg/apis/dra/v1/api.proto`,
//! Kubernetes 1.34 and later), and of the devices' health (`k8s.io/kubelet/pkg/apis/dra-health/v1alpha1/api.proto`).
#![allow(missing_docs, reason = "the fields are the specification's")]

use std::collections::BTreeMap;

use prost::Message;

/// The type of a plugin that is such a driver.
pub const PLUGIN_TYPE: &str = "DRAPlugin";

/// The service by which claims are prepared, as a plugin lists it.
pub const SERVICE: &str = "v1.DRAPlugin";

/// The service that reports health, as a plugin lists it.
pub const HEALTH_SERVICE: &str = "v1alpha1.DRAResourceHealth";

/// Values of [`DeviceHealth::health`].
pub const HEALTHY: i32 = 1;
pub const UNHEALTHY: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub struct InfoRequest {}

/// What a plugin is, and where it is asked.
#[derive(Clone, PartialEq, Message)]
pub struct PluginInfo {
    /// [`PLUGIN_TYPE`].
    #[prost(string, tag = "1")]
    pub plugin_type: String,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub endpoint: String,
    #[prost(string, repeated, tag = "4")]
    pub supported_versions: Vec<String>,
}

/// Whether the kubelet takes the plugin.
#[derive(Clone, PartialEq, Message)]
pub struct RegistrationStatus {
    #[prost(bool, tag = "1")]
    pub plugin_registered: bool,
    #[prost(string, tag = "2")]
    pub error: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct RegistrationStatusResponse {}

/// Claims are to be prepared.
#[derive(Clone, PartialEq, Message)]
pub struct NodePrepareResourcesRequest {
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

/// A claim, by name and UID.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Claim {
    #[prost(string, tag = "1")]
    pub namespace: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub name: String,
}

/// What became of each, by UID.
#[derive(Clone, PartialEq, Message)]
pub struct NodePrepareResourcesResponse {
    #[prost(btree_map = "string, message", tag = "1")]
    pub claims: BTreeMap<String, NodePrepareResourceResponse>,
}

/// A claim's devices, or why it isn't prepared.
#[derive(Clone, PartialEq, Message)]
pub struct NodePrepareResourceResponse {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
    #[prost(string, tag = "2")]
    pub error: String,
}

/// A device of a claim, with the CDI devices that bring it.
#[derive(Clone, PartialEq, Message)]
pub struct Device {
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    #[prost(string, tag = "2")]
    pub pool_name: String,
    #[prost(string, tag = "3")]
    pub device_name: String,
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
    #[prost(string, optional, tag = "5")]
    pub share_id: Option<String>,
}

/// Claims whose pods are gone.
#[derive(Clone, PartialEq, Message)]
pub struct NodeUnprepareResourcesRequest {
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

/// What became of each, by UID.
#[derive(Clone, PartialEq, Message)]
pub struct NodeUnprepareResourcesResponse {
    #[prost(btree_map = "string, message", tag = "1")]
    pub claims: BTreeMap<String, NodeUnprepareResourceResponse>,
}

/// Why a claim can't be let go, if it can't.
#[derive(Clone, PartialEq, Message)]
pub struct NodeUnprepareResourceResponse {
    #[prost(string, tag = "1")]
    pub error: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct NodeWatchResourcesRequest {}

/// The health of all devices.
#[derive(Clone, PartialEq, Message)]
pub struct NodeWatchResourcesResponse {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<DeviceHealth>,
}

/// The health of one.
#[derive(Clone, PartialEq, Message)]
pub struct DeviceHealth {
    #[prost(message, optional, tag = "1")]
    pub device: Option<DeviceIdentifier>,
    #[prost(int32, tag = "2")]
    pub health: i32,
    /// Seconds since 1970.
    #[prost(int64, tag = "3")]
    pub last_updated_time: i64,
    /// Seconds after which the health is unknown if it isn't reported again.
    #[prost(int64, tag = "4")]
    pub health_check_timeout_seconds: i64,
    #[prost(string, tag = "5")]
    pub message: String,
}

/// A device, as its slice names it.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct DeviceIdentifier {
    #[prost(string, tag = "1")]
    pub pool_name: String,
    #[prost(string, tag = "2")]
    pub device_name: String,
}
