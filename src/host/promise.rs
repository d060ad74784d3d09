//! The promise of the table, from a bundle to what its container reaches: tests.
//!
//! A bundle that asks for a quota anywhere never starts with an NVIDIA node and without that quota, but
//! by the rows of the table that are reported; and under `strict` what an image adds makes no container
//! larger. The bundles are those of real engines, with what users, images and plugins may add.

mod bundles;
mod container;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};

use self::bundles::{Brings, GPUS, RECORDED, Recorded, brings, recorded, set_env};
use self::container::{Reached, reached};
use super::Host;
use cgpu_core::gpu::{Gpu, GpuState, Inventory};
use cgpu_core::plan::{Kind, Limits, Placement, Plan, resolve};
use cgpu_core::request::{EntryPoint, Profile, Verdict};
use cgpu_core::units::MIB;
use cgpu_host::config::{Config, Inject, Privileged, Whole};
use cgpu_host::process::ProcessId;
use cgpu_host::registry::{Holder, Key, Record};
use cgpu_inject::bundle::{Bundle, DeviceNode, Withheld};
use cgpu_inject::{Nodes, Purpose};

/// The id of the container that is made.
const ID: &str = "0000000000000000000000000000000000000000000000000000000000000001";

fn inventory() -> Inventory {
    let gpu = |index| Gpu {
        index,
        uuid: format!("GPU-{index}"),
        minor: index,
        bus_id: String::new(),
        name: String::new(),
        memory_bytes: 15_000 * MIB,
        reserved_bytes: 0,
        state: GpuState::Ok,
        mig_enabled: false,
        mig_devices: Vec::new(),
    };
    Inventory::new((0..GPUS).map(gpu).collect()).unwrap()
}

/// A variable or, with a dot in its name, an annotation.
type Setting = (&'static str, &'static str);

