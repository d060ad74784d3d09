//! The messages of `runtime.v1` that the tests send and receive, written manually.
//!
//! Names and numbers are those of `pkg/apis/runtime/v1/api.proto` in kubernetes/cri-api; fields
//! that no test uses are left out, which protobuf allows. Written out they need no protoc and
//! double as JSON: a field that isn't here is refused in a request, so nothing is silently not
//! sent. Requests of one and the same field share a type; responses without fields are [`Empty`].

use std::collections::HashMap;

use prost::Message;
use serde::{Deserialize, Serialize, Serializer};

/// Declares messages that are protobuf and JSON alike.
macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_attribute:meta])* $field:ident: $kind:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[derive(Clone, PartialEq, Message, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub(crate) struct $name { $($(#[$field_attribute])* pub(crate) $field: $kind),* }
    )*};
}

messages! {
    /// A response that says nothing.
    Empty {}

    VersionRequest {
        #[prost(string, tag = "1")] version: String,
    }

    VersionResponse {
        #[prost(string, tag = "1")] version: String,
        #[prost(string, tag = "2")] runtime_name: String,
        #[prost(string, tag = "3")] runtime_version: String,
        #[prost(string, tag = "4")] runtime_api_version: String,
    }

    RunPodSandboxRequest {
        #[prost(message, optional, tag = "1")] config: Option<PodSandboxConfig>,
        #[prost(string, tag = "2")] runtime_handler: String,
    }

    RunPodSandboxResponse {
        #[prost(string, tag = "1")] pod_sandbox_id: String,
    }

    /// `StopPodSandboxRequest` and `RemovePodSandboxRequest`.
    PodSandboxId {
        #[prost(string, tag = "1")] pod_sandbox_id: String,
    }

    PodSandboxConfig {
        #[prost(message, optional, tag = "1")] metadata: Option<PodSandboxMetadata>,
        #[prost(string, tag = "2")] hostname: String,
        #[prost(string, tag = "3")] log_directory: String,
        #[prost(map = "string, string", tag = "6")] labels: HashMap<String, String>,
        #[prost(map = "string, string", tag = "7")] annotations: HashMap<String, String>,
        #[prost(message, optional, tag = "8")] linux: Option<LinuxPodSandboxConfig>,
    }

    PodSandboxMetadata {
        #[prost(string, tag = "1")] name: String,
        #[prost(string, tag = "2")] uid: String,
        #[prost(string, tag = "3")] namespace: String,
        #[prost(uint32, tag = "4")] attempt: u32,
    }

    LinuxPodSandboxConfig {
        #[prost(string, tag = "1")] cgroup_parent: String,
        #[prost(message, optional, tag = "2")] security_context: Option<LinuxSandboxSecurityContext>,
        #[prost(map = "string, string", tag = "3")] sysctls: HashMap<String, String>,
    }

    LinuxSandboxSecurityContext {
        #[prost(message, optional, tag = "1")] namespace_options: Option<NamespaceOption>,
        #[prost(bool, tag = "4")] readonly_rootfs: bool,
        #[prost(bool, tag = "6")] privileged: bool,
        #[prost(message, optional, tag = "9")] seccomp: Option<SecurityProfile>,
    }

    /// Modes: 0 the pod's, 1 the container's, 2 the node's.
    NamespaceOption {
        #[prost(int32, tag = "1")] network: i32,
        #[prost(int32, tag = "2")] pid: i32,
        #[prost(int32, tag = "3")] ipc: i32,
    }

    /// Types: 0 the runtime's default, 1 unconfined, 2 a file of the host.
    SecurityProfile {
        #[prost(int32, tag = "1")] profile_type: i32,
        #[prost(string, tag = "2")] localhost_ref: String,
    }

    CreateContainerRequest {
        #[prost(string, tag = "1")] pod_sandbox_id: String,
        #[prost(message, optional, tag = "2")] config: Option<ContainerConfig>,
        #[prost(message, optional, tag = "3")] sandbox_config: Option<PodSandboxConfig>,
    }

    CreateContainerResponse {
        #[prost(string, tag = "1")] container_id: String,
    }

    ContainerConfig {
        #[prost(message, optional, tag = "1")] metadata: Option<ContainerMetadata>,
        #[prost(message, optional, tag = "2")] image: Option<ImageSpec>,
        #[prost(string, repeated, tag = "3")] command: Vec<String>,
        #[prost(string, repeated, tag = "4")] args: Vec<String>,
        #[prost(string, tag = "5")] working_dir: String,
        #[prost(message, repeated, tag = "6")] envs: Vec<KeyValue>,
        #[prost(message, repeated, tag = "7")] mounts: Vec<Mount>,
        #[prost(message, repeated, tag = "8")] devices: Vec<Device>,
        #[prost(map = "string, string", tag = "9")] labels: HashMap<String, String>,
        #[prost(map = "string, string", tag = "10")] annotations: HashMap<String, String>,
        #[prost(string, tag = "11")] log_path: String,
        #[prost(message, optional, tag = "15")] linux: Option<LinuxContainerConfig>,
        #[prost(message, repeated, tag = "17")] cdi_devices: Vec<CdiDevice>,
    }

    CdiDevice {
        #[prost(string, tag = "1")] name: String,
    }

    ContainerMetadata {
        #[prost(string, tag = "1")] name: String,
        #[prost(uint32, tag = "2")] attempt: u32,
    }

    ImageSpec {
        #[prost(string, tag = "1")] image: String,
    }

    KeyValue {
        #[prost(string, tag = "1")] key: String,
        #[prost(string, tag = "2")] value: String,
    }

    /// Propagation: 0 private, 1 from the host, 2 both ways.
    Mount {
        #[prost(string, tag = "1")] container_path: String,
        #[prost(string, tag = "2")] host_path: String,
        #[prost(bool, tag = "3")] readonly: bool,
        #[prost(int32, tag = "5")] propagation: i32,
    }

    Device {
        #[prost(string, tag = "1")] container_path: String,
        #[prost(string, tag = "2")] host_path: String,
        #[prost(string, tag = "3")] permissions: String,
    }

    LinuxContainerConfig {
        #[prost(message, optional, tag = "1")] resources: Option<LinuxContainerResources>,
        #[prost(message, optional, tag = "2")] security_context: Option<LinuxContainerSecurityContext>,
    }

    LinuxContainerResources {
        #[prost(int64, tag = "1")] cpu_period: i64,
        #[prost(int64, tag = "2")] cpu_quota: i64,
        #[prost(int64, tag = "3")] cpu_shares: i64,
        #[prost(int64, tag = "4")] memory_limit_in_bytes: i64,
        #[prost(int64, tag = "5")] oom_score_adj: i64,
        #[prost(string, tag = "6")] cpuset_cpus: String,
    }

    LinuxContainerSecurityContext {
        #[prost(message, optional, tag = "1")] capabilities: Option<Capability>,
        #[prost(bool, tag = "2")] privileged: bool,
        #[prost(message, optional, tag = "3")] namespace_options: Option<NamespaceOption>,
        #[prost(bool, tag = "7")] readonly_rootfs: bool,
        #[prost(bool, tag = "11")] no_new_privs: bool,
        #[prost(message, optional, tag = "15")] seccomp: Option<SecurityProfile>,
    }

    Capability {
        #[prost(string, repeated, tag = "1")] add_capabilities: Vec<String>,
        #[prost(string, repeated, tag = "2")] drop_capabilities: Vec<String>,
    }

    /// `StartContainerRequest` and `RemoveContainerRequest`.
    ContainerId {
        #[prost(string, tag = "1")] container_id: String,
    }

    StopContainerRequest {
        #[prost(string, tag = "1")] container_id: String,
        #[prost(int64, tag = "2")] timeout: i64,
    }

    UpdateContainerResourcesRequest {
        #[prost(string, tag = "1")] container_id: String,
        #[prost(message, optional, tag = "2")] linux: Option<LinuxContainerResources>,
    }

    ContainerStatusRequest {
        #[prost(string, tag = "1")] container_id: String,
        #[prost(bool, tag = "2")] verbose: bool,
    }

    ContainerStatusResponse {
        #[prost(message, optional, tag = "1")] status: Option<ContainerStatus>,
        #[prost(map = "string, string", tag = "2")] info: HashMap<String, String>,
    }

    /// States: 0 created, 1 running, 2 exited, 3 unknown.
    ContainerStatus {
        #[prost(string, tag = "1")] id: String,
        #[prost(int32, tag = "3")] state: i32,
        #[prost(int32, tag = "7")] exit_code: i32,
        #[prost(string, tag = "10")] reason: String,
        #[prost(string, tag = "11")] message: String,
        #[prost(map = "string, string", tag = "13")] annotations: HashMap<String, String>,
        #[prost(string, tag = "15")] log_path: String,
    }

    ExecSyncRequest {
        #[prost(string, tag = "1")] container_id: String,
        #[prost(string, repeated, tag = "2")] cmd: Vec<String>,
        #[prost(int64, tag = "3")] timeout: i64,
    }

    ExecSyncResponse {
        #[prost(bytes = "vec", tag = "1")] #[serde(serialize_with = "lossy")] stdout: Vec<u8>,
        #[prost(bytes = "vec", tag = "2")] #[serde(serialize_with = "lossy")] stderr: Vec<u8>,
        #[prost(int32, tag = "3")] exit_code: i32,
    }
}

/// A program's output as a JSON string, invalid UTF-8 replaced.
fn lossy<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&String::from_utf8_lossy(bytes))
}
