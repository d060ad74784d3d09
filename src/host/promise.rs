//! The promise of the table, from a bundle to what its container sees: tests.
//!
//! A bundle that asks for a quota anywhere never starts with an NVIDIA node and without that quota, but
//! by the rows of the table that are reported. The generator has what engines leave in bundles; the oracle
//! looks at the edited bundle as a container's processes would, and knows nothing of how it was edited.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};

use super::Host;
use crate::backend::Way;
use crate::bundle::{Bundle, DeviceNode, Edits, Withheld};
use crate::config::Config;
use crate::gpu::{Gpu, GpuState, Inventory};
use crate::inject::Nodes;
use crate::plan::{Kind, Plan, resolve};
use crate::process::ProcessId;
use crate::registry::{Holder, Key, Record};
use crate::request::{EntryPoint, Profile, Verdict};
use crate::units::MIB;

/// GPUs of the host; each has the minor number of its index.
const GPUS: u32 = 4;

fn inventory() -> Inventory {
    let gpu = |index| Gpu {
        index,
        uuid: format!("GPU-{index}"),
        minor: index,
        bus_id: String::new(),
        name: String::new(),
        memory_bytes: 15_000 * MIB,
        state: GpuState::Ok,
        mig_enabled: false,
        mig_devices: Vec::new(),
    };
    Inventory::new((0..GPUS).map(gpu).collect()).unwrap()
}

