//! What may stand in a CDI specification: the rules of the reference implementation
//! (`pkg/cdi/{spec,device,container-edits}.go`, `pkg/parser/parser.go`, `specs-go/version.go` of
//! `cncf-tags/container-device-interface`).
//!
//! Where the specification's text is stricter (a hook's path is absolute, its time limit above
//! zero) the text holds, because a runtime would refuse or misread the rest. Must not know which
//! devices are wanted, nor what is on the host. Pure.

use std::collections::BTreeSet;

use thiserror::Error;

use super::spec::{Device, Edits, Hook, IntelRdt, Mount, NetDevice, Node, Specification};
use crate::bundle::HookStage;

/// The versions that there are, oldest first (`specs-go/version.go`, `validSpecVersions`).
const VERSIONS: [&str; 10] =
    ["0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0"];

/// Most characters of what a refusal quotes.
const QUOTED_MAX: usize = 100;

/// Most bytes of a name of a class of service.
const SERVICE_CLASS_BYTES_MAX: usize = 4095;

/// Why what a file says is no specification.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Invalid {
    /// A version that isn't known.
    #[error("cdiVersion {version:?} is not a version of CDI up to 1.1.0")]
    Version {
        /// What stands there.
        version: String,
    },
    /// It uses what its version didn't have yet.
    #[error("cdiVersion {version} is too old for what it uses: it must be at least {needed}")]
    TooOld {
        /// What stands there.
        version: String,
        /// What should.
        needed: &'static str,
    },
    /// The kind isn't one.
    #[error("kind {kind:?} is not VENDOR/CLASS, both of letters, digits, '-', '_' and '.'")]
    Kind {
        /// What stands there.
        kind: String,
    },
    /// There is no device.
    #[error("devices is empty")]
    NoDevices,
    /// Two devices have one name.
    #[error("device {name:?} is defined twice")]
    Twice { name: String },
    /// A device's name isn't one.
    #[error(
        "{name:?} is not a device's name: letters, digits, and between them '-', '_', '.', ':'"
    )]
    Name {
        /// What stands there.
        name: String,
    },
    /// A device that changes nothing.
    #[error("device {name:?} has no containerEdits")]
    Nothing { name: String },
    /// A field of the edits.
    #[error("{place}: {field} {value:?} {problem}")]
    Field {
        /// Whose: `containerEdits`, or a device's.
        place: String,
        /// Which field.
        field: &'static str,
        /// What stands there.
        value: String,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// A field's name, its value, and what is wrong with it.
type Wrong<'a> = (&'static str, &'a str, &'static str);

/// Whether `spec` is one.
///
/// # Errors
///
/// Where it isn't, with the first reason.
pub fn validate(spec: &Specification) -> Result<(), Invalid> {
    let version = || quoted(&spec.cdi_version);
    let place = |wanted: &str| VERSIONS.iter().position(|known| *known == wanted);
    let stated = spec.cdi_version.strip_prefix('v').unwrap_or(&spec.cdi_version);
    let stated = place(stated).ok_or_else(|| Invalid::Version { version: version() })?;
    let needed = minimum_version(spec);
    if place(needed).is_some_and(|needed| stated < needed) {
        return Err(Invalid::TooOld { version: version(), needed });
    }
    if !spec.kind.split_once('/').is_some_and(|(vendor, class)| is_label(vendor) && is_label(class))
    {
        return Err(Invalid::Kind { kind: quoted(&spec.kind) });
    }
    edits(&spec.container_edits, || "containerEdits".to_owned())?;
    let mut names = BTreeSet::new();
    for device in &spec.devices {
        validate_device(device)?;
        if !names.insert(&device.name) {
            return Err(Invalid::Twice { name: quoted(&device.name) });
        }
    }
    if names.is_empty() { Err(Invalid::NoDevices) } else { Ok(()) }
}

/// The oldest version that has what `spec` uses.
#[must_use]
pub fn minimum_version(spec: &Specification) -> &'static str {
    let all = || {
        let devices = spec.devices.iter().map(|device| &device.container_edits);
        devices.chain([&spec.container_edits])
    };
    let newer_rdt = |rdt: &IntelRdt| !rdt.schemata.is_empty() || rdt.enable_monitoring;
    if all().any(|edits| {
        !edits.net_devices.is_empty() || edits.intel_rdt.as_ref().is_some_and(newer_rdt)
    }) {
        return "1.1.0";
    }
    if all().any(|edits| edits.intel_rdt.is_some() || !edits.additional_gids.is_empty()) {
        return "0.7.0";
    }
    let annotated = !spec.annotations.is_empty()
        || spec.devices.iter().any(|device| !device.annotations.is_empty());
    let dotted = spec.kind.split_once('/').is_some_and(|(_, class)| class.contains('.'));
    if annotated || dotted {
        return "0.6.0";
    }
    let digit = |device: &Device| device.name.starts_with(|first: char| first.is_ascii_digit());
    if spec.devices.iter().any(digit)
        || all().any(|edits| edits.device_nodes.iter().any(|node| !node.host_path.is_empty()))
    {
        return "0.5.0";
    }
    if all().any(|edits| edits.mounts.iter().any(|mount| !mount.kind.is_empty())) {
        return "0.4.0";
    }
    "0.3.0"
}

