//! What a `config.json` has of GPUs before cgpu edits it, from any source: [`brought`]. Pure.

use serde_json::Value;

use super::devices::{LAST_GPU_MINOR, allows_every_device};
use super::shape::{is_bind, number, plain, text};
use cgpu_core::request::brought_gpus::{DriNode, by_cli_hook, device_mount, is_cdi_annotation};
use cgpu_core::request::{Brought, BroughtGpu, BroughtName, Quoted};
use nvrm::NVIDIA_MAJOR;

/// The names of NVIDIA's hook that brings GPUs and the driver's files.
const NVIDIA_HOOKS: [&str; 2] = ["nvidia-container-runtime-hook", "nvidia-container-toolkit"];

/// The node by which displays are set.
const MODESET: (&str, i64) = ("/dev/nvidia-modeset", 254);

/// The kernel's graphics: where their nodes are, and their major number (Linux,
/// `admin-guide/devices.txt`).
const DRI: (&str, i64) = ("/dev/dri", 226);

/// Libraries of the driver by which it is seen that somebody mounts the driver's files.
const LIBRARIES: [&str; 2] = ["libcuda.so", "libnvidia-ml.so"];

/// What `config` has of GPUs.
pub(super) fn brought(config: &Value) -> Brought {
    let mut brought = Brought::default();
    hooks(config, &mut brought);
    annotations(config, &mut brought);
    mounts(config, &mut brought);
    if allows_every_device(config) {
        // Engines declare each device of the host then, and no device was chosen.
        brought.everything = Some("every device");
        return brought;
    }
    devices(config, &mut brought);
    rules(config, &mut brought);
    brought
}

/// The GPU's minor number in a path as `/dev/nvidia3`, wherever that `/dev` is.
fn gpu_minor(path: &str) -> Option<u32> {
    let (_, name) = path.rsplit_once("/dev/nvidia")?;
    digits(name)
}

/// The number of a node as `/dev/nvidia-caps/nvidia-cap3`.
fn mig_node(path: &str) -> Option<u32> {
    digits(path.rsplit_once("/dev/nvidia-caps/nvidia-cap")?.1)
}

fn digits(text: &str) -> Option<u32> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| text.parse().ok()).flatten()
}

fn items<'a>(config: &'a Value, pointer: &str) -> impl Iterator<Item = &'a Value> {
    config.pointer(pointer).and_then(Value::as_array).into_iter().flatten()
}

fn hooks(config: &Value, brought: &mut Brought) {
    let stages = config.get("hooks").and_then(Value::as_object);
    let calls = stages.into_iter().flat_map(serde_json::Map::values).filter_map(Value::as_array);
    for call in calls.flatten() {
        let path = text(call, "path");
        let args: Vec<&str> = items(call, "/args").filter_map(Value::as_str).collect();
        if let Some(gpus) = by_cli_hook(path, &args) {
            brought.gpus.extend(gpus);
            brought.cli_hook.get_or_insert_with(|| format!("the hook {path}"));
        } else if NVIDIA_HOOKS.contains(&path.rsplit('/').next().unwrap_or_default()) {
            brought.nvidia_hook = true;
            brought.driver_files.get_or_insert_with(|| format!("the hook {path}"));
        }
    }
}

/// The node `path`, which brings no GPU by itself.
fn other(path: &str, numbers: (Option<i64>, Option<i64>), brought: &mut Brought) {
    let is_modeset = match numbers {
        (Some(major), Some(minor)) => (major, minor) == (NVIDIA_MAJOR, MODESET.1),
        _ => path == MODESET.0,
    };
    if is_modeset {
        brought.graphics.get_or_insert_with(|| format!("node {}", Quoted(path)));
    }
    let is_below =
        path.strip_prefix(DRI.0).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    if numbers.0 == Some(DRI.1) || is_below {
        brought.dri.push(DriNode { path: path.to_owned(), minor: numbers.1 });
    }
}

fn annotations(config: &Value, brought: &mut Brought) {
    let all = config.get("annotations").and_then(Value::as_object);
    let of_cdi = all.into_iter().flatten().filter(|(key, _)| is_cdi_annotation(key));
    for (key, value) in of_cdi {
        let value = value.as_str().unwrap_or_default();
        brought.gpus.extend(BroughtGpu::of_annotation(key, value));
    }
}

