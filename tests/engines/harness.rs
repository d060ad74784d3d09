//! The harness tried on bare runc and crun: if this fails, don't blame cgpu.
//!
//! One test for each engine, because engines are dear, and two for what matters most about the
//! harness itself: that it leaves nothing behind, however a test ends.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use crate::support::{
    Containerd, Docker, Executed, IMAGE, Image, Podman, Restart, Runtime, Scratch, Traces,
    eventually, run_with_timeout,
};
use serde_json::{Value, json};

/// Set for the run of this binary that is going to be killed, to how long its processes sleep.
const VICTIM: &str = "CGPU_TEST_VICTIM";

/// The sockets of shims that were there before the first test: not of our making.
static OTHERS: LazyLock<Vec<PathBuf>> = LazyLock::new(shim_sockets);

/// How long the containers of one test sleep: a number that no other process has among its
/// arguments, to find them by.
fn unique_seconds(test: u32) -> String {
    LazyLock::force(&OTHERS);
    (test * 10_000_000 + std::process::id()).to_string()
}

/// Drops `owner` and looks for what is left of it: by the harness's own rules, and by others that
/// don't share their blind spots.
#[track_caller]
fn leaves_nothing<Owner>(owner: Owner, scratch: impl Fn(&Owner) -> &Scratch, seconds: &str) {
    let path = scratch(&owner).path().to_owned();
    // An engine may return before the container's process has executed its program.
    assert!(eventually(|| !command_lines_with(seconds).is_empty()), "there's nothing to clean");
    drop(owner);
    is_gone(&path, seconds);
}

#[track_caller]
fn is_gone(path: &Path, seconds: &str) {
    let left = Traces::of(path);
    assert!(left.is_empty(), "of {}:\n{left}", path.display());
    assert!(!path.exists(), "{} is still there", path.display());
    let name = path.to_string_lossy();
    assert_eq!(command_lines_with(&name), Vec::<String>::new());
    assert_eq!(command_lines_with(seconds), Vec::<String>::new());
    assert!(!kernel_says("/proc/self/mountinfo").contains(&*name));
    // Another test's shim may be between its death and the removal of its socket.
    let is_fine = |path: &PathBuf| OTHERS.contains(path) || is_bound(path) || !path.exists();
    let none_is_stale = || shim_sockets().iter().all(is_fine);
    assert!(eventually(none_is_stale), "stale: {:?}", shim_sockets());
}

/// The processes that have `word` within their arguments.
fn command_lines_with(word: &str) -> Vec<String> {
    let entries = std::fs::read_dir("/proc").expect("/proc is mounted").flatten();
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(word)).collect()
}

fn kernel_says(file: &str) -> String {
    std::fs::read_to_string(file).expect("/proc is mounted")
}

fn shim_sockets() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/run/containerd/s").into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

fn is_bound(socket: &Path) -> bool {
    kernel_says("/proc/net/unix").contains(&*socket.to_string_lossy())
}

fn lives_a_whole_life(runtime: &Runtime<'_>, scratch: &Scratch, id: &str) {
    let prints = scratch.bundle(&format!("{id}-env"), |config| {
        config["process"]["args"] = json!(["env"]);
        config["process"]["env"] = json!(["PATH=/bin", "GREETING=hello"]);
    });
    assert!(runtime.run(&prints).ok().has_line("GREETING=hello"));
    let ends = scratch.bundle(&format!("{id}-exit"), |config| {
        config["process"]["args"] = json!(["sh", "-c", "exit 7"])
    });
    runtime.run(&ends).exits(7);

    let sleeps = scratch.bundle(id, |_| {});
    runtime.create(&sleeps).ok();
    assert_eq!(runtime.status(&sleeps), "created");
    runtime.start(&sleeps).ok();
    assert_eq!(runtime.status(&sleeps), "running");
    assert_eq!(runtime.exec(&sleeps, &["echo", "inside"]).ok().text(), "inside");
    runtime.exec(&sleeps, &["sh", "-c", "exit 3"]).exits(3);
    runtime.kill(&sleeps, "KILL").ok();
    assert!(eventually(|| runtime.status(&sleeps) == "stopped"));
    runtime.delete(&sleeps).ok();
    runtime.call(&["state", id]).fails();
}

#[test]
fn runc_and_crun_run_bundles_create_to_delete() {
    let seconds = unique_seconds(1);
    let scratch = Scratch::new();
    lives_a_whole_life(&scratch.runc(), &scratch, "on-runc");
    lives_a_whole_life(&scratch.crun(), &scratch, "on-crun");
    assert_eq!(scratch.traces().processes, Vec::<String>::new());
    // Both are left running, one of them paused, for the scratch to clear away.
    let sleeps = |config: &mut Value| config["process"]["args"] = json!(["sleep", seconds]);
    let (paused, running) = (scratch.bundle("paused", sleeps), scratch.bundle("running", sleeps));
    scratch.runc().create(&paused).ok();
    scratch.runc().start(&paused).ok();
    scratch.runc().call(&["pause", "paused"]).ok();
    scratch.crun().create(&running).ok();
    scratch.crun().start(&running).ok();
    assert_eq!(scratch.traces().processes.len(), 2);
    leaves_nothing(scratch, |scratch| scratch, &seconds);
}

