//! Bundles as engines leave them: recorded ones, and single things that are brought on top.

use std::fmt;
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// GPUs of the host; each has the minor number of its index, and the UUID `GPU-` with it.
pub(super) const GPUS: u32 = 4;

/// Recordings (`tests/bundles/record`), a file for each engine: `{"engine": …, "bundles": {COMMAND:
/// {"gpus": [INDEX…] or null, "config": …}}}`.
const FILES: [&str; 7] = [
    include_str!("../../../tests/bundles/containerd-1.6.json"),
    include_str!("../../../tests/bundles/containerd-2.1.json"),
    include_str!("../../../tests/bundles/cri-o.json"),
    include_str!("../../../tests/bundles/docker-20.10.json"),
    include_str!("../../../tests/bundles/docker-28.5.json"),
    include_str!("../../../tests/bundles/podman-4.3.json"),
    include_str!("../../../tests/bundles/podman-5.8.json"),
];

/// A bundle that an engine made.
#[derive(Clone)]
pub(super) struct Recorded {
    /// The engine and its options.
    pub(super) by: String,
    /// The GPUs that the container has or asks for, by whichever means; `None` if every device of the
    /// host came at once.
    pub(super) gpus: Option<Vec<u32>>,
    /// What `config.json` has of them.
    pub(super) config: Value,
}

impl fmt::Debug for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.by)
    }
}

pub(super) static RECORDED: LazyLock<Vec<Recorded>> = LazyLock::new(|| {
    let of_file = |text: &&str| {
        let file: Value = serde_json::from_str(text).unwrap();
        let engine = file["engine"].as_str().unwrap().to_owned();
        let bundles = file["bundles"].as_object().unwrap().clone();
        bundles.into_iter().map(move |(command, bundle)| Recorded {
            by: format!("{engine}: {command}"),
            gpus: serde_json::from_value(bundle["gpus"].clone()).unwrap(),
            config: in_new_namespaces(bundle["config"].clone()),
        })
    };
    FILES.iter().flat_map(of_file).collect()
});

/// The same without the paths of a pod's namespaces, which have ended since.
fn in_new_namespaces(mut config: Value) -> Value {
    for namespace in list(&mut config, &["linux", "namespaces"]) {
        namespace.as_object_mut().unwrap().remove("path");
    }
    config
}

/// One of them, or an empty one.
pub(super) fn recorded() -> impl Strategy<Value = Recorded> {
    let bare = Recorded {
        by: "nothing".into(),
        gpus: Some(Vec::new()),
        config: json!({
            "process": {"args": ["sh"], "env": ["PATH=/bin"],
                        "capabilities": {"bounding": ["CAP_MKNOD"]}},
            "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
            "hooks": {},
            "annotations": {},
            "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}], "devices": [],
                      "resources": {"devices": [{"allow": false, "access": "rwm"}]}},
        }),
    };
    prop_oneof![2 => Just(bare), 3 => proptest::sample::select(RECORDED.as_slice())]
}