/// What users, images and orchestrators say.
fn settings() -> impl Strategy<Value = Vec<Setting>> {
    const GPU_WORDS: &[&str] = &["all", "none", "void", "", "0", "1,2", "GPU-3", "0,1,2,3"];
    const KNOWN: &[(&str, &[&str])] = &[
        ("ALIYUN_COM_GPU_MEM_CONTAINER", &["3", "3", "3", "0", "", "5,6"]),
        ("ALIYUN_COM_GPU_MEM_DEV", &["15", "15", "30", ""]),
        ("ALIYUN_COM_GPU_MEM_UNIT", &["GiB", "MiB"]),
        ("NVIDIA_VISIBLE_DEVICES", GPU_WORDS),
        ("ALIYUN_COM_GPU_VISIBLE_DEVICES", GPU_WORDS),
        ("CGPU_DISABLE", &["true", "false", "1", ""]),
        ("ALIYUN_COM_GPU_SCHD_WEIGHT", &["1", "4"]),
        ("ALIYUN_COM_GPU_HIGH_PRIO", &["0", "1"]),
        ("CGPU_MEMORY", &["2GiB", "25%", "3g,1g", "0", ""]),
        ("CGPU_GPUS", &["1", "2", "all", "none", "device=1", "device=0,2", ""]),
        ("CGPU_WEIGHT", &["1", "4"]),
        ("CGPU_PRIORITY", &["normal", "high"]),
        ("NVIDIA_GPU_MEMORY_LIMIT", &["2048", "0"]),
        ("cgpu/memory", &["1GiB", "50%"]),
        ("cgpu/gpus", &["1", "device=1"]),
        ("NVIDIA_DRIVER_CAPABILITIES", &["all", "compute,utility", "display", "graphics,compute"]),
        ("CUDA_VERSION", &["9.0.176"]),
        ("DOCKER_RESOURCE_GPU", &["GPU-2", "1", "GPU-0,GPU-1"]),
        ("aliyun.com/gpu-mem-container", &["3", "0", "6"]),
        ("aliyun.com/gpu-mem-dev", &["15"]),
        ("aliyun.com/gpu-visible-devices", &["0", "all", "void", "1,2"]),
        ("aliyun.com/cgpu-disable", &["true", "false"]),
        ("aliyun.com/gpu-schd-weight", &["4"]),
        ("io.kubernetes.cri.container-type", &["sandbox", "container"]),
        ("io.kubernetes.cri.sandbox-id", &[ID, "2"]),
        ("io.kubernetes.cri.sandbox-name", &["p"]),
        ("io.kubernetes.cri.sandbox-namespace", &["default"]),
    ];
    let one = |(name, values): &(&'static str, &'static [&'static str])| {
        let name = *name;
        let value = proptest::sample::select(*values).prop_map(move |value| (name, value));
        proptest::option::weighted(0.25, value)
    };
    let all: Vec<_> = KNOWN.iter().map(one).collect();
    // Without a total most quotas mean nothing, and a mark alone proves nothing.
    (all, proptest::bool::weighted(0.8), proptest::bool::weighted(0.1)).prop_map(
        |(all, with_total, is_sandbox)| {
            let total = Some(("ALIYUN_COM_GPU_MEM_DEV", "15")).filter(|_| with_total);
            let marks = KNOWN.iter().filter(|(name, _)| name.contains("cri."));
            let marks = marks.filter(|_| is_sandbox).map(|(name, values)| (*name, values[0]));
            all.into_iter().flatten().chain(total).chain(marks).collect()
        },
    )
}

fn is_annotation(name: &str) -> bool {
    name.contains(['.', '/'])
}

fn set(config: &mut Value, settings: &[Setting]) {
    for (name, value) in settings {
        match is_annotation(name) {
            true => config["annotations"][name] = json!(value),
            false => set_env(config, name, value),
        }
    }
}

/// A host's rules, and our caller.
#[derive(Debug, Clone)]
struct Rules {
    profile: Profile,
    trust_env: bool,
    trust_annotations: bool,
    whole: Whole,
    accepts: bool,
    require_quota: bool,
    exclusive: bool,
    privileged: Privileged,
    is_under_nvidias: bool,
    inject: Inject,
    entry: EntryPoint,
}

fn rules() -> impl Strategy<Value = Rules> {
    let profile = proptest::sample::select(&[Profile::Open, Profile::Strict][..]);
    let whole = proptest::sample::select(&[Whole::Auto, Whole::Off][..]);
    let entry = prop_oneof![
        6 => Just(EntryPoint::Runtime),
        1 => Just(EntryPoint::PrecreateHook),
        1 => Just(EntryPoint::LateHook),
    ];
    let mostly = || proptest::bool::weighted(0.8);
    let seldom = || proptest::bool::weighted(0.2);
    let of_nvidia = (seldom(), proptest::sample::select(&[Inject::Off, Inject::Auto][..]));
    (profile, mostly(), mostly(), whole, mostly(), seldom(), seldom(), (seldom(), of_nvidia, entry))
        .prop_map(
            |(
                profile,
                trust_env,
                trust_annotations,
                whole,
                accepts,
                require_quota,
                exclusive,
                more,
            )| {
                let (refuses, (is_under_nvidias, inject), entry) = more;
                let privileged = if refuses { Privileged::Refuse } else { Privileged::Allow };
                Rules {
                    profile,
                    trust_env,
                    trust_annotations,
                    whole,
                    accepts,
                    require_quota,
                    exclusive,
                    privileged,
                    is_under_nvidias,
                    inject,
                    entry,
                }
            },
        )
}

impl Rules {
    const OPEN: Rules = Rules {
        profile: Profile::Open,
        trust_env: true,
        trust_annotations: true,
        whole: Whole::Auto,
        accepts: true,
        require_quota: false,
        exclusive: false,
        privileged: Privileged::Allow,
        is_under_nvidias: false,
        inject: Inject::Off,
        entry: EntryPoint::Runtime,
    };

    fn host(&self, dir: &Path) -> Host {
        let mut config = Config { state_dir: dir.to_owned(), ..Config::default() };
        let admission = &mut config.admission;
        admission.profile = self.profile;
        admission.trust_env = self.trust_env;
        admission.trust_annotations = self.trust_annotations;
        admission.accept_nvidia_visible_devices_envvar_when_unprivileged = self.accepts;
        admission.require_quota = self.require_quota;
        admission.exclusive = self.exclusive;
        admission.privileged = self.privileged;
        config.driver.whole = self.whole;
        config.driver.inject = self.inject;
        config.driver.root = dir.to_owned();
        config.driver.proc_root = dir.to_owned();
        config.driver.cdi_dirs.clear();
        config.isolation.km_root = dir.join("no-module");
        if self.is_under_nvidias {
            config.runtime.candidates = vec!["/usr/bin/nvidia-container-runtime".into()];
        }
        Host::new(config, None)
    }

    /// The bundle as the real runtime gets it, and the plan, if the container is ours.
    fn made(&self, config: &Value) -> Result<(Value, Option<Plan>), String> {
        let dir = tempfile::tempdir().unwrap();
        let mut host = self.host(dir.path());
        if self.entry == EntryPoint::LateHook {
            host.config.driver.whole = Whole::Off;
        }
        let text = config.to_string();
        let mut bundle =
            Bundle::from_bytes(text.as_bytes(), PathBuf::new(), "config.json".into()).unwrap();
        let id = Some(ID).filter(|_| self.entry != EntryPoint::PrecreateHook);
        let decision = host.decide(&bundle, id, self.entry).map_err(|e| e.to_string())?;
        let request = match &decision.verdict {
            Verdict::NotOurs(_) => return Ok((config.clone(), None)),
            Verdict::Ours(request) => request,
        };
        let inventory = inventory();
        let mut proposal =
            resolve(request, &inventory, Kind::None, 20).map_err(|e| e.to_string())?;
        if !proposal.is_whole() {
            proposal = proposal.by(Kind::Gate);
        }
        let limits = Limits {
            overcommit: 1.0,
            max_inst: 20,
            max_inst_of: BTreeMap::new(),
            policy: 1,
            policy_of: BTreeMap::new(),
            bounds_weights: true,
            exclusive: self.exclusive,
        };
        let placed = proposal.place(&[], &limits, Placement::Binpack);
        let plan = placed.map_err(|e| e.to_string())?;
        if self.entry == EntryPoint::LateHook {
            // It can change no bundle: a quota is refused, and the rest is registered.
            return match plan.is_whole() {
                true => Ok((config.clone(), Some(plan))),
                false => Err("a hook alone".into()),
            };
        }
        let injection = match request.is_as_brought() {
            true => cgpu_inject::Injection::as_brought(),
            false => host
                .injection(&plan, &inventory, &bundle, Purpose::Inspect)
                .map_err(|e| e.to_string())?,
        };
        let key = Key { root: "/r".into(), id: "a".into() };
        let record = Record {
            key,
            bundle: "/b".into(),
            short_id: "a___________".into(),
            boot_id: "boot".into(),
            holder: Holder::Active { init: Some(ProcessId { pid: 1, start_ticks: 1 }) },
            plan,
        };
        let nodes = nodes(&record.plan);
        let edits = host
            .edits((&record, request), &bundle, nodes, injection.edits, Vec::new())
            .map_err(|e| e.to_string())?;
        let changed = bundle.apply(&edits).map_err(|e| e.to_string())?;
        assert!(!changed || !request.is_as_brought(), "what was brought stays as it is");
        Ok((serde_json::from_str(&bundle.to_text()).unwrap(), Some(record.plan)))
    }
}

/// The nodes that a host with these GPUs has.
fn nodes(plan: &Plan) -> Nodes {
    let is_given = |minor: &u32| plan.gpus.iter().any(|gpu| gpu.minor == *minor);
    let path = |minor: u32| format!("/dev/nvidia{minor}");
    let devices = (0..GPUS).filter(is_given).map(|m| DeviceNode::new(path(m), 195, m.into()));
    let withheld = (0..GPUS).filter(|minor| !is_given(minor));
    let withheld =
        withheld.map(|m| Withheld { path: path(m), source: path(m), major: 195, minor: m.into() });
    Nodes { devices: devices.collect(), withheld: withheld.collect(), ..Nodes::default() }
}

/// Whether anything asks for a quota, whatever lifts it.
fn asks_anywhere(settings: &[Setting]) -> bool {
    let asks = |(name, value): &Setting| {
        const ASKING: [&str; 4] =
            ["gpu-mem-container", "cgpu-memory", "cgpu/memory", "gpu-memory-limit"];
        let name = name.to_ascii_lowercase().replace('_', "-");
        ASKING.iter().any(|asking| name.ends_with(asking)) && value.bytes().any(|byte| byte != b'0')
    };
    settings.iter().any(asks)
}

/// Whether containerd or CRI-O marks the container that is made as a pod's sandbox.
fn is_sandbox(config: &Value) -> bool {
    const MARKS: [[&str; 2]; 2] = [
        ["io.kubernetes.cri.container-type", "io.kubernetes.cri.sandbox-id"],
        ["io.kubernetes.cri-o.ContainerType", "io.kubernetes.cri-o.SandboxID"],
    ];
    let mark = |name: &str| &config["annotations"][name];
    MARKS.iter().any(|[kind, id]| mark(kind) == "sandbox" && mark(id) == ID)
}

/// What a bundle's variables and annotations resolve to is set once for each name, and the last counts.
fn last_of_each(settings: &[Setting]) -> Vec<Setting> {
    let is_last = |(at, (name, _)): &(usize, &Setting)| {
        settings[at + 1..].iter().all(|(later, _)| later != name)
    };
    settings.iter().enumerate().filter(is_last).map(|(_, setting)| *setting).collect()
}

/// What engines leave in a container's configuration is read as the GPUs that were asked for.
#[test]
fn recorded_engine_configs_yield_the_requested_gpus() {
    assert!(RECORDED.len() > 80, "{}", RECORDED.len());
    for Recorded { by, gpus, config } in RECORDED.iter() {
        let (after, plan) = Rules::OPEN.made(config).unwrap_or_else(|e| panic!("{by}: {e}"));
        let mut found: Vec<u32> =
            plan.iter().flat_map(|plan| &plan.gpus).map(|gpu| gpu.minor).collect();
        found.sort_unstable();
        // Who has every device of the host and names no GPU is none of ours.
        assert_eq!(found, gpus.clone().unwrap_or_default(), "{by}: {after}");
        // docker's `--gpus` is a variable for NVIDIA's hook, which gets what the plan says.
        let is_by_variable = by.contains("-e NVIDIA") || by.contains(": --gpus");
        assert!(after == *config || is_by_variable, "{by}: what was brought stays as it is");
    }
}

/// What engines leave in a container's configuration gets the quota that is asked for next to it.
#[test]
fn recorded_engine_configs_get_the_requested_quota() {
    let asked = [("ALIYUN_COM_GPU_MEM_CONTAINER", "3"), ("ALIYUN_COM_GPU_MEM_DEV", "15")];
    for Recorded { by, gpus, config } in RECORDED.iter() {
        let mut config = config.clone();
        set(&mut config, &asked);
        let made = Rules::OPEN.made(&config);
        if by.contains("--pid host") {
            assert!(made.unwrap_err().contains("pid namespace"), "{by}");
            continue;
        }
        let (after, plan) = made.unwrap_or_else(|e| panic!("{by}: {e}"));
        let plan = plan.unwrap_or_else(|| panic!("{by}: not ours"));
        let mut found: Vec<u32> = plan.gpus.iter().map(|gpu| gpu.minor).collect();
        found.sort_unstable();
        // If nothing says which, it is a part of each.
        let said = match by.split_once("--device-cgroup-rule") {
            None => gpus.clone().filter(|gpus| !gpus.is_empty()),
            // A rule is no choice, and a mount is.
            Some((before, _)) => before.contains("-v /dev/nvidia0").then(|| vec![0]),
        };
        let expected = said.unwrap_or_else(|| (0..GPUS).collect());
        assert_eq!(found, expected, "{by}");
        assert!(
            plan.gpus.iter().all(|gpu| gpu.memory_limit_bytes == Some(3_000 * MIB)),
            "{by}: {plan}"
        );
        assert_eq!(reached(&after, true), Reached { gpus: expected, displays: false }, "{by}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn requested_quota_is_never_lost_silently(
        base in recorded(),
        all in proptest::collection::vec(brings(), 0..3),
        settings in settings(),
        rules in rules(),
    ) {
        let settings = last_of_each(&settings);
        let mut before = base.config.clone();
        all.iter().for_each(|brings: &Brings| brings.apply(&mut before));
        set(&mut before, &settings);
        // A refusal keeps every promise.
        let Ok((after, plan)) = rules.made(&before) else { return Ok(()) };
        if !asks_anywhere(&settings) {
            return Ok(());
        }
        let found = reached(&after, rules.is_under_nvidias);
        let Some(plan) = plan else {
            if is_sandbox(&before) {
                // A row of the table: the quota means the pod's containers.
                return Ok(());
            }
            let nothing = Reached { gpus: Vec::new(), displays: false };
            prop_assert_eq!(found, nothing, "not ours: {}", after);
            return Ok(());
        };
        if plan.caveats.unenforced_by.is_some() {
            // The rows that are reported: under open alone.
            prop_assert_eq!(rules.profile, Profile::Open);
            prop_assert!(!plan.warnings().is_empty());
            return Ok(());
        }
        for minor in found.gpus {
            let gpu = plan.gpus.iter().find(|gpu| gpu.minor == minor);
            let limit = gpu.and_then(|gpu| gpu.memory_limit_bytes);
            prop_assert!(limit.is_some(), "it reaches GPU {} without a quota: {}\n{}", minor, plan, after);
        }
        prop_assert!(!found.displays, "it reaches displays: {}\n{}", plan, after);
    }

    /// Under the strict profile, what an image adds makes no container larger.
    #[test]
    fn strict_profile_image_settings_enlarge_no_container(
        base in recorded(),
        of_image in settings(),
        of_user in settings(),
        entry in rules(),
    ) {
        let rules = Rules { profile: Profile::Strict, trust_env: true, ..entry };
        let mut users = base.config.clone();
        set(&mut users, &last_of_each(&of_user));
        let Ok((_, Some(alone))) = rules.made(&users) else { return Ok(()) };
        if alone.is_whole() {
            return Ok(());
        }
        // What the user and the engine say goes over what the image says. Annotations that are trusted
        // are the user's.
        let env = base.config["process"]["env"].as_array().unwrap();
        let is_engines = |name: &str| {
            env.iter().any(|item| item.as_str().unwrap().split('=').next() == Some(name))
        };
        let of_image: Vec<_> = of_image
            .into_iter()
            .filter(|(name, _)| !is_annotation(name) || !rules.trust_annotations)
            .filter(|(name, _)| !is_engines(name))
            .collect();
        let mut both = base.config.clone();
        set(&mut both, &last_of_each(&[of_image.clone(), of_user.clone()].concat()));
        let Ok((after, with_image)) = rules.made(&both) else { return Ok(()) };
        let Some(with_image) = with_image else {
            prop_assert_eq!(reached(&after, rules.is_under_nvidias).gpus, [0_u32; 0], "not ours: {}", after);
            return Ok(());
        };
        // Where the user leaves it open which GPUs, the image may say so, and, if the user doesn't say how
        // many, that as well (documented): each is under one of the user's amounts all the same.
        let annotations_count = rules.trust_annotations && !is_sandbox(&both);
        let of_gpus = |(name, _): &&Setting| {
            let is_choice =
                ["CGPU_GPUS", "cgpu/gpus"].contains(name) || name.to_lowercase().ends_with("devices");
            is_choice && (annotations_count || !is_annotation(name))
        };
        let says: Vec<&str> = of_user.iter().filter(of_gpus).map(|(_, value)| *value).collect();
        let names = says.iter().any(|value| value.contains(|c: char| c.is_ascii_digit()));
        let is_open = !names || says.iter().any(|value| value.len() == 1);
        let largest = alone.gpus.iter().filter_map(|gpu| gpu.memory_limit_bytes).max();
        for gpu in &with_image.gpus {
            let before = alone.gpus.iter().find(|other| other.uuid == gpu.uuid);
            let limit = match is_open {
                true => largest,
                false => before.and_then(|before| before.memory_limit_bytes),
            };
            prop_assert!(
                limit.is_some() && gpu.memory_limit_bytes.is_some() && gpu.memory_limit_bytes <= limit,
                "{} became {}", alone, with_image
            );
        }
        prop_assert!(with_image.weight <= alone.weight, "{} became {}", alone, with_image);
        prop_assert!(alone.high_priority || !with_image.high_priority);
    }
}
