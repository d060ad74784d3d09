//! Edits to the value of a `config.json`. Pure; applied twice they change nothing more.

use std::path::Path;

use oci_spec::runtime::{Hook, HookBuilder, MountBuilder};
use serde_json::Value;

use super::devices::{allow, declare, withhold};
use super::plan_edits::{Bind, Edits, HookCall, HookStage, Mount};
use super::shape::{Misshapen, list, mounts, plain, text};
use cgpu_core::request::brought_gpus::{DEVICE_MOUNTS, by_cli_hook, is_cdi_annotation};

/// Applies `edits`; what it was before, where that changed anything.
pub(super) fn apply(config: &mut Value, edits: &Edits) -> Result<Option<Value>, Misshapen> {
    let before = config.clone();
    if !edits.env.is_empty() && !config.get("process").is_some_and(Value::is_object) {
        return Err(("process", "an object"));
    }
    set_env(config, &["process", "env"], &edits.env)?;
    rename_env(config, &edits.renamed_env);
    withhold(config, edits)?;
    if edits.without_mps {
        forget_mps(config)?;
    }
    if edits.without_requests {
        forget_requests(config)?;
    }
    for node in &edits.devices {
        declare(config, node)?;
        allow(config, node)?;
    }
    for node in &edits.allowed {
        allow(config, node)?;
    }
    for bind in &edits.binds {
        mount_node(config, bind)?;
    }
    if let Some(from) = &edits.mounts_from {
        forget_mounts(config, from, &edits.mounts)?;
    }
    for mount in &edits.mounts {
        mount_driver(config, mount)?;
    }
    add_groups(config, &edits.gids)?;
    forget_former(config, &edits.hooks);
    for hook in &edits.driver_hooks {
        append_driver_hook(config, hook)?;
    }
    for hook in &edits.hooks {
        append_hook(config, hook)?;
    }
    for path in &edits.masked {
        let masked = list(config, &["linux", "maskedPaths"], "linux.maskedPaths")?;
        if !masked.iter().any(|old| old == path) {
            masked.push(path.as_str().into());
        }
    }
    Ok((*config != before).then_some(before))
}

/// Sets variables where they stand (every time they stand there), or at the end.
pub(super) fn set_env(
    config: &mut Value,
    at: &[&str],
    variables: &[(String, String)],
) -> Result<(), Misshapen> {
    if variables.is_empty() {
        return Ok(());
    }
    let env = list(config, at, "process.env")?;
    for (name, value) in variables {
        let item = Value::from(format!("{name}={value}"));
        let mut found = false;
        for old in env.iter_mut() {
            if old.as_str().is_some_and(|text| text.split('=').next() == Some(name)) {
                old.clone_from(&item);
                found = true;
            }
        }
        if !found {
            env.push(item);
        }
    }
    Ok(())
}

/// Gives variables another name where they stand.
fn rename_env(config: &mut Value, renamed: &[(&str, &str)]) {
    let env = config.pointer_mut("/process/env").and_then(Value::as_array_mut);
    for item in env.into_iter().flatten() {
        let text = item.as_str().unwrap_or_default();
        let (name, rest) = text.split_at(text.find('=').unwrap_or(text.len()));
        if let Some((_, other)) = renamed.iter().find(|(before, _)| *before == name) {
            *item = format!("{other}{rest}").into();
        }
    }
}

fn as_value(mount: &Mount) -> Value {
    let mut wanted = MountBuilder::default()
        .destination(&mount.destination)
        .source(&mount.source)
        .options(mount.options.clone());
    if !mount.kind.is_empty() {
        wanted = wanted.typ(&mount.kind);
    }
    let wanted = wanted.build().expect("every field of a mount is set");
    serde_json::to_value(wanted).expect("a mount is plain data")
}

fn mount_node(config: &mut Value, bind: &Bind) -> Result<(), Misshapen> {
    let wanted = as_value(&Mount {
        source: bind.source.clone(),
        destination: bind.destination.clone(),
        kind: "bind".to_owned(),
        options: ["bind", "rw", "nosuid", "noexec"].map(String::from).to_vec(),
    });
    let mounts = mounts(config)?;
    if !mounts.contains(&wanted) {
        mounts.retain(|mount| text(mount, "destination") != bind.destination);
        mounts.push(wanted);
    }
    Ok(())
}