/// What else a user, an image or a plugin brings into a bundle.
#[derive(Debug, Clone)]
pub(super) enum Brings {
    /// A node, and a rule for it.
    Node { minor: u32 },
    /// The node of another kind, and a rule for it: of displays, of MIG's capabilities.
    Other { path: &'static str, major: u32, minor: u32 },
    /// A bind mount of a node or a directory.
    Mount(&'static str),
    /// A device rule: numbers, and what is allowed.
    Rule { major: Option<u32>, minor: Option<u32>, access: &'static str },
    /// NVIDIA's hook.
    Hook,
    /// A hook that calls `nvidia-container-cli` for these devices, as containerd's.
    CliHook(&'static str),
    /// An annotation that asks for a CDI device.
    Annotation(&'static str, &'static str),
    /// A mount by whose name NVIDIA's toolkit is asked for a device.
    DeviceMount(&'static str),
}

/// The list at `path`, made if it isn't there.
fn list<'a>(config: &'a mut Value, path: &[&str]) -> &'a mut Vec<Value> {
    let (last, before) = path.split_last().unwrap();
    let mut at = config;
    for field in before {
        at = at.as_object_mut().unwrap().entry(*field).or_insert_with(|| json!({}));
    }
    at.as_object_mut().unwrap().entry(*last).or_insert_with(|| json!([])).as_array_mut().unwrap()
}

impl Brings {
    pub(super) fn apply(&self, config: &mut Value) {
        const DEVICES: &[&str] = &["linux", "devices"];
        const RULES: &[&str] = &["linux", "resources", "devices"];
        let mut node = |path: &str, major: u32, minor: u32| {
            let numbers = json!({"type": "c", "major": major, "minor": minor});
            let with = |more: Value| {
                let mut all = numbers.as_object().unwrap().clone();
                all.extend(more.as_object().unwrap().clone());
                Value::Object(all)
            };
            list(config, DEVICES).push(with(json!({"path": path})));
            list(config, RULES).push(with(json!({"allow": true, "access": "rwm"})));
        };
        match self {
            Brings::Node { minor } => node(&format!("/dev/nvidia{minor}"), 195, *minor),
            Brings::Other { path, major, minor } => node(path, *major, *minor),
            Brings::Mount(path) => list(config, &["mounts"]).push(json!({
                "destination": path, "type": "bind", "source": path, "options": ["rbind", "rprivate"],
            })),
            Brings::Rule { major, minor, access } => {
                let mut rule = Map::new();
                rule.extend([("allow".into(), json!(true)), ("access".into(), json!(access))]);
                if major.is_some() {
                    rule.insert("type".into(), json!("c"));
                }
                rule.extend(major.map(|major| ("major".into(), json!(major))));
                rule.extend(minor.map(|minor| ("minor".into(), json!(minor))));
                list(config, RULES).push(Value::Object(rule));
            }
            Brings::Hook => list(config, &["hooks", "prestart"]).push(json!({
                "path": "/usr/bin/nvidia-container-runtime-hook",
                "args": ["nvidia-container-runtime-hook", "prestart"],
            })),
            Brings::CliHook(devices) => list(config, &["hooks", "createRuntime"]).push(json!({
                "path": "/usr/bin/containerd",
                "args": ["containerd", "oci-hook", "--", "/usr/bin/nvidia-container-cli", "configure",
                         format!("--device={devices}"), "--display"],
            })),
            Brings::Annotation(key, value) => config["annotations"][*key] = json!(value),
            Brings::DeviceMount(name) => list(config, &["mounts"]).push(json!({
                "destination": format!("/var/run/nvidia-container-devices/{name}"),
                "type": "bind", "source": "/dev/null", "options": ["rbind"],
            })),
        }
    }
}

pub(super) fn brings() -> impl Strategy<Value = Brings> {
    let minor = || 0..GPUS;
    let select = |values: &'static [&'static str]| proptest::sample::select(values);
    prop_oneof![
        minor().prop_map(|minor| Brings::Node { minor }),
        Just(Brings::Other { path: "/dev/nvidia-modeset", major: 195, minor: 254 }),
        Just(Brings::Other { path: "/dev/hidden", major: 195, minor: 254 }),
        Just(Brings::Other { path: "/dev/nvidia-caps/nvidia-cap1", major: 511, minor: 1 }),
        Just(Brings::Other { path: "/dev/nvidiactl", major: 195, minor: 255 }),
        select(&["/dev", "/", "/dev/nvidia1", "/dev/nvidia-modeset"]).prop_map(Brings::Mount),
        (
            proptest::sample::select(&[Some(195), None][..]),
            proptest::option::of(proptest::sample::select(&[0, 2, 254, 255][..])),
            select(&["rwm", "rw", "r", "m"]),
        )
            .prop_map(|(major, minor, access)| Brings::Rule { major, minor, access }),
        Just(Brings::Hook),
        select(&["0", "all", "GPU-1,2"]).prop_map(Brings::CliHook),
        (
            select(&["cdi.k8s.io/x", "nvidia.cdi.k8s.io/y"]),
            select(&[
                "nvidia.com/gpu=0",
                "nvidia.com/gpu=all",
                "vendor.com/x=1",
                "k8s.gpu.nvidia.com/claim=a"
            ]),
        )
            .prop_map(|(key, value)| Brings::Annotation(key, value)),
        select(&["all", "GPU-1", "imex/0", "cdi/nvidia.com/gpu/2"]).prop_map(Brings::DeviceMount),
    ]
}

/// Sets a variable as engines do: over what is there.
pub(super) fn set_env(config: &mut Value, name: &str, value: &str) {
    let env = list(config, &["process", "env"]);
    env.retain(|item| item.as_str().unwrap().split('=').next() != Some(name));
    env.push(json!(format!("{name}={value}")));
}