/// Containers run under docker, and docker retains them over a restart.
#[test]
fn docker_containers_survive_a_daemon_restart() {
    let seconds = unique_seconds(2);
    let mut docker = Docker::builder().live_restore().start();
    let greedy = Image::new("localhost/greedy:1").env("BAKED", "in");
    docker.load(&greedy);
    for runtime in ["runc", "crun", "cgpu"] {
        let options = ["--rm", "--runtime", runtime, "-e", "GREETING=hello"];
        let printed = docker.run(&[&options[..], &["localhost/greedy:1", "env"]].concat()).ok();
        assert!(printed.has_line("GREETING=hello") && printed.has_line("BAKED=in"), "{printed}");
        docker.run(&["--rm", "--runtime", runtime, IMAGE, "sh", "-c", "exit 7"]).exits(7);
    }
    let options = ["-d", "--name", "sleeper", "--runtime=cgpu"];
    docker.run(&[&options[..], &[IMAGE, "sh", "-c", "echo begun; exec sleep 1000"]].concat()).ok();
    assert_eq!(docker.exec("sleeper", &["echo", "inside"]).ok().text(), "inside");
    docker.exec("sleeper", &["sh", "-c", "exit 3"]).exits(3);
    let pid = docker.inspect("sleeper", "{{.State.Pid}}");
    for how in [Restart::Graceful, Restart::Killed] {
        docker.restart(how);
        assert_eq!(
            docker.inspect("sleeper", "{{.State.Pid}} {{.State.Running}}"),
            format!("{pid} true"),
            "after {how:?}"
        );
    }
    assert_eq!(docker.logs("sleeper").ok().text(), "begun");
    docker.remove("sleeper").ok();
    assert!(
        !PathBuf::from(format!("/proc/{pid}")).exists(),
        "removed, and its process {pid} is still there"
    );
    docker.run(&["-d", "--runtime=crun", IMAGE, "sleep", &seconds]).ok();
    leaves_nothing(docker, Docker::scratch, &seconds);
}

#[test]
fn containerd_runs_containers_and_pods() {
    let seconds = unique_seconds(3);
    let containerd = Containerd::builder().start();
    let crun = containerd.scratch().crun_program();
    let greeting = ["--rm", "--env", "GREETING=hello"];
    let printed = containerd.run_and_read(&greeting, "one", &["env"]).ok();
    assert!(printed.has_line("GREETING=hello"), "{printed}");
    containerd.run_with(&crun, &["--rm"], "two", &["sh", "-c", "exit 7"]).exits(7);
    containerd.run(&["-d"], "three", &["sleep", &seconds]).ok();
    assert_eq!(containerd.exec("three", &["echo", "inside"]).ok().text(), "inside");
    containerd.remove("three").ok();

    let cri = containerd.cri();
    for handler in ["runc", "crun", "cgpu"] {
        let mut pod = cri.pod_config(&format!("pod-on-{handler}"));
        pod["annotations"] = json!({"aliyun.com/greeting": "hello"});
        let pod_id = cri.run_pod(handler, &pod);
        let mut container = cri.container_config("worker");
        container["envs"] = json!([{"key": "GREETING", "value": "hello"}]);
        container["command"] = json!(["sh", "-c", "echo begun; exec sleep 1000"]);
        let id = cri.create(&pod_id, &container, &pod);
        let bundle = containerd
            .scratch()
            .path()
            .join("state/io.containerd.runtime.v2.task/k8s.io")
            .join(&id);
        cri.start(&id).ok();
        let config: Value =
            serde_json::from_slice(&std::fs::read(bundle.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["annotations"]["aliyun.com/greeting"], "hello", "on {handler}");
        assert_eq!(cri.status(&id)["state"], 1);
        let Executed { code, stdout, stderr } =
            cri.exec_sync(&id, &["sh", "-c", "echo $GREETING; echo no >&2; exit 3"]);
        assert_eq!((code, stdout.as_str(), stderr.as_str()), (3, "hello\n", "no\n"));
        assert!(cri.logs(&pod, &container).ends_with(" stdout F begun\n"));
        cri.stop(&id).ok();
        assert_eq!(cri.status(&id)["state"], 2);
        cri.remove(&id).ok();
        let refused = cri.call("status", &json!({"container_id": id})).fails();
        assert!(refused.stderr.contains("not found"), "{refused}");
        cri.remove_pod(&pod_id).ok();
    }
    containerd.run(&["-d"], "four", &["sleep", &seconds]).ok();
    cri.run_pod("cgpu", &cri.pod_config("forgotten"));
    leaves_nothing(containerd, Containerd::scratch, &seconds);
}

#[test]
fn podman_runs_containers_with_hooks() {
    let seconds = unique_seconds(4);
    let hooks = Scratch::new();
    let note = hooks.path().join("note");
    let script = hooks.script("hook", &format!("#!/bin/sh\nexec cat > {}\n", note.display()));
    let hook = json!({
        "version": "1.0.0",
        "hook": {"path": script},
        "when": {"always": true},
        "stages": ["createRuntime"],
    });
    hooks.file("noted.json", hook.to_string());

    let mut podman = Podman::builder().hooks_dir(hooks.path()).start();
    let rootfs = podman.scratch().rootfs("rootfs").display().to_string();
    for runtime in [podman.scratch().runc().program().to_owned(), podman.scratch().crun_program()] {
        podman.use_runtime(runtime);
        let printed =
            podman.run(&["--rm", "-e", "GREETING=hello", "--rootfs", &rootfs, "env"]).ok();
        assert!(printed.has_line("GREETING=hello"), "{printed}");
        assert!(std::fs::read_to_string(&note).unwrap().contains("ociVersion"));
        std::fs::remove_file(&note).unwrap();
        podman.run(&["--rm", "--rootfs", &rootfs, "sh", "-c", "exit 7"]).exits(7);
        podman.run(&["-d", "--name", "sleeper", IMAGE, "sleep", &seconds]).ok();
        assert_eq!(podman.exec("sleeper", &["echo", "inside"]).ok().text(), "inside");
        podman.remove("sleeper").ok();
    }
    podman.run(&["-d", IMAGE, "sleep", &seconds]).ok();
    leaves_nothing(podman, Podman::scratch, &seconds);
}

#[test]
fn overdue_command_is_killed_with_its_children() {
    let scratch = Scratch::new();
    let mut command = scratch.command("busybox");
    command.args(["sh", "-c", "echo so far; sleep 1000 & wait"]);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = run_with_timeout(&mut command, Duration::from_secs(3));
    }));
    let message = panic
        .expect_err("it was over its time")
        .downcast::<String>()
        .expect("panics carry strings");
    assert!(message.contains("killed for running longer than 3s"), "{message}");
    assert!(message.contains("sh -c echo so far") && message.contains("\nso far\n"), "{message}");
    assert!(eventually(|| scratch.traces().processes.is_empty()));
}

