//! What engines do to containers that live, and ids that come back too soon.

use std::io::{BufRead, BufReader};

use caps::{CapSet, Capability};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use procfs::process::LimitValue;
use serde_json::json;

use crate::gated::{ASK, Gated, MIB, RMTOOL, RUNTIME, got_bytes, monitors, rmtool, stop};
use crate::host::ask;
use crate::support::{
    Bundle, Containerd, Docker, IMAGE, Outcome, Restart, Runtime, eventually, timeout, wait_until,
};

/// The runtime's reasons, without its clock.
fn reasons(outcome: &Outcome) -> Vec<String> {
    let lines = outcome.stderr.lines();
    let reason = |line: &str| line.split_once("msg=").map_or(line, |(_, msg)| msg).to_owned();
    lines.map(reason).collect()
}

/// Checkpoints a container of `bare` and one of ours, on a host without criu.
#[track_caller]
fn checkpoint(gated: &Gated, bare: &Runtime<'_>) {
    // A search path that has what crun's script needs, and no criu.
    let path = gated.host.scratch.directory("path");
    for name in ["sh", "runc", "crun"] {
        let link = path.join(name);
        if !link.exists() {
            std::os::unix::fs::symlink(crate::support::program(name), link)
                .expect("a link can be made");
        }
    }
    let path = path.display().to_string();
    let images = gated.host.scratch.directory("images").display().to_string();
    let log = gated.host.scratch.path().join("checkpoint.log").display().to_string();
    let checkpoint = ["--log", &log, "--log-format", "json", "checkpoint", "--image-path", &images];
    let call = |runtime: &Runtime<'_>, words: &[&str]| {
        runtime.clone().env("PATH", &path).call(&[&checkpoint[..], words].concat())
    };
    let try_it = |runtime: &Runtime<'_>, bundle: &Bundle| {
        call(runtime, &["--leave-running", bundle.id.as_str()])
    };
    let plain = gated.host.bundle("plain", |_| {});
    bare.create(&plain).ok();
    bare.start(&plain).ok();
    let expected = try_it(bare, &plain).fails();
    bare.delete(&plain).ok();
    // Nor is it ours what becomes of a container without a quota, or of none.
    let runtime = gated.host.runtime();
    runtime.create(&plain).ok();
    runtime.start(&plain).ok();
    for id in ["plain", "nowhere"] {
        let said = call(&runtime, &[id]);
        let of_bare = call(bare, &["nowhere"]);
        assert!(!said.stderr.contains("cgpu:"), "{said}\nbare: {of_bare}");
        assert_eq!(said.status.code(), Some(1), "{said}");
    }
    runtime.delete(&plain).ok();

    let bundle = gated.sleeping("app", 1000);
    let monitor = gated.monitor("app_________");
    let mut holder = gated.start(&bundle, &["hold", "300MiB"]);
    gated.soon_uses(300);
    let reported = try_it(&runtime, &bundle);
    assert_eq!(reported.status.code(), expected.status.code(), "{reported}\nbare: {expected}");
    assert_eq!(reasons(&reported), reasons(&expected), "{reported}\nbare: {expected}");

    // One that would end it, and couldn't be undone, doesn't reach the runtime.
    // crun without criu has no such command, and no log of it.
    let logged = || std::fs::read_to_string(&log).unwrap_or_default();
    let before = logged();
    let refused = call(&runtime, &[&bundle.id]).exits(1);
    let line = refused.stderr.trim_end();
    assert!(
        line.starts_with("cgpu: cannot checkpoint container app: it has a GPU quota"),
        "{line}"
    );
    assert!(line.contains("; add --leave-running to ") && !line.contains('\n'), "{line}");
    let logged = logged();
    let added = logged.strip_prefix(&before).expect("lines are appended");
    let entry: serde_json::Value = serde_json::from_str(added).expect("it is one line of JSON");
    assert_eq!((&entry["level"], &entry["msg"]), (&json!("error"), &json!(line)));
    // Nor if cgpu can't be configured: then the real runtime is the first that there is, runc.
    if bare.program().ends_with("runc") {
        let broken = gated.host.scratch.path().join("broken.toml");
        std::fs::write(&broken, "state_dir = 1").expect("a file can be written");
        let broken = broken.display().to_string();
        let refused = call(&runtime.clone().env("CGPU_CONFIG", &broken), &[&bundle.id]).exits(1);
        assert!(refused.stderr.contains("broken.toml"), "{refused}");
    }

    assert_eq!(runtime.status(&bundle), "running");
    assert!(holder.try_wait().is_ok_and(|ended| ended.is_none()), "it holds its memory");
    gated.soon_accounts("app", 300);
    gated.fills(&bundle, 700);
    assert_eq!(gated.monitor("app_________"), monitor, "the monitor is the same");
    runtime.delete(&bundle).ok();
    holder.wait().expect("it is our child");
    gated.soon_is_empty();
    gated.host.check_registry();
}

