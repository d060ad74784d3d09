//! Containers whose record or monitor is lost: no process is started in them outside of the gate,
//! and what is left of them is found.

use std::fs;

use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};

use crate::activation::end_monitor;
use crate::gated::{Gated, MIB, RMTOOL, monitors};
use crate::host::names;
use crate::support::{Bundle, Outcome, eventually, program, timeout, wait_until};

const QUOTA_MIB: u64 = 700;

/// What every call on a container without a record reports.
pub(crate) const UNREGISTERED: [&str; 4] = [
    "was made with a GPU quota",
    "no record of it is in ",
    "outside of the quota",
    "create it again",
];

/// Takes all records away, as a fault or a hand would.
pub(crate) fn lose_records(gated: &Gated) {
    let containers = gated.host.state_dir().join("containers");
    let all = names(&containers);
    assert!(!all.is_empty(), "there is a record");
    all.iter().for_each(|name| fs::remove_file(containers.join(name)).expect("it's ours"));
}

/// With each runtime.
fn with_each_runtime(test: impl Fn(&Gated, &str)) {
    let mut gated = Gated::new();
    test(&gated, "runc");
    gated.over_crun();
    test(&gated, "crun");
}

/// A container whose first process has 100 MiB and waits.
fn holding(gated: &Gated, id: &str) -> Bundle {
    let bundle = gated.bundle(id, QUOTA_MIB, &[RMTOOL, "hold", "100MiB"]);
    let runtime = gated.host.runtime();
    runtime.create(&bundle).ok();
    runtime.start(&bundle).ok();
    gated.soon_uses(100);
    bundle
}

/// That an exec in the container is refused, in the words of `parts`, where an engine reads errors, and
/// that its first process has what it had.
#[track_caller]
fn takes_no_exec(gated: &Gated, bundle: &Bundle, parts: &[&str]) {
    let _ = fs::remove_file(bundle.directory.join("log.json")); // of the container creation
    let words = [RMTOOL, "fill"];
    let refused = gated.host.runtime().logged_exec(bundle, &words);
    gated.host.was_reported(refused, bundle, parts);
    assert_eq!(gated.used_bytes(0), 100 * MIB, "what it had stays");
}

#[track_caller]
fn doctor(gated: &Gated) -> Vec<Value> {
    let reported: Outcome = gated.host.cgpu(&["doctor", "--format", "json"]);
    let reported = reported.json();
    let mut all = reported["findings"].as_array().expect("findings are a list").clone();
    all.retain(|finding| finding["name"] == "lost");
    all
}

#[test]
fn a_container_without_a_record_takes_no_exec() {
    with_each_runtime(|gated, name| {
        let bundle = holding(gated, &format!("by-{name}"));
        lose_records(gated);
        takes_no_exec(gated, &bundle, &UNREGISTERED);
        // It doesn't depend on the bundle: an engine may have removed that.
        let away = bundle.directory.with_extension("away");
        let config = bundle.directory.join("config.json");
        fs::rename(&config, &away).unwrap();
        takes_no_exec(gated, &bundle, &UNREGISTERED);
        fs::rename(&away, &config).unwrap();
        // Nor on the configuration, which names another directory by now.
        let other = match name {
            "crun" => gated.host.scratch.crun_program(),
            _ => program("runc"),
        };
        let text = format!("[runtime]\ncandidates = [{other:?}]\n");
        let config = gated.host.scratch.file("elsewhere.toml", text).display().to_string();
        let elsewhere = gated.host.runtime().env("CGPU_CONFIG", config);
        let refused = elsewhere.exec(&bundle, &[RMTOOL, "fill"]).exits(1);
        assert!(refused.stderr.contains("no record of it is in /run/cgpu"), "{refused}");
        // What is left is found, and nothing of it is taken from a container that lives.
        let short_id = format!("{:_<12}", bundle.id);
        let reported = gated.host.gc();
        assert!(
            reported.starts_with(&format!("{short_id}: not taken back: its monitor")),
            "{reported}"
        );
        let found = doctor(gated);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0]["severity"], "error");
        assert!(found[0]["what"].as_str().unwrap().contains(&short_id), "{found:?}");
        gated.host.cgpu(&["upgrade-monitors"]).ok();
        assert_eq!(gated.used_bytes(0), 100 * MIB);
        gated.host.runtime().delete(&bundle).ok();
        assert!(wait_until(timeout(), || monitors(&gated.host).is_empty()), "the keeper ends");
        // Its directory is all that is left, once the hook has finished that the monitor became.
        let mut found = Vec::new();
        eventually(|| {
            found = doctor(gated);
            found.iter().all(|one| one["severity"] != "error")
        });
        assert_eq!((found.len(), &found[0]["severity"]), (1, &json!("note")), "{found:?}");
        let upgraded = gated.host.cgpu(&["upgrade-monitors"]).ok();
        assert!(upgraded.stdout.contains("skipped: it has no monitor any more"), "{upgraded}");
        let reported = gated.host.gc();
        assert_eq!(reported, format!("{short_id}: what was left of a monitor without a record\n"));
        assert_eq!((gated.host.gc(), doctor(gated)), (String::new(), vec![]));
        gated.soon_is_empty();
    });
}

