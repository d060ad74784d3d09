//! Containers that run out of the host's memory, and what of that reaches the monitor.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::unistd::Pid;
use serde_json::json;

use crate::gated::{Gated, RMTOOL, RUNTIME, rmtool};
use crate::host::ask;
use crate::support::{Bundle, Containerd, eventually, run_with_timeout, timeout};

/// What a container may have of the host's memory, and what it then takes.
const LIMIT_BYTES: u64 = 64 << 20;
const HOG: [&str; 5] = ["dd", "if=/dev/zero", "of=/dev/null", "bs=256M", "count=1"];

/// Holds 300 MiB of the GPU, as whom the kernel kills first.
const VICTIM: [&str; 3] =
    ["sh", "-c", "echo 1000 >/proc/self/oom_score_adj && exec /rmtool hold 300MiB"];

/// A container with 1000 MiB of the GPU and little of the host's memory.
fn tight(gated: &Gated, words: &[&str]) -> Bundle {
    let bundle = gated.bundle_with("tight", |config| {
        ask(config, 1000);
        config["process"]["args"] = json!(words);
        config["linux"]["resources"]["memory"] = json!({"limit": LIMIT_BYTES});
    });
    let runtime = gated.host.runtime();
    runtime.create(&bundle).ok();
    runtime.start(&bundle).ok();
    bundle
}

/// How many processes of that container the kernel has killed for the memory they took.
#[track_caller]
fn killed(gated: &Gated, bundle: &Bundle) -> u64 {
    let below = format!("{}/{}", gated.host.scratch.cgroup().trim_matches('/'), bundle.id);
    let files = ["memory/{}/memory.oom_control", "{}/memory.events"];
    let files = files.map(|file| Path::new("/sys/fs/cgroup").join(file.replace("{}", &below)));
    let text = files.iter().find_map(|file| fs::read_to_string(file).ok());
    let text = text.unwrap_or_else(|| panic!("none of {files:?} is there"));
    let counts = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    counts.and_then(|count| count.parse().ok()).unwrap_or_else(|| panic!("no count: {text}"))
}

/// A program in the container that goes on while we do.
fn start(gated: &Gated, bundle: &Bundle, words: &[&str]) -> Child {
    let mut command = gated.host.runtime().command();
    command.args(["exec", &bundle.id]).args(words);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().expect("the runtime can be started")
}

/// That a monitor is in none of the cgroups that `inside` names.
#[track_caller]
fn is_outside(monitor: Pid, inside: &str) {
    let is_outside = || !cgroups_of(monitor).contains(inside);
    assert!(eventually(is_outside), "it is inside:\n{}", cgroups_of(monitor));
}

fn cgroups_of(pid: Pid) -> String {
    fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("it lives")
}

/// What a process held is free when the kernel kills it, and its container runs on.
#[test]
fn oom_killed_process_frees_memory_container_runs_on() {
    let gated = Gated::new();
    let bundle = tight(&gated, &["sleep", "1000"]);
    let monitor = gated.monitor("tight_______");
    is_outside(monitor, &gated.host.scratch.cgroup());
    let mut victim = start(&gated, &bundle, &VICTIM);
    gated.soon_uses(300);
    let hog = gated.host.runtime().exec(&bundle, &HOG);
    assert!(!hog.status.success(), "it had the memory: {hog}");
    assert_eq!(killed(&gated, &bundle), 2, "holder and hog: {hog}");
    assert!(!victim.wait().unwrap().success(), "it was killed");
    gated.soon_uses(0);
    assert_eq!(gated.monitor("tight_______"), monitor, "the monitor is the same");
    assert_eq!(gated.host.runtime().status(&bundle), "running");
    gated.fills(&bundle, 1000);
    gated.soon_accounts("tight", 0);
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
    gated.host.check_registry();
}

/// What a container held is free when the kernel kills its first process.
#[test]
fn oom_kill_of_first_process_frees_container_memory() {
    let gated = Gated::new();
    let bundle = tight(&gated, &VICTIM);
    let neighbour = gated.sleeping("neighbour", 1000);
    gated.soon_uses(300);
    let hog = gated.host.runtime().exec(&bundle, &HOG);
    assert!(!hog.status.success(), "it had the memory: {hog}");
    assert!(killed(&gated, &bundle) >= 1, "{hog}");
    gated.soon_uses(0);
    let stopped = || gated.host.runtime().status(&bundle) == "stopped";
    assert!(eventually(stopped));
    // Before anybody deletes it: its monitor has deregistered it.
    let alone = || gated.host.registered().len() == 1;
    assert!(eventually(alone), "{:?}", gated.host.ps());
    gated.fills(&neighbour, 1000);
    gated.host.runtime().delete(&bundle).ok();
    let again = tight(&gated, &["sleep", "1000"]);
    gated.fills(&again, 1000);
    for bundle in [&again, &neighbour] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
    gated.host.check_registry();
}

