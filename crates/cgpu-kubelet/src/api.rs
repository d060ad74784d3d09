//! The messages of the kubelet's device-plugin API v1beta1
//! (`k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto`) and of its pod-resources API v1
//! (`k8s.io/kubelet/pkg/apis/podresources/v1/api.proto`), as far as they are used.
#![allow(missing_docs, reason = "the fields are the specification's")]

use std::collections::BTreeMap;

use prost::Message;

/// The API version that a plugin reports to the kubelet.
pub const VERSION: &str = "v1beta1";

/// What a device's health is called that can be given out.
pub const HEALTHY: &str = "Healthy";

/// What it is called otherwise.
pub const UNHEALTHY: &str = "Unhealthy";

/// The most bytes of a question that are taken: all units of a node may be named in one.
pub const MOST_ASKED_BYTES: usize = 16 << 20;

#[derive(Clone, PartialEq, Message)]
pub struct Empty {}

/// A plugin makes itself known.
#[derive(Clone, PartialEq, Message)]
pub struct RegisterRequest {
    #[prost(string, tag = "1")]
    pub version: String,
    /// The name of its socket, next to the kubelet's.
    #[prost(string, tag = "2")]
    pub endpoint: String,
    #[prost(string, tag = "3")]
    pub resource_name: String,
    #[prost(message, optional, tag = "4")]
    pub options: Option<DevicePluginOptions>,
}

/// What of the API a plugin wants to be asked.
#[derive(Clone, PartialEq, Message)]
pub struct DevicePluginOptions {
    #[prost(bool, tag = "1")]
    pub pre_start_required: bool,
    #[prost(bool, tag = "2")]
    pub get_preferred_allocation_available: bool,
}

/// All devices.
#[derive(Clone, PartialEq, Message)]
pub struct ListAndWatchResponse {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
}

/// A device, here: a unit of a GPU's memory.
#[derive(Clone, PartialEq, Message)]
pub struct Device {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(string, tag = "2")]
    pub health: String,
}

/// Which devices the kubelet should choose.
#[derive(Clone, PartialEq, Message)]
pub struct PreferredAllocationRequest {
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerPreferredAllocationRequest>,
}

/// Which of these for one container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerPreferredAllocationRequest {
    #[prost(string, repeated, tag = "1")]
    pub available_device_ids: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub must_include_device_ids: Vec<String>,
    #[prost(int32, tag = "3")]
    pub allocation_size: i32,
}

/// The devices to be chosen.
#[derive(Clone, PartialEq, Message)]
pub struct PreferredAllocationResponse {
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerPreferredAllocationResponse>,
}

/// The devices to be chosen for one container.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerPreferredAllocationResponse {
    #[prost(string, repeated, tag = "1")]
    pub device_ids: Vec<String>,
}

/// Containers get devices.
#[derive(Clone, PartialEq, Message)]
pub struct AllocateRequest {
    #[prost(message, repeated, tag = "1")]
    pub container_requests: Vec<ContainerAllocateRequest>,
}

/// A container gets these.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerAllocateRequest {
    #[prost(string, repeated, tag = "1")]
    pub device_ids: Vec<String>,
}

/// What containers are made with.
#[derive(Clone, PartialEq, Message)]
pub struct AllocateResponse {
    #[prost(message, repeated, tag = "1")]
    pub container_responses: Vec<ContainerAllocateResponse>,
}

/// What a container is made with. Mounts, nodes and CDI devices, which the API has, are the runtime's
/// business here.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerAllocateResponse {
    #[prost(btree_map = "string, string", tag = "1")]
    pub envs: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "4")]
    pub annotations: BTreeMap<String, String>,
}

/// A container is about to start.
#[derive(Clone, PartialEq, Message)]
pub struct PreStartContainerRequest {
    #[prost(string, repeated, tag = "1")]
    pub device_ids: Vec<String>,
}

/// Nothing is to be said to that.
#[derive(Clone, PartialEq, Message)]
pub struct PreStartContainerResponse {}

/// Which devices have the containers of this node?
#[derive(Clone, PartialEq, Message)]
pub struct ListPodResourcesRequest {}

/// Those, by pod.
#[derive(Clone, PartialEq, Message)]
pub struct ListPodResourcesResponse {
    #[prost(message, repeated, tag = "1")]
    pub pod_resources: Vec<PodResources>,
}

/// What a pod has.
#[derive(Clone, PartialEq, Message)]
pub struct PodResources {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub namespace: String,
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<ContainerResources>,
}

/// What a container has.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerResources {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<ContainerDevices>,
}

/// Its devices of one resource, or some of them: a resource may come more than once.
#[derive(Clone, PartialEq, Message)]
pub struct ContainerDevices {
    #[prost(string, tag = "1")]
    pub resource_name: String,
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
}

/// Asks an engine for its state (CRI, `k8s.io/cri-api/pkg/apis/runtime/v1/api.proto`).
#[derive(Clone, Copy, PartialEq, Message)]
pub struct StatusRequest {
    /// Whether the engine reports everything.
    #[prost(bool, tag = "1")]
    pub verbose: bool,
}

/// The engine's state.
#[derive(Clone, PartialEq, Message)]
pub struct StatusResponse {
    #[prost(btree_map = "string, string", tag = "2")]
    pub info: BTreeMap<String, String>,
    /// Since Kubernetes 1.30.
    #[prost(message, repeated, tag = "3")]
    pub runtime_handlers: Vec<RuntimeHandler>,
}

/// Asks an engine which one it is.
#[derive(Clone, PartialEq, Message)]
pub struct VersionRequest {}

/// Which one it is.
#[derive(Clone, PartialEq, Message)]
pub struct VersionResponse {
    #[prost(string, tag = "2")]
    pub runtime_name: String,
    #[prost(string, tag = "3")]
    pub runtime_version: String,
}

/// A runtime of an engine.
#[derive(Clone, PartialEq, Message)]
pub struct RuntimeHandler {
    #[prost(string, tag = "1")]
    pub name: String,
}