#[test]
fn engine_that_ignores_sigchld_gets_its_container() {
    for crun in [false, true] {
        let mut gated = Gated::new();
        if crun {
            if !crun_ends_where_ends_are_ignored(&gated) {
                eprintln!("skipped: crun itself doesn't end when its engine ignores SIGCHLD");
                continue;
            }
            gated.over_crun();
        }
        let bundle = gated.bundle("app", 1000, &[RMTOOL, "fill"]);
        let runtime = gated.host.runtime();
        let shown = runtime.run_by(&["env", "--ignore-signal=CHLD"], &bundle).ok();
        assert_eq!(got_bytes(&shown), 1000 * MIB, "crun {crun}: {shown}");
        gated.soon_is_empty();
    }
}

/// Version 1.8 does; 1.21 mostly waits for ever, without us.
fn crun_ends_where_ends_are_ignored(gated: &Gated) -> bool {
    let crun = gated.host.scratch.crun();
    (0..5).all(|round| {
        let bundle = gated.host.scratch.bundle(&format!("bare-{round}"), |config| {
            config["process"]["args"] = json!(["true"]);
        });
        let short = ["timeout", "--signal=KILL", "20", "env", "--ignore-signal=CHLD"];
        let ended = crun.run_by(&short, &bundle).status.success();
        let _ = crun.delete(&bundle); // gone already, then
        ended
    })
}

/// A checkpoint leaves a container with a quota running, or is refused.
#[test]
fn checkpoint_is_refused_or_leaves_container_running() {
    let gated = Gated::new();
    checkpoint(&gated, &gated.host.scratch.runc());
    let mut gated = Gated::new();
    gated.over_crun();
    checkpoint(&gated, &gated.host.scratch.crun());
}

/// criu needs `PR_SET_MM`, which the gate refuses: its user would see only an errno.
#[test]
fn restore_under_gate_is_refused_before_any_reservation() {
    let mut gated = Gated::new();
    for crun in [false, true] {
        if crun {
            gated.over_crun();
        }
        let runtime = gated.host.runtime();
        let restore = |runtime: &Runtime<'_>, bundle: &Bundle| {
            let dir = bundle.directory.to_str().expect("it is UTF-8");
            let images = gated.host.scratch.directory("images").display().to_string();
            runtime.call(&["restore", "--image-path", &images, "--bundle", dir, &bundle.id])
        };
        let bundle = gated.bundle("app", 1000, &[RMTOOL, "fill"]);
        let asked = std::fs::read(bundle.directory.join("config.json")).expect("it is there");
        let refused = restore(&runtime, &bundle).exits(1);
        for part in ["GPU quota can't be restored", "PR_SET_MM", "by create or run"] {
            assert!(refused.stderr.contains(part), "crun {crun}: {refused}");
        }
        assert_eq!(refused.stderr.lines().count(), 1, "crun {crun}: {refused}");
        let left = std::fs::read(bundle.directory.join("config.json")).expect("it is there");
        assert_eq!(left, asked, "crun {crun}: the bundle is as it was");
        assert_eq!(monitors(&gated.host), [0; 0], "crun {crun}: no monitor was started");
        let log = gated.host.log();
        assert!(
            log.contains(" INFO create refused: a container with a GPU quota can't be"),
            "{log}"
        );
        assert_eq!(log.lines().count(), 1, "crun {crun}: nothing was done: {log}");
        // One without a quota is restored, or not, as by the runtime alone.
        let plain = gated.host.bundle("plain", |_| {});
        let bare = match crun {
            true => gated.host.scratch.crun(),
            false => gated.host.scratch.runc(),
        };
        let expected = restore(&bare, &plain).fails();
        let _ = bare.call(&["delete", "--force", "plain"]); // crun leaves something
        let reported = restore(&runtime, &plain);
        let _ = bare.call(&["delete", "--force", "plain"]);
        assert_eq!(reported.status.code(), expected.status.code(), "{reported}\nbare: {expected}");
        assert_eq!(reasons(&reported), reasons(&expected), "{reported}\nbare: {expected}");
        // The one that can't be restored is made again.
        let filled = runtime.run(&bundle).ok();
        assert_eq!(got_bytes(&filled), 1000 * MIB, "crun {crun}: {filled}");
        gated.soon_is_empty();
        gated.host.forget_log();
    }
}

