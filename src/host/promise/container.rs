//! What a container's processes come to reach, whichever program brought it: the oracle. It reads a bundle as the
//! kernel and NVIDIA's programs do, and knows nothing of how it was edited.

use serde_json::Value;

use super::bundles::GPUS;

/// What processes of a container reach.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Reached {
    /// Minor numbers of GPUs.
    pub(super) gpus: Vec<u32>,
    /// Whether they reach the node that sets displays, whose memory no monitor sees.
    pub(super) displays: bool,
}

/// The minor number of the node that sets displays.
const MODESET: u32 = 254;

/// What a container of `config` reaches once it runs; `is_under_nvidias` says whether NVIDIA's runtime makes
/// it, which acts on what the bundle says.
pub(super) fn reached(config: &Value, is_under_nvidias: bool) -> Reached {
    let has_hook = hooks(config).any(|hook| {
        let path = hook["path"].as_str().unwrap();
        path.ends_with("/nvidia-container-runtime-hook")
    });
    let by_nvidia = match has_hook || is_under_nvidias {
        true => by_nvidias_hook(config),
        false => Reached { gpus: Vec::new(), displays: false },
    };
    let mut named = by_nvidia.gpus;
    named.extend(by_cli_hooks(config));
    // With an engine without CDI no program acts on these, but the next one may.
    named.extend(by_annotations(config));
    named.extend(by_mounts(config));
    Reached {
        gpus: (0..GPUS).filter(|minor| can_open(config, *minor) || named.contains(minor)).collect(),
        displays: can_open(config, MODESET)
            || by_nvidia.displays
            || hooks(config).any(|hook| args(hook).any(|arg| arg == "--display")),
    }
}

fn strings<'a>(config: &'a Value, pointer: &str) -> Vec<&'a str> {
    let list = config.pointer(pointer).and_then(Value::as_array).into_iter().flatten();
    list.filter_map(Value::as_str).collect()
}

fn hooks(config: &Value) -> impl Iterator<Item = &Value> {
    let stages = config["hooks"].as_object().into_iter().flatten();
    stages.flat_map(|(_, calls)| calls.as_array().into_iter().flatten())
}

fn args(hook: &Value) -> impl Iterator<Item = &str> {
    hook["args"].as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// Whether the node `c 195:MINOR` can be opened: made by `mknod` if need be, where the device rules allow
/// it; or mounted. A mount of the whole of `/dev` is under the rules, too; one of a single node counts by
/// itself, for hosts that have no rules.
fn can_open(config: &Value, minor: u32) -> bool {
    let matches =
        |rule: &Value, field: &str, wanted: u32| match rule.get(field).and_then(Value::as_i64) {
            None | Some(..0) => true,
            Some(found) => found == i64::from(wanted),
        };
    let rules = config.pointer("/linux/resources/devices").and_then(Value::as_array);
    let last = rules.into_iter().flatten().rfind(|rule| {
        let kind = rule["type"].as_str().unwrap_or("a");
        // runc takes a rule for devices of all types for one of every device, whatever its numbers.
        let is_of_this = matches(rule, "major", 195) && matches(rule, "minor", minor);
        rule["access"] != "m" && (kind == "a" || (kind == "c" && is_of_this))
    });
    let path = match minor {
        MODESET => "/dev/nvidia-modeset".to_owned(),
        minor => format!("/dev/nvidia{minor}"),
    };
    let mounts = config["mounts"].as_array().into_iter().flatten();
    last.is_some_and(|rule| rule["allow"] == true)
        || mounts.into_iter().any(|mount| mount["source"] == *path || mount["destination"] == *path)
}

/// What NVIDIA's hook does (nvidia-container-toolkit, `cmd/nvidia-container-runtime-hook`), with
/// `swarm-resource` set and any container allowed to ask.
fn by_nvidias_hook(config: &Value) -> Reached {
    let env = strings(config, "/process/env");
    let value = |name: &str| {
        let items = env.iter().filter_map(|item| item.split_once('='));
        { items }.rfind(|(found, _)| *found == name).map(|(_, value)| value)
    };
    let swarm = env.iter().filter_map(|item| item.strip_prefix("DOCKER_RESOURCE_"));
    let swarm = swarm.filter_map(|item| item.split_once('=')).map(|(_, value)| value);
    let mut gpus: Vec<u32> = swarm.flat_map(names).collect();
    let is_set = |name| value(name).is_some_and(|value| !value.is_empty());
    let is_of_old = is_set("CUDA_VERSION") && !is_set("NVIDIA_REQUIRE_CUDA");
    match value("NVIDIA_VISIBLE_DEVICES") {
        Some(value) => gpus.extend(names(value)),
        None if is_of_old => gpus.extend(0..GPUS),
        None => {}
    }
    let asks = value("NVIDIA_DRIVER_CAPABILITIES").unwrap_or_default();
    let displays = asks.split(',').any(|word| matches!(word.trim(), "all" | "display"));
    Reached { displays: displays && !gpus.is_empty(), gpus }
}

fn by_cli_hooks(config: &Value) -> Vec<u32> {
    hooks(config)
        .flat_map(args)
        .filter_map(|arg| arg.strip_prefix("--device="))
        .flat_map(names)
        .collect()
}

fn by_annotations(config: &Value) -> Vec<u32> {
    let all = config["annotations"].as_object().into_iter().flatten();
    let of_cdi = all.filter(|(key, _)| key.split('/').next().unwrap().ends_with("cdi.k8s.io"));
    of_cdi
        .flat_map(|(_, value)| value.as_str().unwrap().split(','))
        .filter_map(|device| device.strip_prefix("nvidia.com/gpu="))
        .flat_map(names)
        .collect()
}

fn by_mounts(config: &Value) -> Vec<u32> {
    let mounts = config["mounts"].as_array().into_iter().flatten();
    mounts
        .filter_map(|mount| mount["destination"].as_str())
        .filter_map(|to| to.strip_prefix("/var/run/nvidia-container-devices/"))
        .flat_map(|name| names(name.strip_prefix("cdi/nvidia.com/gpu/").unwrap_or(name)))
        .collect()
}

/// The GPUs of a list of NVIDIA's names.
fn names(list: &str) -> Vec<u32> {
    let of = |name: &str| -> Vec<u32> {
        match name.trim() {
            "all" => (0..GPUS).collect(),
            name => {
                let digits = name.strip_prefix("GPU-").unwrap_or(name);
                digits.parse().ok().filter(|index| *index < GPUS).into_iter().collect()
            }
        }
    };
    list.split(',').flat_map(of).collect()
}