/// A container whose monitor has exited takes no exec and is shown as closed.
#[test]
fn container_without_monitor_refuses_exec_and_shows_closed() {
    with_each_runtime(|gated, name| {
        let bundle = holding(gated, &format!("by-{name}"));
        assert!(eventually(|| gated.host.container(&bundle.id)["state"] == "active"));
        assert_eq!(doctor(gated), [] as [Value; 0]);
        end_monitor(gated);
        takes_no_exec(gated, &bundle, &["the monitor at ", "make the container anew"]);
        assert_eq!(gated.host.container(&bundle.id)["state"], "closed");
        let listed = gated.host.cgpu(&["ps"]).ok();
        assert!(
            listed.stdout.contains("its monitor has ended, so its driver calls fail"),
            "{listed}"
        );
        let found = doctor(gated);
        assert_eq!((found.len(), &found[0]["severity"]), (1, &json!("warning")), "{found:?}");
        assert!(found[0]["what"].as_str().unwrap().contains(&bundle.id), "{found:?}");
        gated.host.cgpu(&["upgrade-monitors"]).ok();
        assert_eq!(gated.host.gc(), "", "it lives, and so does its record");
        gated.host.runtime().delete(&bundle).ok();
        gated.soon_is_empty();
    });
}

#[test]
fn never_started_container_is_shown_as_created() {
    with_each_runtime(|gated, name| {
        let bundle = gated.bundle(&format!("by-{name}"), QUOTA_MIB, &["sleep", "1000"]);
        let runtime = gated.host.runtime();
        runtime.create(&bundle).ok();
        assert_eq!(gated.host.container(&bundle.id)["state"], "created");
        runtime.start(&bundle).ok();
        let is_active = || gated.host.container(&bundle.id)["state"] == "active";
        assert!(eventually(is_active), "it was started");
        runtime.delete(&bundle).ok();
        gated.soon_is_empty();
    });
}

/// The id may have been another's, who ended without a word and whose record is still there.
#[test]
fn container_without_quota_accepts_exec_despite_reused_id() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    let before = holding(&gated, "again");
    let pid = gated.host.container("again")["pid"].as_i64().unwrap();
    kill(nix::unistd::Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL).unwrap();
    gated.soon_uses(0);
    assert!(wait_until(timeout(), || runtime.status(&before) == "stopped"));
    fs::remove_dir_all(runtime.root().join("again")).unwrap();
    assert!(wait_until(timeout(), || monitors(&gated.host).is_empty()));
    gated.host.soon_releases_all();
    // As if it had been killed before it could say so.
    let record = json!({"root": runtime.root(), "id": "again", "bundle": before.directory,
        "short_id": "again_______", "boot_id": "", "plan": {"backend": "gate", "gpus": [],
        "weight": 1, "high_priority": false},
        "holder": {"state": "active", "init": {"pid": 1, "start_ticks": 1}}});
    let name = format!("{},again.json", percent(&runtime.root().display().to_string()));
    fs::write(gated.host.state_dir().join("containers").join(name), record.to_string()).unwrap();
    let plain =
        gated.host.bundle("plain", |config| config["process"]["args"] = json!(["sleep", "1000"]));
    let plain = Bundle { id: "again".into(), ..plain };
    runtime.create(&plain).ok();
    runtime.start(&plain).ok();
    assert_eq!(runtime.exec(&plain, &["echo", "in"]).ok().stdout, "in\n");
    runtime.delete(&plain).ok();
    gated.host.gc();
    gated.soon_is_empty();
}

