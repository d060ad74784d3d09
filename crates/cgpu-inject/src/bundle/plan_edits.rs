//! What a plan changes in a bundle. Pure.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What a plan changes in a bundle.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Edits {
    /// Variables of the process, set whether or not they were there.
    pub env: Vec<(String, String)>,
    /// Variables of the process that get another name, if they are there: the old one and the new.
    pub renamed_env: Vec<(&'static str, &'static str)>,
    /// Character devices to make in the container and to allow.
    pub devices: Vec<DeviceNode>,
    /// Files to bind-mount: of hosts whose nodes are no character devices, or devices that can't be made in
    /// the container.
    pub binds: Vec<Bind>,
    /// Devices to allow that are among the files.
    pub allowed: Vec<DeviceNode>,
    /// Nodes that the container must not have.
    pub withheld: Vec<Withheld>,
    /// Whether nodes of GPUs that the bundle has and these edits don't give stay where they are.
    pub keeps_other_gpus: bool,
    /// What of the driver to mount. A mount that the container has at the same place already is
    /// its owner's choice, and stays.
    pub mounts: Vec<Mount>,
    /// Where on the host mounts of ours come from: one that a bundle has from an earlier time
    /// goes.
    pub mounts_from: Option<String>,
    /// Groups of the process in addition to those that it has.
    pub gids: Vec<u32>,
    /// Hooks to call in addition to those that are there.
    pub hooks: Vec<HookCall>,
    /// Hooks that the driver's own description asks for. They are no calls of ours, and there may
    /// be several of one program.
    pub driver_hooks: Vec<HookCall>,
    /// Paths that the container must not read or write.
    pub masked: Vec<String>,
    /// Whether mounts that lead to the MPS daemon are taken out, whose server allocates for its
    /// clients, past their quotas.
    pub without_mps: bool,
    /// Whether all is taken out by which others would bring GPUs afterwards, whatever the variables say:
    /// annotations that ask for devices by CDI's names, mounts that ask NVIDIA's toolkit, hooks that call
    /// `nvidia-container-cli`. Mounts of the sockets of the driver's daemons, too, which set any GPU.
    pub without_requests: bool,
}

/// A character device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceNode {
    /// Path in the container.
    pub path: String,
    pub major: i64,
    pub minor: i64,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

impl DeviceNode {
    /// A node that everybody may read and write, as the driver makes its own.
    #[must_use]
    pub fn new(path: String, major: i64, minor: i64) -> Self {
        DeviceNode { path, major, minor, mode: 0o666, uid: 0, gid: 0 }
    }
}

/// A mount, as the OCI runtime specification has it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Mount {
    /// Path on the host.
    pub source: String,
    /// Path in the container.
    pub destination: String,
    /// Its type; empty where a bind mount's options say all.
    pub kind: String,
    pub options: Vec<String>,
}

/// A file of the host at a path of the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    /// Path on the host.
    pub source: String,
    /// Path in the container.
    pub destination: String,
}

/// A node that belongs to another container's GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Withheld {
    /// Its usual path in a container.
    pub path: String,
    /// Its path on the host.
    pub source: String,
    pub major: i64,
    pub minor: i64,
}

/// When a hook is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HookStage {
    /// As `CreateRuntime`, by the name that it had before.
    Prestart,
    /// After the namespaces are there, before the container's process is started.
    CreateRuntime,
    /// Then, in the container's namespaces.
    CreateContainer,
    /// In the container, before its process.
    StartContainer,
    /// After the container's process was started.
    Poststart,
    /// After the container is gone.
    Poststop,
}

impl HookStage {
    /// Every stage that we are called at.
    pub const OURS: &[HookStage] = &[HookStage::CreateRuntime, HookStage::Poststop];

    /// Its name in the OCI runtime specification.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            HookStage::Prestart => "prestart",
            HookStage::CreateRuntime => "createRuntime",
            HookStage::CreateContainer => "createContainer",
            HookStage::StartContainer => "startContainer",
            HookStage::Poststart => "poststart",
            HookStage::Poststop => "poststop",
        }
    }

    /// Where its hooks are in `config.json`.
    pub(super) fn field(self) -> &'static str {
        match self {
            HookStage::Prestart => "hooks.prestart",
            HookStage::CreateRuntime => "hooks.createRuntime",
            HookStage::CreateContainer => "hooks.createContainer",
            HookStage::StartContainer => "hooks.startContainer",
            HookStage::Poststart => "hooks.poststart",
            HookStage::Poststop => "hooks.poststop",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookCall {
    pub stage: HookStage,
    /// The program, by absolute path.
    pub path: PathBuf,
    /// Its arguments with its name.
    pub args: Vec<String>,
    /// Its whole environment; never empty, or the hook would inherit variables that the
    /// container's author controls.
    pub env: Vec<String>,
    /// After this many seconds it is killed and has failed; `None` for no limit.
    pub timeout_s: Option<i64>,
}