/// Removes mounts from below `from` but those that are wanted now.
fn forget_mounts(config: &mut Value, from: &str, wanted: &[Mount]) -> Result<(), Misshapen> {
    if config.get("mounts").is_none_or(Value::is_null) {
        return Ok(());
    }
    let wanted: Vec<Value> = wanted.iter().map(as_value).collect();
    mounts(config)?.retain(|mount| {
        !Path::new(text(mount, "source")).starts_with(from) || wanted.contains(mount)
    });
    Ok(())
}

/// Whether a path is that of the MPS daemon's directory, as NVIDIA calls it by default
/// (`CUDA_MPS_PIPE_DIRECTORY`, "Multi-Process Service"), or of something in it.
#[must_use]
pub fn leads_to_mps(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "nvidia-mps")
}

/// Whether a path is that of a directory of nvidia-persistenced or the fabric manager, or of something in
/// it. A process that reaches their sockets sets GPUs that aren't its own: neither daemon checks the caller
/// (nvidia-persistenced, `command_server.c`).
#[must_use]
pub fn leads_to_daemon(path: &Path) -> bool {
    let parts: Vec<_> = path.components().map(|part| part.as_os_str()).collect();
    parts.windows(2).any(|pair| {
        pair[0] == "run" && (pair[1] == "nvidia-persistenced" || pair[1] == "nvidia-fabricmanager")
    })
}

fn forget_mps(config: &mut Value) -> Result<(), Misshapen> {
    if config.get("mounts").is_none_or(Value::is_null) {
        return Ok(());
    }
    mounts(config)?.retain(|mount| {
        let leads = |field| leads_to_mps(Path::new(text(mount, field)));
        !leads("source") && !leads("destination")
    });
    Ok(())
}

/// Takes out what asks others for GPUs, and what leads to daemons that set any GPU.
fn forget_requests(config: &mut Value) -> Result<(), Misshapen> {
    if let Some(annotations) = config.get_mut("annotations").and_then(Value::as_object_mut) {
        annotations.retain(|name, _| !is_cdi_annotation(name));
    }
    let stages = config.get_mut("hooks").and_then(Value::as_object_mut);
    for calls in stages.into_iter().flat_map(|all| all.values_mut()).filter_map(Value::as_array_mut)
    {
        calls.retain(|call| {
            let args = call.get("args").and_then(Value::as_array).into_iter().flatten();
            let args: Vec<&str> = args.filter_map(Value::as_str).collect();
            by_cli_hook(text(call, "path"), &args).is_none()
        });
    }
    if config.get("mounts").is_none_or(Value::is_null) {
        return Ok(());
    }
    mounts(config)?.retain(|mount| {
        let (from, to) = (plain(text(mount, "source")), plain(text(mount, "destination")));
        let (from, to) = (Path::new(&*from), Path::new(&*to));
        !to.starts_with(DEVICE_MOUNTS) && !leads_to_daemon(from) && !leads_to_daemon(to)
    });
    Ok(())
}

/// Mounts a file of the driver where the container has nothing of its own: before what the
/// container has below it, which would be hidden.
fn mount_driver(config: &mut Value, mount: &Mount) -> Result<(), Misshapen> {
    let destination = plain(&mount.destination);
    let mounts = mounts(config)?;
    let places: Vec<_> =
        mounts.iter().map(|there| plain(text(there, "destination")).into_owned()).collect();
    if places.iter().all(|place| *place != destination) {
        let below = places.iter().position(|place| Path::new(place).starts_with(&*destination));
        mounts.insert(below.unwrap_or(places.len()), as_value(mount));
    }
    Ok(())
}

fn add_groups(config: &mut Value, gids: &[u32]) -> Result<(), Misshapen> {
    if gids.is_empty() {
        return Ok(());
    }
    let path = ["process", "user", "additionalGids"];
    let groups = list(config, &path, "process.user.additionalGids")?;
    for gid in gids {
        if !groups.iter().any(|there| there.as_u64() == Some((*gid).into())) {
            groups.push((*gid).into());
        }
    }
    Ok(())
}

fn hook_value(call: &HookCall) -> Value {
    let mut hook =
        HookBuilder::default().path(&call.path).args(call.args.clone()).env(call.env.clone());
    if let Some(timeout_s) = call.timeout_s {
        hook = hook.timeout(timeout_s);
    }
    let hook: Hook = hook.build().expect("every field of a hook is set");
    serde_json::to_value(hook).expect("a hook is plain data")
}