fn percent(path: &str) -> String {
    path.replace('/', "%2F")
}

/// The runtime says so itself; an exited container need not be removed first.
#[test]
fn exec_in_exited_container_is_refused_by_runtime() {
    with_each_runtime(|gated, name| {
        let bundle = holding(gated, &format!("by-{name}"));
        let runtime = gated.host.runtime();
        runtime.kill(&bundle, "KILL").ok();
        assert!(wait_until(timeout(), || runtime.status(&bundle) == "stopped"));
        assert!(wait_until(timeout(), || monitors(&gated.host).is_empty()));
        gated.host.soon_releases_all();
        let refused = runtime.exec(&bundle, &["true"]).fails();
        assert!(!refused.stderr.contains("cgpu: "), "{refused}");
        runtime.delete(&bundle).ok();
        gated.soon_is_empty();
    });
}

/// Where it keeps its state is not known; the runtime is asked what it has.
#[test]
fn unknown_runtime_is_asked_for_the_bundle() {
    let mut gated = Gated::new();
    let other = gated.host.scratch.path().join("other-runtime");
    gated.host.scratch.copy_program(&program("runc"), &other);
    gated.host.wrap(&other);
    let bundle = holding(&gated, "by-other");
    lose_records(&gated);
    takes_no_exec(&gated, &bundle, &UNREGISTERED);
    gated.host.runtime().delete(&bundle).ok();
    let plain =
        gated.host.bundle("plain", |config| config["process"]["args"] = json!(["sleep", "1000"]));
    let runtime = gated.host.runtime();
    runtime.create(&plain).ok();
    runtime.start(&plain).ok();
    assert_eq!(runtime.exec(&plain, &["echo", "in"]).ok().stdout, "in\n");
    runtime.delete(&plain).ok();
    assert!(wait_until(timeout(), || monitors(&gated.host).is_empty()));
    gated.host.gc();
    gated.soon_is_empty();
}

/// Its nodes and libraries are in the bundle, and no quota would be enforced on it.
#[test]
fn bundle_with_gpus_but_no_request_is_refused() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    let bundle = gated.bundle("edited", QUOTA_MIB, &[RMTOOL, "fill"]);
    runtime.run(&bundle).ok();
    gated.soon_is_empty();
    let mut config = bundle.config();
    let env = config["process"]["env"].as_array_mut().unwrap();
    let asks =
        |item: &str| item.starts_with("ALIYUN_COM_GPU") || item.starts_with("NVIDIA_VISIBLE");
    env.retain(|item| !asks(item.as_str().unwrap()));
    bundle.write_config(&config);
    let _ = fs::remove_file(bundle.directory.join("log.json"));
    let refused = runtime.create(&bundle);
    let parts = ["has GPUs that cgpu gave it", "make the bundle anew, or ask as before"];
    gated.host.was_reported(refused, &bundle, &parts);
    for verb in ["run", "restore"] {
        let refused =
            runtime.call(&[verb, "--bundle", bundle.directory.to_str().unwrap(), "edited"]);
        let refused = refused.exits(1);
        assert!(refused.stderr.contains(parts[0]), "{verb}: {refused}");
    }
    assert_eq!(gated.used_bytes(0), 0);
    gated.soon_is_empty();
}

/// A caller that isn't root gets a message that says what it takes, and never to remove anything.
#[test]
fn ps_without_root_is_refused_without_removal_advice() {
    let gated = Gated::new();
    let bundle = holding(&gated, "held");
    let cgpu = crate::support::sibling(env!("CARGO_BIN_EXE_cgpu-runtime"), "cgpu");
    // The scratch is closed to others; what they see of a host's /run is a directory of root's.
    let open = |path: &std::path::Path, mode: u32| {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("it is ours");
    };
    open(gated.host.scratch.path(), 0o755);
    open(&gated.host.config(), 0o644);
    let copy = gated.host.scratch.path().join("cgpu");
    gated.host.scratch.copy_program(cgpu.as_ref(), &copy);
    open(&copy, 0o755);
    let mut command = gated.host.scratch.command("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&copy);
    command.arg("--config").arg(gated.host.config()).arg("ps");
    let reported = crate::support::run_with_timeout(&mut command, timeout()).exits(1);
    assert!(reported.stderr.contains("it is root's; run this as root"), "{reported}");
    assert!(!reported.stderr.contains("remove"), "{reported}");
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}