#[test]
fn container_and_quota_survive_a_containerd_restart() {
    let gated = Gated::new();
    let config = gated.host.config().display().to_string();
    let mut containerd = Containerd::builder().runtime(RUNTIME).env("CGPU_CONFIG", config).start();
    let mount = format!("type=bind,src={},dst={RMTOOL},options=rbind:ro", rmtool().display());
    let mut options: Vec<&str> = ASK.iter().flat_map(|variable| ["--env", variable]).collect();
    options.extend(["--mount", &mount, "-d"]);
    for id in ["holder", "other"] {
        containerd.run(&options, id, &[RMTOOL, "hold", "300MiB"]).ok();
    }
    gated.soon_uses(600);

    let cri = containerd.cri();
    let pod = cri.pod_config("gated");
    let pod_id = cri.run_pod("cgpu", &pod);
    let mut main = cri.container_config("main");
    main["mounts"] = json!([{"container_path": RMTOOL, "host_path": rmtool(), "readonly": true}]);
    let variables = ASK.iter().filter_map(|variable| variable.split_once('='));
    main["envs"] = variables.map(|(key, value)| json!({"key": key, "value": value})).collect();
    main["command"] = json!([RMTOOL, "hold", "200MiB"]);
    let in_pod = cri.create(&pod_id, &main, &pod);
    cri.start(&in_pod).ok();
    gated.soon_uses(800);
    drop(cri);

    for how in [Restart::Graceful, Restart::Killed] {
        containerd.restart(how);
        gated.soon_uses(800);
        for id in ["holder", "other"] {
            let filled = containerd.exec(id, &[RMTOOL, "fill"]).ok();
            assert_eq!(got_bytes(&filled), 700 * MIB, "{how:?}: {filled}");
        }
        let filled = containerd.cri().exec_sync(&in_pod, &[RMTOOL, "fill"]);
        assert!(filled.stdout.contains(&format!("got_bytes={}", 800 * MIB)), "{how:?}: {filled:?}");
    }
    // One is killed, one removed while it runs, the pod's stopped.
    containerd.call(&["task", "kill", "--signal", "SIGKILL", "holder"]).ok();
    gated.soon_uses(500);
    for id in ["holder", "other"] {
        containerd.remove(id).ok();
    }
    gated.soon_uses(200);
    let cri = containerd.cri();
    cri.stop(&in_pod).ok();
    cri.remove(&in_pod).ok();
    cri.remove_pod(&pod_id).ok();
    gated.soon_is_empty();
    gated.host.check_registry();
}