/// An engine may make a container without cgroups of its own: it is in those of its helpers, with others.
#[test]
fn bystander_in_shared_cgroup_survives_the_container() {
    let mut gated = Gated::new();
    gated.over_crun();
    let shared = gated.host.scratch.directory("shared");
    let bundle = gated.bundle_with("app", |config| {
        ask(config, 1000);
        config["mounts"].as_array_mut().expect("mounts are a list").push(json!({
            "destination": "/shared", "type": "bind", "source": shared, "options": ["bind", "rw"],
        }));
        let words = "/rmtool attack send-fd /shared/s; exec sleep 1000";
        config["process"]["args"] = json!(["sh", "-c", words]);
    });
    let session = cgroups(&format!("{}/kubepods/session", gated.host.scratch.cgroup()));
    let is_unified =
        |path: &&PathBuf| path.ancestors().any(|of| of.join("cgroup.controllers").exists());
    let session = session.iter().find(is_unified).expect("cgroups of version 2 are mounted");
    fs::create_dir_all(session).expect("a cgroup can be made");
    let within = |words: &[&str]| {
        let mut command = gated.host.scratch.command("sh");
        let enter = format!("echo 0 >{}/cgroup.procs && exec \"$@\"", session.display());
        command.env("CGPU_CONFIG", gated.host.config()).args(["-c", &enter, "sh"]).args(words);
        command
    };
    let mut bystander = within(&["sleep", "1000"]).spawn().expect("it can be started");
    let runtime = gated.host.runtime();
    let root = runtime.root().display().to_string();
    let directory = bundle.directory.display().to_string();
    let ours = |words: &[&str]| {
        run_with_timeout(&mut within(&[&[RUNTIME, "--root", &root], words].concat()), timeout())
            .ok()
    };
    ours(&["create", "--bundle", &directory, "app"]);
    runtime.start(&bundle).ok();
    let monitor = gated.monitor("app_________");
    let is_inside = || cgroups_of(monitor).contains("/cgpu/app_________\n");
    assert!(eventually(is_inside), "{}", cgroups_of(monitor));
    let first = runtime.call(&["state", "app"]).ok().json()["pid"].as_i64();
    let first = first.and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw).expect("a pid");
    // Where crun makes cgroups, there is nothing to be mistaken.
    if cgroups_of(first).contains("/session\n") {
        ours(&["exec", "app", RMTOOL, "fill"]);
        let mut taker = Command::new(rmtool());
        taker.arg("--dev").arg(gated.sim.dir().join("dev")).args(["attack", "recv-fd"]);
        let mut taker = taker.arg(shared.join("s")).arg("1000").stdout(Stdio::null()).spawn();
        let ended = || runtime.status(&bundle) == "stopped";
        assert!(eventually(ended), "{}", gated.host.log());
        assert_eq!(bystander.try_wait().expect("a child of ours"), None, "{}", gated.host.log());
        let taker = taker.as_mut().expect("it can be started");
        taker.kill().and_then(|()| taker.wait()).expect("a child of ours");
    }
    runtime.delete(&bundle).ok();
    gated.soon_is_empty();
    bystander.kill().and_then(|()| bystander.wait()).expect("a child of ours");
}

/// The directory called `name` in every hierarchy of cgroups.
fn cgroups(name: &str) -> Vec<PathBuf> {
    let own = procfs::process::Process::myself().and_then(|own| own.mountinfo());
    let mounts = own.expect("our mounts can be read");
    let kinds = ["cgroup", "cgroup2"];
    let mounts = mounts.into_iter().filter(|mount| kinds.contains(&mount.fs_type.as_str()));
    mounts.map(|mount| mount.mount_point.join(name.trim_start_matches('/'))).collect()
}

/// A container's id, which is its short id, too. No other test has it: cgroups of monitors are the host's.
const OF_POD: &str = "in-a-pod-app";