/// Appends a hook that isn't ours, unless it is there.
fn append_driver_hook(config: &mut Value, call: &HookCall) -> Result<(), Misshapen> {
    let hook = hook_value(call);
    let hooks = list(config, &["hooks", call.stage.name()], call.stage.field())?;
    if !hooks.contains(&hook) {
        hooks.push(hook);
    }
    Ok(())
}

/// Appends a hook; one of the same program in the same stage is ours from an earlier
/// time and replaced where it stands.
fn append_hook(config: &mut Value, call: &HookCall) -> Result<(), Misshapen> {
    let hook = hook_value(call);
    let hooks = list(config, &["hooks", call.stage.name()], call.stage.field())?;
    let path = text(&hook, "path").to_owned();
    let ours = |old: &&mut Value| {
        text(old, "path") == path
            && old.pointer("/args/1").and_then(Value::as_str)
                == call.args.get(1).map(String::as_str)
    };
    match hooks.iter_mut().find(ours) {
        Some(old) => *old = hook,
        None => hooks.push(hook),
    }
    Ok(())
}

/// Removes our hooks of stages that have none now: they belong to a reservation or to a
/// container that this one takes the place of. One from a hooks directory, which names
/// neither, stays.
fn forget_former(config: &mut Value, calls: &[HookCall]) {
    let Some(path) = calls.first().map(|call| call.path.to_string_lossy().into_owned()) else {
        return;
    };
    for stage in
        HookStage::OURS.iter().filter(|stage| calls.iter().all(|call| call.stage != **stage))
    {
        let hooks = config.pointer_mut(&format!("/hooks/{}", stage.name()));
        let Some(hooks) = hooks.and_then(Value::as_array_mut) else { continue };
        let named = |arg: &Value| arg == "--reservation" || arg == "--id";
        hooks.retain(|hook| {
            let args = hook.get("args").and_then(Value::as_array);
            text(hook, "path") != path || !args.into_iter().flatten().any(named)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::devices::{allows_every_device, rule};
    use super::super::plan_edits::{DeviceNode, Withheld};
    use super::super::shape::number;
    use super::*;
    use serde_json::json;

    fn apply(config: &mut Value, edits: &Edits) -> Result<bool, Misshapen> {
        Ok(super::apply(config, edits)?.is_some())
    }

    fn node(path: &str, minor: i64) -> DeviceNode {
        DeviceNode::new(path.into(), 195, minor)
    }

    fn other(minor: i64) -> Withheld {
        let path = format!("/dev/nvidia{minor}");
        Withheld { source: path.clone(), path, major: 195, minor }
    }

    fn edits() -> Edits {
        Edits {
            env: vec![("NVIDIA_VISIBLE_DEVICES".into(), "GPU-a".into())],
            devices: vec![node("/dev/nvidiactl", 255), node("/dev/nvidia0", 0)],
            withheld: vec![other(1), other(2)],
            hooks: vec![HookCall {
                stage: HookStage::Poststop,
                path: "/usr/bin/cgpu-hook".into(),
                args: vec!["cgpu-hook".into(), "poststop".into()],
                env: vec!["PATH=/usr/bin".into()],
                timeout_s: Some(10),
            }],
            masked: vec!["/proc/cgpu_km".into()],
            ..Edits::default()
        }
    }

    fn applied(mut config: Value) -> Value {
        assert!(apply(&mut config, &edits()).unwrap());
        let once = config.clone();
        assert!(!apply(&mut config, &edits()).unwrap(), "a second time changes nothing");
        assert_eq!(config, once);
        config
    }

    #[test]
    fn a_bare_bundle_gets_everything_it_lacks() {
        let config = applied(json!({"process": {"args": ["sh"]}, "x": 1.50}));
        assert_eq!(config["linux"]["maskedPaths"], json!(["/proc/cgpu_km"]));
        assert_eq!(config["process"]["env"], json!(["NVIDIA_VISIBLE_DEVICES=GPU-a"]));
        assert_eq!(
            config["linux"]["devices"][1],
            json!({"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0,
                   "fileMode": 438, "uid": 0, "gid": 0})
        );
        assert_eq!(
            config["linux"]["resources"]["devices"][1],
            json!({"allow": true, "type": "c", "major": 195, "minor": 0, "access": "rw"})
        );
        assert_eq!(
            config["hooks"]["poststop"],
            json!([{"path": "/usr/bin/cgpu-hook", "args": ["cgpu-hook", "poststop"],
                    "env": ["PATH=/usr/bin"], "timeout": 10}])
        );
    }

    /// A variable that is given twice is set twice, each time where it stood.
    #[test]
    fn duplicated_variable_is_set_at_each_occurrence() {
        let config = applied(json!({"process": {"env":
            ["NVIDIA_VISIBLE_DEVICES=all", "A=b", "NVIDIA_VISIBLE_DEVICES=1", "NVIDIA_X=2"]}}));
        assert_eq!(
            config["process"]["env"],
            json!([
                "NVIDIA_VISIBLE_DEVICES=GPU-a",
                "A=b",
                "NVIDIA_VISIBLE_DEVICES=GPU-a",
                "NVIDIA_X=2"
            ])
        );
    }

    /// Nodes of other GPUs are removed by path and by device number.
    #[test]
    fn nodes_of_other_gpus_are_removed() {
        let device = |path: &str, major: i64, minor: i64| json!({"path": path, "type": "c", "major": major, "minor": minor});
        let allow = |minor: i64| json!({"allow": true, "type": "c", "major": 195, "minor": minor});
        let config = applied(json!({
            "process": {},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/gpu", "type": "bind", "source": "/dev/nvidia2"},
                {"destination": "/dev/nvidia1", "type": "bind", "source": "/elsewhere"},
                {"destination": "/gpu", "type": "bind", "source": "/dev//nvidia2"},
                {"destination": "/gpu", "type": "bind", "source": "/dev/./x/../nvidia9"},
                {"destination": "//dev/nvidia1/", "type": "bind", "source": "/elsewhere"},
            ],
            "linux": {
                "devices": [
                    device("/dev/fuse", 10, 229),
                    device("/dev/nvidia1", 195, 1),
                    device("/dev/hidden", 195, 7),
                    device("/dev/nvidia-caps/nvidia-cap3", 240, 3),
                    device("/dev/nvidia-uvm", 240, 0),
                ],
                "resources": {"devices": [
                    {"allow": false, "access": "rwm"}, allow(0), allow(1), allow(9),
                ]},
            },
        }));
        let paths: Vec<&str> = config["linux"]["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|device| text(device, "path"))
            .collect();
        assert_eq!(paths, ["/dev/fuse", "/dev/nvidia-uvm", "/dev/nvidiactl", "/dev/nvidia0"]);
        assert_eq!(config["mounts"].as_array().unwrap().len(), 1);
        let minors: Vec<Option<i64>> = config["linux"]["resources"]["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|rule| number(rule, "minor"))
            .collect();
        assert_eq!(minors, [None, Some(0), Some(255), Some(0)]);
    }

    /// A rule for all NVIDIA nodes is removed, and the rules of the given nodes remain.
    #[test]
    fn wide_nvidia_rule_is_replaced_by_narrow_ones() {
        for minor in [json!(null), json!(-1)] {
            let wide = json!({"allow": true, "type": "c", "major": 195, "minor": minor});
            let config = applied(json!({
                "process": {}, "linux": {"resources": {"devices": [wide]}},
            }));
            let allowed = json!([rule(true, 195, 255), rule(true, 195, 0)]);
            assert_eq!(config["linux"]["resources"]["devices"], allowed);
        }
    }

    #[test]
    fn a_rule_that_allows_every_device_is_narrowed() {
        for wide in [
            json!({"allow": true, "access": "rwm"}),
            json!({"allow": true, "type": "c", "major": -1, "minor": -1, "access": "rw"}),
        ] {
            let config = applied(json!({
                "process": {}, "linux": {"resources": {"devices": [wide.clone()]}},
            }));
            let rules = config["linux"]["resources"]["devices"].as_array().unwrap();
            assert_eq!(rules[0], wide);
            for minor in [1, 2] {
                assert!(rules.contains(&rule(false, 195, minor)), "{rules:?}");
            }
        }
    }

    /// Every device is allowed only if the last rule says so.
    #[test]
    fn last_rule_decides_whether_all_devices_are_allowed() {
        let config = |rules: Value| json!({"linux": {"resources": {"devices": rules}}});
        let all = json!({"allow": true, "access": "rwm"});
        let none = json!({"allow": false, "access": "rwm"});
        assert!(allows_every_device(&config(json!([none, all]))));
        assert!(!allows_every_device(&config(json!([all, none]))));
        assert!(!allows_every_device(&json!({})));
        let allowed = |rule: Value| allows_every_device(&config(json!([none, rule])));
        let character = |access: &str| json!({"allow": true, "type": "c", "access": access});
        assert!(allowed(character("rwm")) && !allowed(character("m")));
        assert!(!allowed(json!({"allow": true, "type": "c", "minor": 3, "access": "rw"})));
        // runc doesn't check its numbers.
        let numbered = json!({"type": "a", "major": 1, "minor": 3, "access": "rwm", "allow": true});
        assert!(allowed(numbered.clone()));
        assert!(!allows_every_device(&config(json!([numbered, none]))));
    }

    /// Existing hooks remain, and cgpu's own is replaced in its place.
    #[test]
    fn existing_hooks_remain_and_cgpus_is_replaced() {
        let theirs = json!({"path": "/usr/bin/dockerd", "args": ["libnetwork-setkey"]});
        let old = json!({"path": "/usr/bin/cgpu-hook", "args": ["cgpu-hook", "poststop", "old"]});
        let config = applied(json!({
            "process": {}, "hooks": {"prestart": [theirs], "poststop": [old, theirs]},
        }));
        assert_eq!(config["hooks"]["prestart"], json!([theirs]));
        assert_eq!(config["hooks"]["poststop"][1], theirs);
        assert_eq!(config["hooks"]["poststop"].as_array().unwrap().len(), 2);
        assert_eq!(config["hooks"]["poststop"][0]["timeout"], 10);
    }

    /// A former hook of cgpu is removed if none takes its place.
    #[test]
    fn former_cgpu_hook_without_successor_is_removed() {
        let hook = |args: &[&str]| json!({"path": "/usr/bin/cgpu-hook", "args": args});
        let directory = hook(&["cgpu-hook", "createRuntime"]);
        let theirs = json!({"path": "/usr/bin/other", "args": ["other", "--id", "x"]});
        let former = [
            hook(&["cgpu-hook", "createRuntime", "--reservation", "t"]),
            hook(&["cgpu-hook", "createRuntime", "--root", "/r", "--id", "a"]),
        ];
        let all = json!([former[0], directory, theirs, former[1]]);
        let config = applied(json!({"process": {}, "hooks": {"createRuntime": all}}));
        assert_eq!(config["hooks"]["createRuntime"], json!([directory, theirs]));
        assert_eq!(config["hooks"]["poststop"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn a_field_of_the_wrong_shape_is_named() {
        for (mut config, field) in [
            (json!({"process": 1}), "process"),
            (json!({}), "process"),
            (json!({"process": {"env": {}}}), "process.env"),
            (json!({"process": {}, "linux": []}), "linux.devices"),
            (json!({"process": {}, "hooks": {"poststop": 3}}), "hooks.poststop"),
        ] {
            assert_eq!(apply(&mut config, &edits()).unwrap_err().0, field);
        }
    }

    #[test]
    fn non_device_files_are_mounted_over_existing_mounts() {
        let mut config = json!({"process": {}, "mounts": [
            {"destination": "/dev/nvidia0", "type": "bind", "source": "/dev/nvidia0"},
        ]});
        let edits = Edits {
            binds: vec![Bind { source: "/sim/nvidia0".into(), destination: "/dev/nvidia0".into() }],
            ..Edits::default()
        };
        assert!(apply(&mut config, &edits).unwrap());
        assert!(!apply(&mut config, &edits).unwrap());
        assert_eq!(config["mounts"].as_array().unwrap().len(), 1);
        assert_eq!(config["mounts"][0]["source"], "/sim/nvidia0");
    }

    fn driver() -> Edits {
        let mount = |source: &str, destination: &str| Mount {
            source: source.into(),
            destination: destination.into(),
            kind: String::new(),
            options: vec!["rbind".into(), "ro".into()],
        };
        let hook = |link: &str| HookCall {
            stage: HookStage::CreateContainer,
            path: "/usr/bin/nvidia-cdi-hook".into(),
            args: ["nvidia-cdi-hook", "create-symlinks", link].map(String::from).to_vec(),
            env: vec!["PATH=/usr/bin".into()],
            timeout_s: None,
        };
        Edits {
            mounts: vec![mount("/run/cgpu/driver/b", "/usr/local/nvidia"), mount("/x", "/y")],
            mounts_from: Some("/run/cgpu/driver".into()),
            gids: vec![44, 109],
            driver_hooks: vec![hook("a"), hook("b")],
            ..Edits::default()
        }
    }

    #[test]
    fn driver_mounts_yield_to_the_containers_own() {
        let mut config = json!({
            "process": {"user": {"uid": 1, "additionalGids": [44]}},
            "mounts": [
                {"source": "/run/cgpu/driver/a", "destination": "/usr/local/nvidia"},
                {"source": "/run/cgpu/driver-of-somebody", "destination": "/z"},
                {"source": "/mine", "destination": "/y/"},
                {"source": "/more", "destination": "/usr/local/nvidia/lib64"},
            ],
        });
        assert!(apply(&mut config, &driver()).unwrap());
        let once = config.clone();
        assert!(!apply(&mut config, &driver()).unwrap(), "a second time changes nothing");
        assert_eq!(config, once);
        assert_eq!(
            config["mounts"],
            json!([
                {"source": "/run/cgpu/driver-of-somebody", "destination": "/z"},
                {"source": "/mine", "destination": "/y/"},
                {"destination": "/usr/local/nvidia", "source": "/run/cgpu/driver/b",
                 "options": ["rbind", "ro"]},
                {"source": "/more", "destination": "/usr/local/nvidia/lib64"},
            ])
        );
        assert_eq!(config["process"]["user"]["additionalGids"], json!([44, 109]));
    }

    #[test]
    fn what_asks_others_for_more_is_taken_out() {
        let mut config = json!({
            "process": {},
            "annotations": {
                "cdi.k8s.io/x": "nvidia.com/gpu=1",
                "nvidia.cdi.k8s.io/x": "nvidia.com/gpu=all",
                "io.x/y": "z",
            },
            "mounts": [
                {"destination": "/var/run/nvidia-container-devices/all", "source": "/dev/null"},
                {"destination": "/var/run", "source": "/x"},
                {"destination": "/x", "source": "/run/nvidia-persistenced"},
                {"destination": "/var/run/nvidia-fabricmanager/socket", "source": "/x"},
            ],
            "hooks": {"createRuntime": [
                {"path": "/usr/bin/containerd", "args": ["containerd", "oci-hook", "--",
                    "/usr/bin/nvidia-container-cli", "configure", "--device=0"]},
                {"path": "/usr/bin/nvidia-container-cli", "args": ["x"]},
                {"path": "/usr/bin/containerd", "args": ["containerd", "oci-hook"]},
            ], "poststop": []},
        });
        let edits = Edits { without_requests: true, ..Edits::default() };
        assert!(apply(&mut config, &edits).unwrap());
        assert_eq!(config["annotations"], json!({"io.x/y": "z"}));
        assert_eq!(config["mounts"], json!([{"destination": "/var/run", "source": "/x"}]));
        let retained = json!([{"path": "/usr/bin/containerd", "args": ["containerd", "oci-hook"]}]);
        assert_eq!(config["hooks"], json!({"createRuntime": retained, "poststop": []}));
    }

    /// What leads to the MPS daemon is removed if quotas are enforced.
    #[test]
    fn mps_mounts_are_removed_if_quotas_are_enforced() {
        let mount =
            |source: &str, destination: &str| json!({"source": source, "destination": destination});
        let all = json!([
            mount("/tmp/nvidia-mps", "/tmp/nvidia-mps"),
            mount("/tmp/nvidia-mps/control", "/x"),
            mount("/y", "/run/nvidia-mps/"),
            mount("/tmp", "/mnt"),
        ]);
        let mut config = json!({"process": {}, "mounts": all});
        assert!(!apply(&mut config, &Edits::default()).unwrap());
        assert!(apply(&mut config, &Edits { without_mps: true, ..Edits::default() }).unwrap());
        assert_eq!(config["mounts"], json!([mount("/tmp", "/mnt")]));
    }

    /// Hooks of the driver may be of one program, and have no time limit.
    #[test]
    fn driver_hooks_share_one_program_without_timeout() {
        let mut config = json!({"process": {}});
        assert!(apply(&mut config, &driver()).unwrap());
        assert!(!apply(&mut config, &driver()).unwrap(), "a second time changes nothing");
        let hooks = config["hooks"]["createContainer"].as_array().unwrap();
        assert_eq!(hooks.len(), 2, "{hooks:?}");
        assert!(hooks.iter().all(|hook| hook.get("timeout").is_none()));
    }
}