/// What docker pauses in the middle of a call goes on, and is charged once.
#[test]
fn call_paused_by_docker_resumes_and_charges_once() {
    let gated = Gated::new();
    let docker = Docker::builder()
        .runtime(RUNTIME)
        .runtime_arg(format!("--cgpu-config={}", gated.host.config().display()))
        .start();
    let volume = format!("{}:{RMTOOL}:ro", rmtool().display());
    let mut options: Vec<&str> = ASK.iter().flat_map(|variable| ["-e", variable]).collect();
    options.extend(["-v", &volume, "-d", "--runtime=cgpu", "--name"]);
    let run = |name: &str, command: &[&str]| {
        docker.run(&[&options[..], &[name, IMAGE], command].concat()).ok()
    };
    run("calls", &[RMTOOL, "bench", "100000"]);
    run("holds", &[RMTOOL, "hold", "600MiB"]);
    let id = docker.inspect("calls", "{{.Id}}");
    assert!(eventually(|| gated.used_bytes(0) >= 600 * MIB));
    for turn in 0..6 {
        docker.call(&["pause", "calls"]).ok();
        assert_eq!(docker.inspect("calls", "{{.State.Status}}"), "paused", "in turn {turn}");
        // What is executed is allocated and freed, so that at most one is there.
        assert!(gated.accounted_bytes(&id) <= MIB, "in turn {turn}");
        let filled = docker.exec("holds", &[RMTOOL, "fill"]).ok();
        assert_eq!(got_bytes(&filled), 400 * MIB, "a neighbour, in turn {turn}: {filled}");
        docker.call(&["unpause", "calls"]).ok();
    }
    assert_eq!(docker.inspect("calls", "{{.State.Status}}"), "running");
    // Limits of the host's, changed meanwhile, and one that is paused is removed.
    docker.call(&["update", "--cpus", "0.5", "--pids-limit", "50", "holds"]).ok();
    let filled = docker.exec("holds", &[RMTOOL, "fill"]).ok();
    assert_eq!(got_bytes(&filled), 400 * MIB, "{filled}");
    docker.call(&["pause", "holds"]).ok();
    docker.remove("holds").ok();
    assert!(eventually(|| gated.used_bytes(0) <= MIB));
    // One that calls is stopped, which the kernel does in the middle of a call.
    docker.call(&["stop", "--time", "1", "calls"]).ok();
    gated.soon_is_empty();
    docker.remove("calls").ok();
    assert!(!gated.host.log().contains("killed"), "{}", gated.host.log());
}

/// The one before doesn't hear that it is to end, since it is stopped.
#[test]
fn reused_id_or_short_id_gets_fresh_monitor() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    for next in ["twelve-chars-one", "twelve-chars-two"] {
        let first = gated.sleeping("twelve-chars-one", 1000);
        let mut holder = gated.start(&first, &["hold", "300MiB"]);
        // Until the call has finished the monitor has a descriptor of the program's file.
        let mut said = String::new();
        let mut stdout = BufReader::new(holder.stdout.take().expect("it is a pipe"));
        stdout.read_line(&mut said).expect("it can be read");
        assert!(said.starts_with("holding "), "{said}");
        gated.soon_accounts("twelve-chars-one", 300);
        let before = gated.monitor("twelve-chars");
        stop(before);
        runtime.delete(&first).ok();
        holder.wait().unwrap();
        assert_eq!(gated.host.registered(), [].into(), "{next}");
        let second = gated.sleeping(next, 2000);
        assert!(monitors(&gated.host).contains(&before.as_raw()), "{next}: it is still there");
        let own = gated.monitor("twelve-chars");
        assert_ne!(own, before, "{next}");
        gated.fills(&second, 2000);
        let mut holder = gated.start(&second, &["hold", "400MiB"]);
        gated.soon_uses(400);
        kill(before, Signal::SIGCONT).unwrap();
        let alone = || monitors(&gated.host) == [own.as_raw()];
        assert!(
            eventually(alone),
            "{next}: {own} of {:?}\n{}",
            monitors(&gated.host),
            gated.host.log()
        );
        assert_eq!(gated.host.registered(), [next.to_owned()].into(), "{next}");
        gated.soon_accounts(next, 400);
        gated.fills(&second, 1600);
        runtime.delete(&second).ok();
        holder.wait().unwrap();
        gated.soon_is_empty();
    }
}

/// If the limit may not be raised, the log says that it is low.
#[test]
fn monitor_has_enough_descriptors_despite_low_engine_limit() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    let bundle = gated.bundle_with("app", |config| {
        ask(config, 1000);
        config["process"]["args"] = json!(["sleep", "1000"]);
        config["process"]["rlimits"] = json!([]);
    });
    let may = caps::has_cap(None, CapSet::Effective, Capability::CAP_SYS_RESOURCE);
    let least = if may.expect("capabilities can be asked for") { 18 << 10 } else { 64 };
    std::thread::scope(|scope| {
        let run = scope.spawn(|| runtime.run_by(&["prlimit", "--nofile=64:64"], &bundle));
        let pid = gated.monitor("app_________");
        let of = procfs::process::Process::new(pid.as_raw()).and_then(|of| of.limits());
        let limit = of.expect("it lives").max_open_files.soft_limit;
        let log = gated.host.log();
        assert!(matches!(limit, LimitValue::Value(most) if most >= least), "{limit:?}: {log}");
        assert_eq!(log.contains("few descriptors"), least == 64, "{log}");
        // It may not be there yet.
        let runs = || {
            let said = runtime.call(&["state", &bundle.id]);
            said.status.success() && said.json()["status"] == "running"
        };
        assert!(eventually(runs), "{}", gated.host.log());
        gated.fills(&bundle, 1000);
        runtime.kill(&bundle, "KILL").ok();
        let _ = run.join();
    });
    gated.soon_is_empty();
}

