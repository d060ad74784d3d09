//! The devices of a `config.json`: those that a container gets are declared and allowed, those of
//! other GPUs taken out wherever they came from. Pure.

use oci_spec::runtime::{LinuxDeviceBuilder, LinuxDeviceCgroupBuilder, LinuxDeviceType};
use serde_json::Value;

use super::plan_edits::{DeviceNode, Edits};
use super::shape::{Misshapen, list, mounts, number, plain, text};
use nvrm::NVIDIA_MAJOR;

/// The last minor number of a GPU; 254 and 255 are modeset and control.
pub(super) const LAST_GPU_MINOR: i64 = 253;

fn devices(config: &mut Value) -> Result<&mut Vec<Value>, Misshapen> {
    list(config, &["linux", "devices"], "linux.devices")
}

fn device_rules(config: &mut Value) -> Result<&mut Vec<Value>, Misshapen> {
    list(config, &["linux", "resources", "devices"], "linux.resources.devices")
}

/// Whether `path` is where NVIDIA's nodes of single GPUs and MIG instances usually are.
fn is_gpu_path(path: &str) -> bool {
    if path.starts_with("/dev/nvidia-caps/") {
        return true;
    }
    path.strip_prefix("/dev/nvidia")
        .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Takes the nodes of other GPUs out: declared devices, device rules and bind mounts.
pub(super) fn withhold(config: &mut Value, edits: &Edits) -> Result<(), Misshapen> {
    let ours = |path: &str, major, minor| {
        edits.devices.iter().chain(&edits.allowed).any(|node| {
            node.path == path || (Some(node.major) == major && Some(node.minor) == minor)
        }) || edits.binds.iter().any(|bind| bind.destination == path)
    };
    let foreign = |path: &str, major: Option<i64>, minor: Option<i64>| {
        if ours(path, major, minor) {
            return false;
        }
        let path = plain(path);
        let gpu_number = major == Some(NVIDIA_MAJOR)
            && minor.is_some_and(|minor| (0..=LAST_GPU_MINOR).contains(&minor));
        let listed = edits.withheld.iter().any(|node| {
            node.path == path || (Some(node.major) == major && Some(node.minor) == minor)
        });
        listed || gpu_number || is_gpu_path(&path)
    };
    if edits.keeps_other_gpus {
        return Ok(());
    }
    if edits.withheld.is_empty() && edits.devices.is_empty() && edits.binds.is_empty() {
        return Ok(());
    }
    if config.pointer("/linux/devices").is_some_and(|list| !list.is_null()) {
        devices(config)?.retain(|device| {
            !foreign(text(device, "path"), number(device, "major"), number(device, "minor"))
        });
    }
    if config.get("mounts").is_some_and(|list| !list.is_null()) {
        mounts(config)?.retain(|mount| {
            let (source, destination) = (text(mount, "source"), text(mount, "destination"));
            let given = edits
                .binds
                .iter()
                .any(|bind| bind.source == source && bind.destination == destination);
            let (source, destination) = (plain(source), plain(destination));
            let withheld =
                edits.withheld.iter().any(|node| node.source == source || node.path == source);
            given || !(withheld || is_gpu_path(&source) || is_gpu_path(&destination))
        });
    }
    if config.pointer("/linux/resources/devices").is_some_and(|list| !list.is_null()) {
        let rules = device_rules(config)?;
        rules.retain(|rule| {
            let (major, minor) = (number(rule, "major"), number(rule, "minor"));
            // cgroup v1 can't take a device out of a rule for all of a major number, and
            // runc then refuses; all that such a rule is for is allowed one by one.
            let nvidias = major == Some(NVIDIA_MAJOR) && minor.is_none_or(|minor| minor < 0);
            let wide = major.is_none() || minor.is_none();
            rule.get("allow") != Some(&Value::Bool(true))
                || !(nvidias || (!wide && foreign("", major, minor)))
        });
        // A rule as wide as "every device" stays, and these are taken out of it.
        for node in &edits.withheld {
            let deny = rule(false, node.major, node.minor);
            let widest = rules.iter().rposition(|rule| covers(rule, node.major, node.minor));
            let denied = rules.iter().rposition(|rule| *rule == deny);
            if widest.is_some() && denied < widest {
                rules.push(deny);
            }
        }
    }
    Ok(())
}

/// Whether an allow rule names the device by a wildcard.
fn covers(rule: &Value, major: i64, minor: i64) -> bool {
    let matches = |field, wanted| match number(rule, field) {
        None | Some(..0) => true,
        Some(found) => found == wanted || is_of_all_types(rule),
    };
    rule.get("allow") == Some(&Value::Bool(true))
        && matches!(text(rule, "type"), "" | "a" | "c")
        && matches("major", major)
        && matches("minor", minor)
        && text(rule, "access") != "m"
}

/// Whether a rule is for devices of every type. runc takes such a rule for one of every device, whatever
/// its numbers; crun may take the numbers as they are.
fn is_of_all_types(rule: &Value) -> bool {
    matches!(text(rule, "type"), "" | "a")
}

/// Whether the last rule that speaks of every device, or of every character device, allows their use.
pub(super) fn allows_every_device(config: &Value) -> bool {
    let rules = config.pointer("/linux/resources/devices").and_then(Value::as_array);
    let allows = |rule: &Value| rule.get("allow") == Some(&Value::Bool(true));
    let is_wild = |rule: &Value| {
        !matches!(number(rule, "major"), Some(0..)) && !matches!(number(rule, "minor"), Some(0..))
    };
    // Making a node, which engines allow to all, is no use of it.
    let of_characters =
        |rule: &Value| text(rule, "type") == "c" && text(rule, "access") != "m" && allows(rule);
    let mut rules = rules.into_iter().flatten();
    let widest = rules.rfind(|rule| match is_wild(rule) {
        true => is_of_all_types(rule) || of_characters(rule),
        false => is_of_all_types(rule) && allows(rule),
    });
    widest.is_some_and(allows)
}

pub(super) fn rule(allow: bool, major: i64, minor: i64) -> Value {
    let rule = LinuxDeviceCgroupBuilder::default()
        .allow(allow)
        .typ(LinuxDeviceType::C)
        .major(major)
        .minor(minor)
        .access(if allow { "rw" } else { "rwm" })
        .build()
        .expect("every field of a device rule is optional or set");
    serde_json::to_value(rule).expect("a device rule is plain data")
}

pub(super) fn declare(config: &mut Value, node: &DeviceNode) -> Result<(), Misshapen> {
    let device = LinuxDeviceBuilder::default()
        .path(&node.path)
        .typ(LinuxDeviceType::C)
        .major(node.major)
        .minor(node.minor)
        .file_mode(node.mode)
        .uid(node.uid)
        .gid(node.gid)
        .build()
        .expect("every field of a device is set");
    let devices = devices(config)?;
    match devices.iter_mut().find(|device| text(device, "path") == node.path) {
        Some(old)
            if number(old, "major") == Some(node.major)
                && number(old, "minor") == Some(node.minor) => {}
        Some(old) => *old = serde_json::to_value(device).expect("a device is plain data"),
        None => devices.push(serde_json::to_value(device).expect("a device is plain data")),
    }
    Ok(())
}

pub(super) fn allow(config: &mut Value, node: &DeviceNode) -> Result<(), Misshapen> {
    let allow = rule(true, node.major, node.minor);
    let rules = device_rules(config)?;
    if !rules.contains(&allow) {
        rules.push(allow);
    }
    Ok(())
}