/// When OCI calls the hooks of that name.
#[must_use]
pub fn stage(hook_name: &str) -> Option<HookStage> {
    let stages = [
        HookStage::Prestart,
        HookStage::CreateRuntime,
        HookStage::CreateContainer,
        HookStage::StartContainer,
        HookStage::Poststart,
        HookStage::Poststop,
    ];
    stages.into_iter().find(|stage| stage.name() == hook_name)
}

/// As much of `text` as a sentence takes.
fn quoted(text: &str) -> String {
    text.chars().take(QUOTED_MAX).collect()
}

/// Whether `text` is a vendor or a class.
fn is_label(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphabetic()) && is_name(text, "-_.")
}

/// Whether `text` is of letters and digits, and between the first and the last also of `marks`.
fn is_name(text: &str, marks: &str) -> bool {
    let alphanumeric = |at: char| at.is_ascii_alphanumeric();
    text.starts_with(alphanumeric)
        && text.ends_with(alphanumeric)
        && text.chars().all(|at| alphanumeric(at) || marks.contains(at))
}

fn validate_device(device: &Device) -> Result<(), Invalid> {
    let name = || quoted(&device.name);
    if !is_name(&device.name, "-_.:") {
        return Err(Invalid::Name { name: name() });
    }
    if device.container_edits.is_empty() {
        return Err(Invalid::Nothing { name: name() });
    }
    edits(&device.container_edits, || format!("device {:?}", quoted(&device.name)))
}

fn edits(edits: &Edits, place: impl Fn() -> String) -> Result<(), Invalid> {
    let wrong = edits
        .env
        .iter()
        .find_map(|text| variable("env", text))
        .or_else(|| edits.device_nodes.iter().find_map(node))
        .or_else(|| edits.hooks.iter().find_map(hook))
        .or_else(|| edits.mounts.iter().find_map(mount))
        .or_else(|| edits.intel_rdt.as_ref().and_then(rdt))
        .or_else(|| net_devices(&edits.net_devices));
    match wrong {
        None => Ok(()),
        Some((field, value, problem)) => {
            Err(Invalid::Field { place: place(), field, value: quoted(value), problem })
        }
    }
}

/// What is wrong with a path that must be absolute.
fn path<'a>(field: &'static str, text: &'a str) -> Option<Wrong<'a>> {
    let problem = "is not an absolute path";
    (!text.starts_with('/') || text.contains('\0')).then_some((field, text, problem))
}

fn variable<'a>(field: &'static str, text: &'a str) -> Option<Wrong<'a>> {
    let named = text.find('=').is_some_and(|at| at > 0) && !text.contains('\0');
    (!named).then_some((field, text, "is not NAME=VALUE"))
}

fn node(node: &Node) -> Option<Wrong<'_>> {
    let kinds = ["", "b", "c", "u", "p"];
    if !kinds.contains(&node.kind.as_str()) {
        return Some(("deviceNodes.type", &node.kind, "is not b, c, u or p"));
    }
    let permissions = node.permissions.as_str();
    if permissions != "none" && permissions.chars().any(|at| !"rwm".contains(at)) {
        return Some(("deviceNodes.permissions", permissions, "is not of r, w and m, nor none"));
    }
    path("deviceNodes.path", &node.path).or_else(|| path("deviceNodes.hostPath", node.source()))
}

fn hook(hook: &Hook) -> Option<Wrong<'_>> {
    if stage(&hook.hook_name).is_none() {
        return Some(("hooks.hookName", &hook.hook_name, "is not a hook of OCI"));
    }
    if hook.timeout.is_some_and(|seconds| seconds <= 0) {
        return Some(("hooks.timeout", &hook.path, "is called with no time at all"));
    }
    path("hooks.path", &hook.path)
        .or_else(|| hook.env.iter().find_map(|text| variable("hooks.env", text)))
}

fn mount(mount: &Mount) -> Option<Wrong<'_>> {
    // A source may be none: `tmpfs` has no path.
    let source = if mount.is_bind() { path("mounts.hostPath", &mount.host_path) } else { None };
    let nothing = ("mounts.hostPath", mount.host_path.as_str(), "is empty");
    source
        .or_else(|| mount.host_path.is_empty().then_some(nothing))
        .or_else(|| path("mounts.containerPath", &mount.container_path))
}

fn rdt(rdt: &IntelRdt) -> Option<Wrong<'_>> {
    let id = rdt.service_class.as_str();
    let bad = id != "/"
        && (id.len() > SERVICE_CLASS_BYTES_MAX
            || id == "."
            || id == ".."
            || id.contains(['/', '\n']));
    bad.then_some(("intelRdt.closID", id, "is not a file's name"))
}

fn net_devices(devices: &[NetDevice]) -> Option<Wrong<'_>> {
    let (mut hosts, mut names) = (BTreeSet::new(), BTreeSet::new());
    devices.iter().find_map(|device| {
        let (host, name) = (device.host_interface_name.as_str(), device.name.as_str());
        let problem = "is empty, or there twice";
        let bad_host = host.is_empty() || !hosts.insert(host);
        let bad_name = name.is_empty() || !names.insert(name);
        (bad_host.then_some(("netDevices.hostInterfaceName", host, problem)))
            .or(bad_name.then_some(("netDevices.name", name, problem)))
    })
}