/// A child without the scratch's name belongs to it by its parent, and the parent may be killed just after it was made.
#[test]
fn processes_identified_only_by_parent_are_killed() {
    let seconds = unique_seconds(6);
    let script = format!(
        "while :; do (cd /; exec env -i {} sh -c 'exec sleep {seconds}') & sleep 0.002; done",
        crate::support::program("busybox").display()
    );
    for _ in 0..3 {
        let scratch = Scratch::new();
        let mut creator = scratch.command("busybox");
        creator.args(["sh", "-c", &script]).stdin(Stdio::null()).stdout(Stdio::null());
        let mut creator = creator.stderr(Stdio::null()).spawn().unwrap();
        assert!(eventually(|| command_lines_with(&seconds).len() > 20));
        leaves_nothing(scratch, |scratch| scratch, &seconds);
        creator.wait().unwrap();
    }
}

static SHARED: LazyLock<Containerd> = LazyLock::new(|| Containerd::builder().start());

/// A test binary with an engine in a static, a container, and a daemon that would survive anything:
/// then it waits.
#[test]
#[ignore = "not a test: another one runs this as a process of its own, and kills it"]
fn victim() {
    let Ok(seconds) = std::env::var(VICTIM) else { return };
    SHARED.run(&["-d"], "sleeper", &["sleep", &seconds]).ok();
    let scratch = Scratch::new();
    let sleeps = scratch.bundle("sleeps", |_| {});
    scratch.runc().create(&sleeps).ok();
    let mut daemon = scratch.command("setsid");
    run_with_timeout(daemon.args(["--fork", "sleep", &seconds]), Duration::from_secs(5)).ok();
    for path in [SHARED.scratch().path(), scratch.path()] {
        assert!(!Traces::of(path).processes.is_empty());
        println!("victim of {}", path.display());
    }
    std::thread::sleep(Duration::from_secs(1000));
}

#[test]
fn a_killed_test_run_leaves_nothing_behind() {
    let seconds = unique_seconds(5);
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", "harness::victim", "--ignored", "--nocapture"]).env(VICTIM, &seconds);
    let mut victim = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(victim.stdout.take().unwrap()).lines().map_while(Result::ok);
    let path = |line: String| line.split_once("victim of ").map(|(_, path)| PathBuf::from(path));
    let paths: Vec<PathBuf> = lines.filter_map(path).take(2).collect();
    let running = command_lines_with(&seconds);
    victim.kill().unwrap();
    assert_eq!(victim.wait().unwrap().signal(), Some(9));
    assert_eq!(paths.len(), 2, "the victim did not get that far");
    assert_eq!(running.len(), 2, "one in a container, one on its own: {running:?}");
    eventually(|| !paths.iter().any(|path| path.exists()));
    paths.iter().for_each(|path| is_gone(path, &seconds));
}
