//! The harness tried on bare runc and crun: if this fails, don't blame cgpu.
//!
//! One test for each engine, because engines are dear, and two for what matters most about the harness itself: that it
//! leaves nothing behind, however a test ends.

mod support;

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use serde_json::json;
use support::{
    Containerd, Docker, Executed, IMAGE, Image, Podman, Restart, Runtime, Scratch, Traces,
    run_with_timeout, wait_until,
};

/// Set for the run of this binary that is going to be killed.
const VICTIM: &str = "CGPU_TEST_VICTIM";

/// What is left of a scratch once `owner` is dropped; its directory must be gone as well.
fn left_after<Owner>(owner: Owner, scratch: impl Fn(&Owner) -> &Scratch) -> Traces {
    let path = scratch(&owner).path().to_owned();
    drop(owner);
    assert!(!path.exists(), "{} is still there", path.display());
    Traces::of(&path)
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
    assert!(wait_until(Duration::from_secs(5), || runtime.status(&sleeps) == "stopped"));
    runtime.delete(&sleeps).ok();
    runtime.call(&["state", id]).fails();
}

#[test]
fn runc_and_crun_run_a_bundle_from_create_to_delete() {
    let scratch = Scratch::new();
    lives_a_whole_life(&scratch.runc(), &scratch, "on-runc");
    lives_a_whole_life(&scratch.crun(), &scratch, "on-crun");
    assert_eq!(scratch.traces().processes, Vec::<String>::new());
    // Both are left running, one of them paused, for the scratch to clear away.
    let (paused, running) = (scratch.bundle("paused", |_| {}), scratch.bundle("running", |_| {}));
    scratch.runc().create(&paused).ok();
    scratch.runc().start(&paused).ok();
    scratch.runc().call(&["pause", "paused"]).ok();
    scratch.crun().create(&running).ok();
    scratch.crun().start(&running).ok();
    assert_eq!(scratch.traces().processes.len(), 2);
    let left = left_after(scratch, |scratch| scratch);
    assert!(left.is_empty(), "{left}");
}

#[test]
fn docker_runs_containers_and_keeps_them_over_a_restart() {
    let mut docker = Docker::builder().live_restore().start();
    let greedy = Image::new("localhost/greedy:1").env("BAKED", "in");
    docker.load(&greedy);
    for runtime in ["runc", "crun", "cgpu"] {
        let options = ["--rm", "--runtime", runtime, "-e", "GREETING=hello"];
        let printed = docker.run(&[&options[..], &["localhost/greedy:1", "env"]].concat()).ok();
        assert!(printed.has_line("GREETING=hello") && printed.has_line("BAKED=in"), "{printed}");
        docker.run(&["--rm", "--runtime", runtime, IMAGE, "sh", "-c", "exit 7"]).exits(7);
    }
    docker
        .run(&[
            "-d",
            "--name",
            "sleeper",
            "--runtime=cgpu",
            IMAGE,
            "sh",
            "-c",
            "echo begun; exec sleep 1000",
        ])
        .ok();
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
    docker.run(&["-d", "--runtime=crun", IMAGE, "sleep", "1000"]).ok();
    let left = left_after(docker, Docker::scratch);
    assert!(left.is_empty(), "{left}");
}

#[test]
fn containerd_runs_containers_and_pods() {
    let containerd = Containerd::builder().start();
    let crun = containerd.scratch().crun_program();
    let printed = containerd.run(&["--rm", "--env", "GREETING=hello"], "one", &["env"]).ok();
    assert!(printed.has_line("GREETING=hello"), "{printed}");
    containerd.run_with(&crun, &["--rm"], "two", &["sh", "-c", "exit 7"]).exits(7);
    containerd.run(&["-d"], "three", &["sleep", "1000"]).ok();
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
        let config: serde_json::Value =
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
    containerd.run(&["-d"], "four", &["sleep", "1000"]).ok();
    cri.run_pod("cgpu", &cri.pod_config("forgotten"));
    let left = left_after(containerd, Containerd::scratch);
    assert!(left.is_empty(), "{left}");
}