fn oom_score_adj(pid: Pid) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).expect("it lives");
    text.trim().to_owned()
}

/// A container under the engine's own limit of memory, say; but if that isn't permitted, the score is the
/// engine's as before, and the monitor serves all the same.
#[test]
fn monitor_is_last_oom_victim_if_permitted() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    let may = caps::has_cap(None, CapSet::Effective, Capability::CAP_SYS_RESOURCE);
    let may = may.expect("capabilities can be asked for");
    if !may {
        eprintln!("skipped: a monitor with CAP_SYS_RESOURCE, which the tests lack here");
    }
    let engine = ["setpriv", "--bounding-set=-sys_resource", "choom", "--adjust=500", "--"];
    let own = oom_score_adj(Pid::this());
    for (by, wanted) in [(&["env"][..], if may { "-999" } else { &own }), (&engine[..], "500")] {
        let bundle = gated.bundle("app", 1000, &["sleep", "1000"]);
        std::thread::scope(|scope| {
            let run = scope.spawn(|| runtime.run_by(by, &bundle));
            let pid = gated.monitor("app_________");
            let soon = || oom_score_adj(pid) == wanted;
            assert!(wait_until(timeout(), soon), "{by:?}: {}", oom_score_adj(pid));
            let runs = || {
                let said = runtime.call(&["state", &bundle.id]);
                said.status.success() && said.json()["status"] == "running"
            };
            assert!(wait_until(timeout(), runs), "{}", gated.host.log());
            gated.fills(&bundle, 1000);
            runtime.kill(&bundle, "KILL").ok();
            let _ = run.join();
        });
        let _ = runtime.delete(&bundle); // `run` does it
        gated.soon_is_empty();
    }
}

/// Containers whose ids have the same first characters have monitors of their own.
#[test]
fn ids_with_equal_prefixes_get_separate_monitors() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    let one = gated.sleeping("twelve-chars-one", 1000);
    let two = gated.sleeping("twelve-chars-two", 2000);
    let mut holder = gated.start(&one, &["hold", "900MiB"]);
    gated.soon_uses(900);
    gated.fills(&two, 2000);
    gated.soon_accounts("twelve-chars-one", 900);
    gated.soon_accounts("twelve-chars-two", 0);
    // The first one's name is free again, and the second keeps its own.
    runtime.delete(&one).ok();
    holder.wait().unwrap();
    let three = gated.sleeping("twelve-chars-three", 3000);
    gated.fills(&three, 3000);
    gated.fills(&two, 2000);
    for bundle in [&two, &three] {
        runtime.delete(bundle).ok();
    }
    gated.soon_is_empty();
    gated.host.check_registry();
}

/// Killed without any call of its hooks, and the monitor that would deregister it stopped.
#[test]
fn next_container_collects_one_with_unresponsive_monitor() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    let first = gated.sleeping("twelve-chars-one", 12_000);
    let monitor = gated.monitor("twelve-chars");
    stop(monitor);
    runtime.kill(&first, "KILL").ok();
    assert!(eventually(|| runtime.status(&first) == "stopped"));
    // It would not fit next to the first.
    let second = gated.sleeping("twelve-chars-two", 12_000);
    gated.fills(&second, 12_000);
    kill(monitor, Signal::SIGCONT).unwrap();
    let alone = || monitors(&gated.host).len() == 1;
    assert!(eventually(alone), "{}", gated.host.log());
    // Its delete finds what is the other one's, and leaves it alone.
    runtime.delete(&first).ok();
    gated.fills(&second, 12_000);
    assert_eq!(gated.host.registered(), ["twelve-chars-two".to_owned()].into());
    runtime.delete(&second).ok();
    gated.soon_is_empty();
    gated.host.check_registry();
}