fn mounts(config: &Value, brought: &mut Brought) {
    for mount in items(config, "/mounts") {
        let destination = plain(text(mount, "destination"));
        if let Some(gpu) = device_mount(&destination) {
            brought.gpus.push(BroughtGpu::mount(gpu, "", &destination));
        }
        let name = destination.rsplit('/').next().unwrap_or_default();
        if LIBRARIES.iter().any(|library| name.starts_with(library)) {
            let by = || format!("the mount at {destination}");
            brought.driver_files.get_or_insert_with(by);
        }
        if !is_bind(mount) {
            continue;
        }
        let source = plain(text(mount, "source"));
        match &*source {
            "/" => brought.everything = Some("a mount of the host's root"),
            "/dev" => brought.everything = Some("a mount of the host's /dev"),
            // It hides what is there.
            "/dev/null" => continue,
            _ => {}
        }
        if let Some(minor) = gpu_minor(&source).or_else(|| gpu_minor(&destination)) {
            let gpu = BroughtName::Minor(minor);
            brought.gpus.push(BroughtGpu::mount(gpu, &source, &destination));
        }
        brought.mig_nodes.extend(mig_node(&source).or_else(|| mig_node(&destination)));
        let ends = if source.starts_with("/dev/") { source } else { destination };
        other(&ends, (None, None), brought);
    }
}

fn devices(config: &Value, brought: &mut Brought) {
    for device in items(config, "/linux/devices") {
        let path = plain(text(device, "path"));
        let number = |field| number(device, field);
        let is_character = matches!(text(device, "type"), "" | "c" | "u");
        let by_number = match (number("major"), number("minor")) {
            (Some(NVIDIA_MAJOR), Some(minor @ 0..=LAST_GPU_MINOR)) if is_character => {
                u32::try_from(minor).ok()
            }
            // Without a minor number it has 0, as engines written in Go read it.
            (Some(NVIDIA_MAJOR), None) if is_character => Some(0),
            (Some(NVIDIA_MAJOR), _) => None,
            _ => gpu_minor(&path),
        };
        brought.gpus.extend(by_number.map(|minor| BroughtGpu::node(minor, &path)));
        brought.mig_nodes.extend(mig_node(&path));
        if is_character {
            other(&path, (number("major"), number("minor")), brought);
        }
    }
}