#[test]
fn podman_runs_containers_with_hooks() {
    let hooks = Scratch::new();
    let note = hooks.path().join("note");
    let script = hooks.script("hook", &format!("#!/bin/sh\nexec cat > {}\n", note.display()));
    let hook = json!({"version": "1.0.0", "hook": {"path": script}, "when": {"always": true}, "stages": ["createRuntime"]});
    hooks.file("noted.json", hook.to_string());

    let mut podman = Podman::builder().hooks_dir(hooks.path()).start();
    let rootfs = podman.scratch().rootfs("rootfs").display().to_string();
    for runtime in [podman.scratch().runc().program().clone(), podman.scratch().crun_program()] {
        podman.use_runtime(runtime);
        let printed =
            podman.run(&["--rm", "-e", "GREETING=hello", "--rootfs", &rootfs, "env"]).ok();
        assert!(printed.has_line("GREETING=hello"), "{printed}");
        assert!(std::fs::read_to_string(&note).unwrap().contains("ociVersion"));
        std::fs::remove_file(&note).unwrap();
        podman.run(&["--rm", "--rootfs", &rootfs, "sh", "-c", "exit 7"]).exits(7);
        podman.run(&["-d", "--name", "sleeper", IMAGE, "sleep", "1000"]).ok();
        assert_eq!(podman.exec("sleeper", &["echo", "inside"]).ok().text(), "inside");
        podman.remove("sleeper").ok();
    }
    podman.run(&["-d", IMAGE, "sleep", "1000"]).ok();
    let left = left_after(podman, Podman::scratch);
    assert!(left.is_empty(), "{left}");
}

#[test]
fn a_command_over_its_time_is_killed_with_its_children() {
    let scratch = Scratch::new();
    let mut command = scratch.command("busybox");
    command.args(["sh", "-c", "echo so far; sleep 1000 & wait"]);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = run_with_timeout(&mut command, Duration::from_millis(300));
    }));
    let message = panic
        .expect_err("it was over its time")
        .downcast::<String>()
        .expect("panics carry strings");
    assert!(message.contains("killed for running longer than 300ms"), "{message}");
    assert!(message.contains("sh -c echo so far") && message.contains("\nso far\n"), "{message}");
    assert!(wait_until(Duration::from_secs(5), || scratch.traces().processes.is_empty()));
}

static SHARED: LazyLock<Containerd> = LazyLock::new(|| Containerd::builder().start());

/// A test binary with an engine in a static, a container, and a daemon that would survive anything: then it waits.
#[test]
#[ignore = "not a test: `a_killed_test_run_leaves_nothing_behind` runs this as a process of its own and kills it"]
fn victim() {
    if std::env::var_os(VICTIM).is_none() {
        return;
    }
    SHARED.run(&["-d"], "sleeper", &["sleep", "1000"]).ok();
    let scratch = Scratch::new();
    let sleeps = scratch.bundle("sleeps", |_| {});
    scratch.runc().create(&sleeps).ok();
    run_with_timeout(
        scratch.command("setsid").args(["--fork", "sleep", "1000"]),
        Duration::from_secs(5),
    )
    .ok();
    for path in [SHARED.scratch().path(), scratch.path()] {
        assert!(!Traces::of(path).processes.is_empty());
        println!("victim of {}", path.display());
    }
    std::thread::sleep(Duration::from_secs(1000));
}

#[test]
fn a_killed_test_run_leaves_nothing_behind() {
    use std::io::{BufRead, BufReader};
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["--exact", "victim", "--ignored", "--nocapture"])
        .env(VICTIM, "1")
        .stdout(Stdio::piped());
    let mut victim = command.spawn().unwrap();
    let lines = BufReader::new(victim.stdout.take().unwrap()).lines().map_while(Result::ok);
    let words =
        lines.filter_map(|line| line.split_once("victim of ").map(|(_, path)| PathBuf::from(path)));
    let paths: Vec<PathBuf> = words.take(2).collect();
    victim.kill().unwrap();
    assert_eq!(victim.wait().unwrap().signal(), Some(9));
    assert_eq!(paths.len(), 2, "the victim did not get that far");
    for path in paths {
        let gone =
            wait_until(Duration::from_secs(20), || !path.exists() && Traces::of(&path).is_empty());
        assert!(gone, "of {}:\n{}", path.display(), Traces::of(&path));
    }
}