/// A container whose runtime is started in a cgroup below a pod's, as that of CRI-O and podman is, and
/// `check`s at its monitor.
#[track_caller]
fn in_a_pods_cgroup(check: impl Fn(Pid)) {
    let gated = Gated::new();
    let pod = format!("{}/kubepods/pod1", gated.host.scratch.cgroup());
    let bundle = gated.bundle_with(OF_POD, |config| {
        ask(config, 1000);
        config["process"]["args"] = json!(["sleep", "1000"]);
        config["linux"]["cgroupsPath"] = json!(format!("{pod}/app"));
        config["linux"]["resources"]["cpu"] = json!({"shares": 512});
    });
    let mut enter = String::new();
    // Not in the pod's own: one of version 2 that has cgroups with controllers below it may have no processes.
    for cgroup in cgroups(&format!("{pod}/engine")) {
        fs::create_dir_all(&cgroup).expect("a cgroup can be made");
        // Without these no process can be in a cpuset of version 1.
        for dir in ["../../..", "../..", "..", "."].map(|above| cgroup.join(above)) {
            for file in ["cpuset.cpus", "cpuset.mems"].map(|file| dir.join(file)) {
                let name = file.file_name().expect("it has a name");
                if let (true, Ok(all)) = (file.exists(), fs::read(dir.join("..").join(name))) {
                    fs::write(&file, all).expect("what a parent has can be given");
                }
            }
        }
        enter.push_str(&format!("echo $$ >{}/cgroup.procs || exit 9\n", cgroup.display()));
    }
    let runtime = gated.host.runtime();
    let mut command: Command = gated.host.scratch.command("sh");
    command.env("CGPU_CONFIG", gated.host.config());
    let words = format!("{enter}exec \"$@\"");
    command.args(["-c", &words, "sh", RUNTIME, "--root"]).arg(runtime.root());
    command.args(["create", "--bundle"]).arg(&bundle.directory).arg(OF_POD);
    run_with_timeout(&mut command, timeout()).ok();
    runtime.start(&bundle).ok();
    check(gated.monitor(OF_POD));
    gated.fills(&bundle, 1000);
    runtime.delete(&bundle).ok();
    gated.soon_is_empty();
    gated.host.gc();
}

/// The cgroups of its own that the monitor of [`OF_POD`] has.
fn own_cgroups() -> Vec<PathBuf> {
    let mut all = cgroups(&format!("cgpu/{OF_POD}"));
    all.retain(|path| path.is_dir());
    all
}

/// A monitor leaves every cgroup of the pod in which its runtime is started.
#[test]
fn monitor_leaves_every_cgroup_of_its_pod() {
    in_a_pods_cgroup(|monitor| {
        is_outside(monitor, "/kubepods/");
        let is_there = || cgroups_of(monitor).contains(&format!("/cgpu/{OF_POD}\n"));
        assert!(eventually(is_there), "{}", cgroups_of(monitor));
        let text = |file: &str| {
            own_cgroups().iter().find_map(|path| fs::read_to_string(path.join(file)).ok())
        };
        // Its container's weight, and no maximum.
        for (of_v1, of_v2, expected) in [
            ("cpu.shares", "cpu.weight", ["512", "20"]),
            ("cpu.cfs_quota_us", "cpu.max", ["-1", "max 100000"]),
        ] {
            let [one, two] = [text(of_v1), text(of_v2)];
            let found = [one.as_deref().map(str::trim), two.as_deref().map(str::trim)];
            let [v1, v2] = expected;
            let fits = matches!(found, [Some(one), _] if one == v1)
                || matches!(found, [None, Some(two)] if two == v2);
            assert!(fits, "{found:?}");
        }
    });
    // What a monitor leaves is removed when another one comes, or by `cgpu gc`.
    assert!(own_cgroups().is_empty(), "{:?}", own_cgroups());
}

#[test]
fn pod_monitor_runs_outside_the_pod_cgroup() {
    let gated = Gated::new();
    let config = gated.host.config().display().to_string();
    let containerd = Containerd::builder().runtime(RUNTIME).env("CGPU_CONFIG", config).start();
    let cri = containerd.cri();
    let mut pod = cri.pod_config("gated");
    let parent = format!("{}/kubepods/pod1", containerd.scratch().cgroup());
    pod["linux"]["cgroup_parent"] = json!(parent);
    let pod_id = cri.run_pod("cgpu", &pod);
    let mut main = cri.container_config("main");
    main["mounts"] = json!([{"container_path": RMTOOL, "host_path": rmtool(), "readonly": true}]);
    main["envs"] = json!([
        {"key": "ALIYUN_COM_GPU_MEM_CONTAINER", "value": "1000"},
        {"key": "ALIYUN_COM_GPU_MEM_UNIT", "value": "MiB"},
        {"key": "NVIDIA_VISIBLE_DEVICES", "value": "0"},
    ]);
    // What the kernel kills here was started by the engine.
    main["command"] = json!(VICTIM);
    main["linux"] = json!({"resources": {"memory_limit_in_bytes": LIMIT_BYTES}});
    let id = cri.create(&pod_id, &main, &pod);
    cri.start(&id).ok();
    gated.soon_uses(300);
    is_outside(gated.monitor(&id[..12]), &containerd.scratch().cgroup());
    let _ = cri.call("exec-sync", &json!({"container_id": id, "cmd": HOG, "timeout": 30}));
    gated.soon_uses(0);
    let ended = || cri.status(&id)["exit_code"] == 137;
    assert!(eventually(ended), "{}", cri.status(&id));
    gated.soon_is_empty();
    cri.remove(&id).ok();
    cri.remove_pod(&pod_id).ok();
}
