//! A CDI specification as a file has it (Container Device Interface, versions 0.3.0 to 1.1.0,
//! `specs-go/config.go` of `cncf-tags/container-device-interface`).
//!
//! Owns the fields and their names; [`super::validation`] owns what may stand in them. A field that
//! isn't here refuses the file, as the reference implementation does: what somebody asked for and
//! we don't know must not be left out silently. `null` is what a field is where it is missing, as
//! it is for the reference implementation. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

/// What a file describes: devices of one kind, and what each container gets that has one of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Specification {
    /// The version of CDI that it needs.
    #[serde(default, deserialize_with = "or_default")]
    pub cdi_version: String,
    /// `VENDOR/CLASS`.
    #[serde(default, deserialize_with = "or_default")]
    pub kind: String,
    /// Words for programs; they change nothing.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "or_default")]
    pub devices: Vec<Device>,
    /// What a container gets once, whichever devices it has.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Edits::is_empty")]
    pub container_edits: Edits,
}

/// A device that a container can have by its name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    #[serde(default, deserialize_with = "or_default")]
    pub name: String,
    /// Words for programs; they change nothing.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// What its container gets.
    #[serde(default, deserialize_with = "or_default")]
    pub container_edits: Edits,
}

/// What changes in a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Edits {
    /// Variables, as `NAME=VALUE`.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<Node>,
    /// Network interfaces (1.1.0).
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub net_devices: Vec<NetDevice>,
    /// Hooks of the container's life.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Shares of caches and memory bandwidth (0.7.0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<IntelRdt>,
    /// Groups of the process (0.7.0). The specification's example writes `GIDs`, its text and the
    /// reference implementation `Gids`.
    #[serde(
        default,
        deserialize_with = "or_default",
        alias = "additionalGIDs",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub additional_gids: Vec<u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Node {
    /// Its path in the container.
    #[serde(default, deserialize_with = "or_default")]
    pub path: String,
    /// Its path on the host, where that is another (0.5.0).
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub host_path: String,
    /// `c`, `u` (both a character device), `b`, `p`; empty: what the host's node is.
    #[serde(
        default,
        rename = "type",
        deserialize_with = "or_default",
        skip_serializing_if = "String::is_empty"
    )]
    pub kind: String,
    /// Its major number; 0: the host's.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "is_zero")]
    pub major: i64,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "is_zero")]
    pub minor: i64,
    /// Its permissions in the file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// What the container's cgroup allows: some of `rwm`, or `none`.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub permissions: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// Path on the host.
    #[serde(default, deserialize_with = "or_default")]
    pub host_path: String,
    /// Path in the container.
    #[serde(default, deserialize_with = "or_default")]
    pub container_path: String,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// Its type (0.4.0).
    #[serde(
        default,
        rename = "type",
        deserialize_with = "or_default",
        skip_serializing_if = "String::is_empty"
    )]
    pub kind: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hook {
    /// When, by OCI's name.
    #[serde(default, deserialize_with = "or_default")]
    pub hook_name: String,
    /// The program.
    #[serde(default, deserialize_with = "or_default")]
    pub path: String,
    /// Its arguments with its name.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Its environment.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// After so many seconds it has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
}

/// Shares of caches and memory bandwidth.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct IntelRdt {
    /// The class of service.
    #[serde(default, deserialize_with = "or_default", rename = "closID")]
    pub service_class: String,
    /// Of the third level's cache.
    #[serde(default, deserialize_with = "or_default")]
    pub l3_cache_schema: String,
    /// Of memory bandwidth.
    #[serde(default, deserialize_with = "or_default")]
    pub mem_bw_schema: String,
    /// Of anything (1.1.0).
    #[serde(default, deserialize_with = "or_default")]
    pub schemata: Vec<String>,
    /// Whether it is watched (1.1.0).
    #[serde(default, deserialize_with = "or_default")]
    pub enable_monitoring: bool,
}

/// A network interface of the host that becomes the container's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NetDevice {
    /// On the host.
    #[serde(default, deserialize_with = "or_default")]
    pub host_interface_name: String,
    /// In the container.
    #[serde(default, deserialize_with = "or_default")]
    pub name: String,
}

fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &i64) -> bool {
    *number == 0
}

impl Edits {
    /// Whether they change nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl Node {
    /// Its path on the host.
    #[must_use]
    pub fn source(&self) -> &str {
        if self.host_path.is_empty() { &self.path } else { &self.host_path }
    }
}

impl Mount {
    /// Whether it shows a file or a directory of the host.
    #[must_use]
    pub fn is_bind(&self) -> bool {
        matches!(self.kind.as_str(), "" | "bind") || self.says_bind()
    }

    /// Whether its options say so.
    #[must_use]
    pub fn says_bind(&self) -> bool {
        self.options.iter().any(|option| option == "bind" || option == "rbind")
    }
}