fn rules(config: &Value, brought: &mut Brought) {
    for rule in items(config, "/linux/resources/devices") {
        let allows = rule.get("allow") == Some(&Value::Bool(true));
        let is_character = matches!(text(rule, "type"), "" | "a" | "c");
        // Making a node is no use of it.
        let is_use = text(rule, "access") != "m";
        if !allows || !is_character || !is_use {
            continue;
        }
        let (major, minor) = (number(rule, "major"), number(rule, "minor"));
        if major == Some(DRI.1) {
            let minor = minor.filter(|minor| *minor >= 0);
            brought.dri.push(DriNode { path: DRI.0.to_owned(), minor });
        }
        if !matches!(major, None | Some(..0 | NVIDIA_MAJOR)) {
            continue;
        }
        match minor {
            None | Some(..0) => brought.allowed.push(BroughtGpu::rule(None)),
            Some(minor @ 0..=LAST_GPU_MINOR) => {
                brought.allowed.push(BroughtGpu::rule(u32::try_from(minor).ok()));
            }
            Some(minor) if minor == MODESET.1 => {
                let by = || format!("the device rule c {NVIDIA_MAJOR}:{minor}");
                brought.graphics.get_or_insert_with(by);
            }
            Some(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn gpus(config: &Value) -> Vec<BroughtName> {
        brought(config).gpus.into_iter().map(|one| one.gpu).collect()
    }

    fn node(path: &str, major: i64, minor: i64) -> Value {
        json!({"path": path, "type": "c", "major": major, "minor": minor})
    }

    #[test]
    fn nodes_are_gpus_by_their_numbers() {
        let config = json!({"linux": {"devices": [
            node("/dev/nvidiactl", 195, 255),
            node("/dev/nvidia-modeset", 195, 254),
            node("/dev/nvidia-uvm", 510, 0),
            node("/dev/nvidia0", 195, 3),
            node("/dev/hidden", 195, 1),
            node("/dev//nvidia7", 1, 3),
            node("/dev/fuse", 10, 229),
            {"path": "/dev/x", "type": "c", "major": 195},
            node("/dev/nvidia-caps/nvidia-cap12", 511, 12),
            {"path": "/dev/nvidia9", "type": "b", "major": 195, "minor": 9},
        ]}});
        let expected = [3, 1, 7, 0].map(BroughtName::Minor);
        assert_eq!(gpus(&config), expected);
        assert_eq!(brought(&config).mig_nodes, [12]);
        assert_eq!(brought(&config).gpus[0].by, "node /dev/nvidia0");
    }

    #[test]
    fn mounts_of_nodes_are_gpus_by_either_end() {
        let mount = |source: &str, destination: &str| json!({"type": "bind", "source": source, "destination": destination});
        let config = json!({"mounts": [
            mount("/dev/nvidia2", "/gpu"),
            mount("/sim/dev/nvidia1", "/dev/nvidia1"),
            mount("/elsewhere", "/dev//nvidia5"),
            mount("/dev/null", "/dev/nvidia6"),
            mount("/dev/nvidiactl", "/dev/nvidiactl"),
            mount("/home/nvidia3", "/data"),
            {"type": "tmpfs", "source": "/dev/nvidia9", "destination": "/dev/nvidia9"},
            {"options": ["rbind"], "source": "/dev/nvidia4", "destination": "/x"},
            mount("/x", "/var/run/nvidia-container-devices/GPU-a"),
        ]});
        let mut expected = [2, 1, 5, 4].map(BroughtName::Minor).to_vec();
        expected.push(BroughtName::Named("GPU-a".into()));
        assert_eq!(gpus(&config), expected);
        assert_eq!(brought(&config).everything, None);
        assert_eq!(brought(&config).gpus[0].by, "the mount of /dev/nvidia2");
    }

    /// Access to every device at once is no GPU by itself.
    #[test]
    fn access_to_every_device_brings_no_gpu() {
        let privileged = json!({"linux": {
            "devices": [node("/dev/nvidia0", 195, 0), node("/dev/nvidia1", 195, 1)],
            "resources": {"devices": [{"allow": true, "access": "rwm"}]},
        }});
        let found = brought(&privileged);
        assert_eq!((found.gpus, found.everything), (Vec::new(), Some("every device")));
        for (source, everything) in [
            ("/dev", Some("a mount of the host's /dev")),
            ("/dev/", Some("a mount of the host's /dev")),
            ("/", Some("a mount of the host's root")),
            ("/dev/shm", None),
        ] {
            let config = json!({"mounts": [
                {"type": "bind", "source": source, "destination": "/x", "options": ["rbind"]},
            ]});
            assert_eq!(brought(&config).everything, everything, "{source}");
        }
    }

    #[test]
    fn rules_allow_gpus_without_their_nodes() {
        let config = json!({"linux": {"resources": {"devices": [
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "major": 195, "minor": 3, "access": "rw"},
            {"allow": true, "type": "c", "major": 195, "access": "rwm"},
            {"allow": true, "type": "c", "major": 195, "minor": 255, "access": "rw"},
            {"allow": true, "type": "c", "major": 195, "minor": 1, "access": "m"},
            {"allow": false, "type": "c", "major": 195, "minor": 1, "access": "rw"},
            {"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rw"},
            {"allow": true, "type": "c", "major": -1, "minor": 2, "access": "rw"},
            {"allow": true, "type": "c", "access": "m"},
        ]}}});
        let found = brought(&config);
        let allowed: Vec<_> = found.allowed.into_iter().map(|one| one.gpu).collect();
        assert_eq!(
            (found.gpus, allowed),
            (vec![], vec![BroughtName::Minor(3), BroughtName::All, BroughtName::Minor(2)])
        );
    }

    #[test]
    fn the_drivers_files_are_seen() {
        let by = |config: &Value| brought(config).driver_files;
        let mounted = |at: &str| json!({"mounts": [{"destination": at, "source": "/x"}]});
        let hook = |path: &str| json!({"hooks": {"prestart": [{"path": path}]}});
        assert_eq!(by(&mounted("/usr/lib/libcudart.so.12")), None);
        assert_eq!(by(&hook("/usr/bin/cgpu-hook")), None);
        let found = brought(&hook("/usr/bin/nvidia-container-runtime-hook"));
        assert!(found.nvidia_hook);
        assert_eq!(found.driver_files.unwrap(), "the hook /usr/bin/nvidia-container-runtime-hook");
        assert_eq!(
            by(&mounted("/usr/lib64/libcuda.so.535.1")).unwrap(),
            "the mount at /usr/lib64/libcuda.so.535.1"
        );
        assert!(by(&mounted("/usr/lib64/libnvidia-ml.so.1")).is_some());
    }

    #[test]
    fn annotations_of_cdi_name_gpus() {
        let config = json!({"annotations": {
            "cdi.k8s.io/vfio_1": "vendor.com/nic=1",
            "cdi.k8s.io/gpu": "nvidia.com/gpu=0,nvidia.com/gpu=GPU-b",
            "cdi.k8s.io/odd": 3,
            "nvidia.cdi.k8s.io/x": "nvidia.com/gpu=2",
            "x": "nvidia.com/gpu=7",
        }});
        let expected = ["0", "GPU-b", "2"].map(|name| BroughtName::Named(name.into()));
        assert_eq!(gpus(&config), expected);
    }

    #[test]
    fn a_misshapen_bundle_brings_nothing() {
        for config in [
            json!({"linux": 3, "mounts": {}, "hooks": [], "annotations": []}),
            json!({"linux": {"devices": [3, null, {}], "resources": {"devices": "x"}}}),
            json!({"mounts": [3, {"destination": 4, "source": [], "type": {}}]}),
            json!({"hooks": {"prestart": {"path": 1}, "poststop": [{"path": 2}, 3]}}),
        ] {
            assert_eq!(brought(&config), Brought::default(), "{config}");
        }
    }
}
