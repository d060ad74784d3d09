//! A real runtime that is missing, can't be run, or fails.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;

use crate::host::{Host, TOTAL_MIB};
use crate::support::program;

#[test]
fn missing_runtime_is_reported_with_what_to_install() {
    let mut host = Host::new();
    let plain = host.scratch.file("plain", "");
    let sentence = |name: &str| {
        format!(
            "no real runtime: none of {name} is an executable file in PATH or the usual \
             directories; install runc or crun, or set [runtime] candidates in the configuration"
        )
    };
    for (id, candidate) in [
        ("missing", "/nowhere/runc".to_owned()),
        ("unknown", "no-such-runtime".to_owned()),
        ("not-executable", plain.display().to_string()),
        ("directory", host.scratch.path().display().to_string()),
    ] {
        host.wrap(&candidate);
        let bundle = host.asking(id, TOTAL_MIB);
        let old = fs::read(bundle.directory.join("config.json")).unwrap();
        let created = host.runtime().create(&bundle);
        host.was_reported(created, &bundle, &[&sentence(&candidate)]);
        assert_eq!(fs::read(bundle.directory.join("config.json")).unwrap(), old);
        let state = host.runtime().call(&["state", "x"]).exits(1);
        assert_eq!(state.stderr, format!("cgpu: {}\n", sentence(&candidate)));
    }
    assert!(!host.state_dir().exists());
}

#[test]
fn unexecutable_runtime_leaves_no_reservation() {
    let mut host = Host::new();
    // Its interpreter is missing, which the kernel finds out at the exec.
    let broken = host.scratch.script("runc", "#!/nowhere/interpreter\n");
    host.wrap(&broken);
    let bundle = host.asking("broken", TOTAL_MIB);
    let created = host.runtime().create(&bundle);
    let sentence =
        format!("cannot run the real runtime {}: No such file or directory", broken.display());
    host.was_reported(created, &bundle, &[&sentence, "; install it again"]);
    assert_eq!(host.records(), [].into());
}

#[test]
fn a_truncated_runtime_is_no_runtime() {
    let mut host = Host::new();
    let truncated = host.scratch.file("runc", "");
    fs::set_permissions(&truncated, fs::Permissions::from_mode(0o755)).unwrap();
    host.wrap(&truncated);
    let bundle = host.asking("truncated", TOTAL_MIB);
    let created = host.runtime().create(&bundle);
    host.was_reported(created, &bundle, &["no real runtime: none of "]);
}

/// The status of a runtime that fails or is killed is passed on, and its reservation is collected.
#[test]
fn runtime_failure_is_passed_on_and_reservation_collected() {
    let mut host = Host::new();
    let failing = host.scratch.script("fails", "#!/bin/sh\necho its own words >&2\nexit 42\n");
    host.wrap(failing);
    let failed = host.runtime().create(&host.asking("failing", TOTAL_MIB)).exits(42);
    assert_eq!(failed.stderr, "its own words\n");
    assert_eq!(host.registered(), [].into());

    host.wrap(host.scratch.script("dies", "#!/bin/sh\nkill -KILL $$\n"));
    let killed = host.runtime().create(&host.asking("killed", TOTAL_MIB));
    assert_eq!(killed.status.signal(), Some(9), "{killed}");
    assert_eq!(host.registered(), [].into());

    host.wrap(program("runc"));
    host.whole_gpu_can_be_had("after");
}

/// What the runtime refuses is in its own words, and nothing stays reserved.
#[test]
fn runtime_refusal_is_verbatim_and_reserves_nothing() {
    for real in ["runc", "crun"] {
        let mut host = Host::new();
        let path = match real {
            "runc" => program("runc"),
            _ => host.scratch.crun_program(),
        };
        host.wrap(path);
        let bundle = host.bundle("no-program", |config| {
            crate::host::ask(config, TOTAL_MIB);
            config["process"]["args"] = serde_json::json!(["/no/such/program"]);
            config["root"]["path"] = serde_json::json!("/nowhere");
        });
        let refused = host.runtime().create(&bundle).fails();
        assert!(!refused.stderr.contains("cgpu:"), "{refused}");
        assert_eq!(host.registered(), [].into(), "{real}");
        host.whole_gpu_can_be_had("after");
    }
}