/// What an engine does to a bundle.
#[derive(Debug, Clone)]
enum Brings {
    /// docker's and podman's `--device /dev/nvidiaN`: the node, and a rule for it.
    Device(u32),
    /// A CDI specification by docker 28, podman 5 or containerd 2.1: nodes of GPUs and of control, rules,
    /// libraries, hooks, and what NVIDIA's generator sets.
    Cdi(Vec<u32>, &'static str),
    /// `-v /dev/nvidiaN:/dev/nvidiaN`.
    Volume(u32),
    /// `--privileged` by docker, podman and containerd: each device of the host, and a rule for all.
    Privileged,
    /// `-v /dev:/dev`, with or without a rule for NVIDIA's devices.
    AllOfDev,
    /// `--device-cgroup-rule 'c 195:* rwm'`.
    Rule,
    /// `--device-cgroup-rule 'c 195:N rwm'`.
    RuleOf(u32),
    /// docker's `--gpus`: NVIDIA's hook, and its variable.
    Hook(&'static str),
    /// The annotation by which a CRI engine is asked for a CDI device.
    Annotation(&'static str),
    /// NVIDIA's device plugin by volume mounts.
    DeviceMount(&'static str),
}

fn device(minor: u32) -> Value {
    json!({"path": format!("/dev/nvidia{minor}"), "type": "c", "major": 195, "minor": minor,
           "fileMode": 438, "uid": 0, "gid": 0})
}

fn rule(minor: Option<u32>) -> Value {
    match minor {
        Some(minor) => {
            json!({"allow": true, "type": "c", "major": 195, "minor": minor, "access": "rwm"})
        }
        None => json!({"allow": true, "type": "c", "major": 195, "access": "rwm"}),
    }
}

fn bind(source: &str, destination: &str) -> Value {
    json!({"destination": destination, "type": "bind", "source": source, "options": ["rbind", "rprivate"]})
}

impl Brings {
    fn apply(&self, config: &mut Value) {
        let mut push = |pointer: &str, value: Value| {
            config.pointer_mut(pointer).unwrap().as_array_mut().unwrap().push(value);
        };
        const DEVICES: &str = "/linux/devices";
        const RULES: &str = "/linux/resources/devices";
        match self {
            Brings::Device(minor) => {
                push(DEVICES, device(*minor));
                push(RULES, rule(Some(*minor)));
            }
            Brings::Cdi(minors, visible) => {
                for minor in minors.iter().copied().chain([255]) {
                    let mut node = device(minor);
                    if minor == 255 {
                        node["path"] = json!("/dev/nvidiactl");
                    }
                    push(DEVICES, node);
                    push(RULES, rule(Some(minor)));
                }
                push("/mounts", bind("/usr/lib/libcuda.so.580.1", "/usr/lib/libcuda.so.580.1"));
                let hook = json!({"path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook"]});
                push("/hooks/createContainer", hook);
                set_env(config, "NVIDIA_VISIBLE_DEVICES", visible);
            }
            Brings::Volume(minor) => {
                let path = format!("/dev/nvidia{minor}");
                push("/mounts", bind(&path, &path));
            }
            Brings::Privileged => {
                (0..GPUS).for_each(|minor| push(DEVICES, device(minor)));
                push(RULES, json!({"allow": true, "access": "rwm"}));
            }
            Brings::AllOfDev => push("/mounts", bind("/dev", "/dev")),
            Brings::Rule => push(RULES, rule(None)),
            Brings::RuleOf(minor) => push(RULES, rule(Some(*minor))),
            Brings::Hook(visible) => {
                let hook = json!({"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x", "prestart"]});
                push("/hooks/prestart", hook);
                set_env(config, "NVIDIA_VISIBLE_DEVICES", visible);
            }
            Brings::Annotation(value) => config["annotations"]["cdi.k8s.io/gpus"] = json!(value),
            Brings::DeviceMount(name) => {
                push(
                    "/mounts",
                    bind("/dev/null", &format!("/var/run/nvidia-container-devices/{name}")),
                );
            }
        }
    }
}

/// Sets a variable as engines do: over what the user wrote.
fn set_env(config: &mut Value, name: &str, value: &str) {
    let env = config.pointer_mut("/process/env").unwrap().as_array_mut().unwrap();
    env.retain(|item| item.as_str().unwrap().split('=').next() != Some(name));
    env.push(json!(format!("{name}={value}")));
}

fn brings() -> impl Strategy<Value = Brings> {
    let minor = || 0..GPUS;
    prop_oneof![
        minor().prop_map(Brings::Device),
        (
            proptest::sample::subsequence((0..GPUS).collect::<Vec<_>>(), 1..=2),
            proptest::sample::select(&["void", "void", "none", "", "all"][..]),
        )
            .prop_map(|(minors, visible)| Brings::Cdi(minors, visible)),
        minor().prop_map(Brings::Volume),
        Just(Brings::Privileged),
        Just(Brings::AllOfDev),
        Just(Brings::Rule),
        minor().prop_map(Brings::RuleOf),
        proptest::sample::select(&["0", "all", "GPU-1,GPU-2", "void"][..]).prop_map(Brings::Hook),
        proptest::sample::select(&["nvidia.com/gpu=0", "nvidia.com/gpu=all", "vendor.com/x=1"][..])
            .prop_map(Brings::Annotation),
        proptest::sample::select(&["all", "GPU-1", "imex/0"][..]).prop_map(Brings::DeviceMount),
    ]
}

/// What users, images and orchestrators say.
fn settings() -> impl Strategy<Value = Vec<(&'static str, &'static str)>> {
    let one = |name: &'static str, values: &'static [&'static str]| {
        proptest::option::weighted(
            0.4,
            proptest::sample::select(values).prop_map(move |v| (name, v)),
        )
    };
    const GPU_WORDS: &[&str] = &["all", "none", "void", "", "0", "1,2", "GPU-3", "0,1,2,3"];
    (
        one("ALIYUN_COM_GPU_MEM_CONTAINER", &["3", "3", "3", "0", "", "5,6"]),
        one("NVIDIA_VISIBLE_DEVICES", GPU_WORDS),
        one("ALIYUN_COM_GPU_VISIBLE_DEVICES", GPU_WORDS),
        one("CGPU_DISABLE", &["true", "false", "1", ""]),
        one("aliyun.com/gpu-mem-container", &["3", "0"]),
        one("aliyun.com/gpu-visible-devices", &["0", "all", "void", "1,2"]),
        one("aliyun.com/cgpu-disable", &["true", "false"]),
        one("io.kubernetes.cri.container-type", &["sandbox", "container"]),
        one("DOCKER_RESOURCE_GPU", &["GPU-2", "1"]),
    )
        .prop_map(|(a, b, c, d, e, f, g, h, i)| {
            [a, b, c, d, e, f, g, h, i].into_iter().flatten().collect()
        })
}

fn bundle(settings: &[(&str, &str)], all: &[Brings]) -> Value {
    let mut config = json!({
        "process": {"args": ["sh"], "env": ["PATH=/bin", "ALIYUN_COM_GPU_MEM_DEV=15"],
                    "capabilities": {"bounding": ["CAP_MKNOD"]}},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
        "hooks": {"prestart": [], "createContainer": []},
        "annotations": {},
        "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}], "devices": [],
                  "resources": {"devices": [{"allow": false, "access": "rwm"}]}},
    });
    for (name, value) in settings {
        match name.contains('.') {
            true => config["annotations"][name] = json!(value),
            false => set_env(&mut config, name, value),
        }
    }
    all.iter().for_each(|brings| brings.apply(&mut config));
    config
}

/// The minor numbers of the GPUs that a process of the container can open: by a node of its own that
/// the device rules allow, made by mknod if need be, or by a mount of the node. A mount of the whole of
/// /dev is under the rules, too; one of a single node counts by itself, for hosts that have no rules.
fn can_open(config: &Value) -> Vec<u32> {
    let is_allowed = |minor: u32| {
        let matches = |rule: &Value, field: &str, wanted: u32| match rule
            .get(field)
            .and_then(Value::as_i64)
        {
            None | Some(..0) => true,
            Some(found) => found == i64::from(wanted),
        };
        let rules = config.pointer("/linux/resources/devices").unwrap().as_array().unwrap();
        let last = rules.iter().rfind(|rule| {
            matches!(rule["type"].as_str(), None | Some("a" | "c"))
                && rule["access"] != "m"
                && matches(rule, "major", 195)
                && matches(rule, "minor", minor)
        });
        last.is_some_and(|rule| rule["allow"] == true)
    };
    let is_mounted = |minor: u32| {
        let path = format!("/dev/nvidia{minor}");
        let mounts = config["mounts"].as_array().unwrap();
        mounts.iter().any(|mount| mount["source"] == *path || mount["destination"] == *path)
    };
    (0..GPUS).filter(|minor| is_allowed(*minor) || is_mounted(*minor)).collect()
}

/// Whether a later runtime or hook of NVIDIA's would bring GPUs, and which, by what the bundle says.
fn asks_nvidia(config: &Value) -> bool {
    let annotations = config["annotations"].as_object().unwrap();
    let by_annotation = annotations.iter().any(|(key, value)| {
        key.starts_with("cdi.k8s.io/") && value.as_str().unwrap().contains("nvidia.com/gpu")
    });
    let mounts = config["mounts"].as_array().unwrap();
    let by_mount = mounts.iter().any(|mount| {
        let to = mount["destination"].as_str().unwrap();
        to.starts_with("/var/run/nvidia-container-devices/") && !to.contains("/imex/")
    });
    by_annotation || by_mount
}

/// Whether anything in the bundle asks for a quota, whatever lifts it.
fn asks_anywhere(settings: &[(&str, &str)]) -> bool {
    let asks = |(name, value): &(&str, &str)| {
        name.to_ascii_lowercase().replace('_', "-").ends_with("gpu-mem-container")
            && value.bytes().any(|byte| byte != b'0')
    };
    settings.iter().any(asks)
}

fn host(dir: &Path, profile: Profile) -> Host {
    let mut config = Config { state_dir: dir.to_owned(), ..Config::default() };
    config.admission.profile = profile;
    config.driver.root = dir.to_owned();
    config.driver.proc_root = dir.to_owned();
    config.isolation.km_root = dir.join("no-module");
    Host::new(config, None, Way::Ahead)
}

/// The bundle after the create's edits, and the plan.
fn edited(host: &Host, config: &Value) -> Result<(Value, Option<Plan>), String> {
    let text = config.to_string();
    let mut bundle =
        Bundle::from_bytes(text.as_bytes(), PathBuf::new(), "config.json".into()).unwrap();
    let decision =
        host.decide(&bundle, Some("0123abcd"), EntryPoint::Runtime).map_err(|e| e.to_string())?;
    let request = match &decision.verdict {
        Verdict::NotOurs(_) => return Ok((config.clone(), None)),
        Verdict::Ours(request) => request,
    };
    let mut plan = resolve(request, &inventory(), Kind::None, 20).map_err(|e| e.to_string())?;
    if !plan.is_whole() {
        plan.backend = Kind::Gate;
    }
    let is_given = |minor: &u32| plan.gpus.iter().any(|gpu| gpu.minor == *minor);
    let path = |minor: u32| format!("/dev/nvidia{minor}");
    let devices = (0..GPUS).filter(is_given).map(|m| DeviceNode::new(path(m), 195, m.into()));
    let withheld = (0..GPUS).filter(|minor| !is_given(minor));
    let withheld =
        withheld.map(|m| Withheld { path: path(m), source: path(m), major: 195, minor: m.into() });
    let nodes =
        Nodes { devices: devices.collect(), binds: Vec::new(), withheld: withheld.collect() };
    let record = Record {
        key: Key { root: "/r".into(), id: "a".into() },
        bundle: "/b".into(),
        short_id: "a___________".into(),
        boot_id: "boot".into(),
        holder: Holder::Active { init: Some(ProcessId { pid: 1, start_ticks: 1 }) },
        plan,
    };
    let edits = host
        .edits((&record, request), &bundle, nodes, Edits::default(), Vec::new())
        .map_err(|e| e.to_string())?;
    let changed = bundle.apply(&edits).map_err(|e| e.to_string())?;
    assert!(!changed || !request.is_as_brought(), "what was brought stays as it is");
    Ok((serde_json::from_str(&bundle.to_text()).unwrap(), Some(record.plan)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn a_quota_that_is_asked_for_is_never_lost_in_silence(
        settings in settings(),
        all in proptest::collection::vec(brings(), 0..3),
        strict: bool,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let profile = if strict { Profile::Strict } else { Profile::Open };
        let before = bundle(&settings, &all);
        // A refusal keeps every promise.
        let Ok((after, plan)) = edited(&host(dir.path(), profile), &before) else { return Ok(()) };
        let open = can_open(&after);
        if !asks_anywhere(&settings) {
            return Ok(());
        }
        let Some(plan) = plan else {
            prop_assert!(open.is_empty(), "untouched, and it can open {:?}", open);
            prop_assert!(!asks_nvidia(&after), "untouched, and NVIDIA's runtime would bring GPUs");
            return Ok(());
        };
        if plan.caveats.unenforced_by.is_some() {
            // The rows that are reported: under open alone.
            prop_assert!(!strict);
            prop_assert!(!plan.warnings().is_empty());
            return Ok(());
        }
        for minor in open {
            let gpu = plan.gpus.iter().find(|gpu| gpu.minor == minor);
            let limit = gpu.and_then(|gpu| gpu.memory_limit_bytes);
            prop_assert!(limit.is_some(), "it can open GPU {} without a quota: {}", minor, plan);
        }
        prop_assert!(!asks_nvidia(&after), "NVIDIA's runtime would bring GPUs afterwards");
    }
}
