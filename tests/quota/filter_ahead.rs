//! The filter that is put on before there is a runtime: whom it holds, and whom it leaves alone.

use std::fs;

use serde_json::json;

use crate::gated::{FIRST_MIB, Gated, MIB, RMTOOL, got_bytes, rmtool};
use crate::host::ask;
use crate::support::Bundle;

/// What is written in a file like rmtool's output.
#[track_caller]
fn got_bytes_in(file: &std::path::Path) -> u64 {
    let text = fs::read_to_string(file).expect("the hook wrote it");
    let mut reported = text.split_whitespace().filter_map(|word| word.strip_prefix("got_bytes="));
    reported.next_back().unwrap_or_else(|| panic!("{text}")).parse().expect("a number")
}

#[test]
fn runtime_hooks_use_the_host_as_without_cgpu() {
    // Not over crun: here that is started in a mount namespace of its own.
    let gated = Gated::new();
    let said = gated.host.scratch.directory("said");
    let dev = gated.host.scratch.path().join("sim/dev");
    let fill = format!("'{}' --dev '{}' fill", rmtool().display(), dev.display());
    let hook = |name: &str| {
        let file = said.join(name).display().to_string();
        let mut script = format!("{fill} > '{file}' 2>&1");
        if name == "poststop" {
            // The driver frees what the container had a moment after its end.
            let all = FIRST_MIB * MIB;
            let again = format!("! grep -q got_bytes={all} '{file}'; do sleep 0.1; {script}; done");
            script = format!("{script}; while {again}");
        }
        json!({"path": "/bin/sh", "args": ["sh", "-c", script]})
    };
    let bundle = gated.bundle_with("app", |config| {
        ask(config, 1000);
        config["process"]["args"] = json!([RMTOOL, "fill"]);
        config["hooks"] = json!({
            "createRuntime": [hook("createRuntime")],
            "poststart": [hook("poststart")],
            "poststop": [hook("poststop")],
        });
    });
    let runtime = gated.host.runtime();
    let reported = runtime.run(&bundle).ok();
    // The one after the start shares the GPU with the container, which may be there.
    assert_eq!(got_bytes_in(&said.join("createRuntime")), FIRST_MIB * MIB);
    assert_eq!(got_bytes_in(&said.join("poststop")), FIRST_MIB * MIB);
    assert!(got_bytes_in(&said.join("poststart")) >= (FIRST_MIB - 1000) * MIB);
    assert!(got_bytes(&reported) <= 1000 * MIB, "{reported}");
    gated.soon_is_empty();
}

#[test]
fn bundle_seccomp_profile_stays_unchanged() {
    let gated = Gated::new();
    let profile = json!({
        "defaultAction": "SCMP_ACT_ALLOW",
        "syscalls": [{"names": ["getpriority"], "action": "SCMP_ACT_ERRNO", "errnoRet": 77}],
    });
    let bundle = gated.bundle_with("app", |config| {
        ask(config, 1000);
        config["process"]["args"] = json!([RMTOOL, "fill"]);
        config["linux"]["seccomp"] = profile.clone();
    });
    let filled = gated.host.runtime().run(&bundle).ok();
    assert_eq!(got_bytes(&filled), 1000 * MIB, "{filled}");
    assert_eq!(bundle.config()["linux"]["seccomp"], profile);
    gated.soon_is_empty();
}

/// By these annotations crun loads a filter in the place of the bundle's, or gives its listener away; the gate's
/// own is another one, which crun has already.
#[test]
fn cruns_seccomp_annotations_remove_no_quota() {
    let mut gated = Gated::new();
    gated.over_crun();
    let runtime = gated.host.runtime();
    let annotated = |id: &str, key: &str, value: &str| {
        gated.bundle_with(id, |config| {
            ask(config, 1000);
            config["process"]["args"] = json!(["sleep", "1000"]);
            config["linux"]["seccomp"] = json!({
                "defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [{"names": ["mkdir"], "action": "SCMP_ACT_ERRNO", "errnoRet": 95}],
            });
            config["annotations"] = json!({ key: value });
        })
    };
    // All calls are allowed: `ret ALLOW`.
    let bundle = annotated("data", "run.oci.seccomp_bpf_data", "BgAAAAAA/38=");
    runtime.create(&bundle).ok();
    runtime.start(&bundle).ok();
    let made = runtime.exec(&bundle, &["mkdir", "/made"]);
    assert!(made.status.success(), "the bundle's own section isn't in force: {made}");
    let shown = gated.exec(&bundle, &["fill"]).ok();
    assert_eq!(got_bytes(&shown), 1000 * MIB, "{shown}");
    runtime.delete(&bundle).ok();
    gated.soon_is_empty();

    // One listener is all that the kernel lets a process have: crun refuses, or sends none.
    let socket = gated.host.scratch.path().join("socket");
    let _listening = std::os::unix::net::UnixListener::bind(&socket).expect("a socket can be made");
    let socket = socket.display().to_string();
    let bundle = annotated("receiver", "run.oci.seccomp.receiver", &socket);
    let _ = runtime.create(&bundle); // looked at below
    let _ = runtime.start(&bundle);
    let shown = gated.exec(&bundle, &["fill"]);
    assert!(!shown.status.success() || got_bytes(&shown) == 1000 * MIB, "{shown}");
    let _ = runtime.delete(&bundle); // crun may have done it
    gated.soon_is_empty();
}

#[test]
fn profile_with_listener_is_refused_leaving_nothing() {
    let gated = Gated::new();
    let bundle = gated.bundle_with("app", |config| {
        ask(config, 1000);
        config["linux"]["seccomp"] = json!({
            "defaultAction": "SCMP_ACT_ALLOW", "listenerPath": "/run/other.sock",
            "syscalls": [{"names": ["mount"], "action": "SCMP_ACT_NOTIFY"}],
        });
    });
    let refused = gated.host.runtime().create(&bundle).fails();
    gated.host.was_reported(
        refused,
        &bundle,
        &["listenerPath is /run/other.sock", "without a listener"],
    );
    gated.soon_is_empty();
}

/// A container that sleeps, and what its `fill` by exec says with a configuration `text`.
fn filled_under(gated: &Gated, bundle: &Bundle, text: &str) -> crate::support::Outcome {
    let config = gated.host.config();
    let before = fs::read(&config).expect("it is there");
    fs::write(&config, text).expect("it can be written");
    let filled = gated.exec(bundle, &["fill"]);
    fs::write(&config, before).expect("it can be written");
    filled
}

#[test]
fn broken_configuration_lets_no_exec_bypass_gate() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let state = gated.host.state_dir();
    let state_dir = format!("state_dir = '{}'\n", state.display());
    // What is unknown or can't be meant leaves the directory readable.
    for broken in ["nonsense = 1\n", "[admission]\nmax_inst = 999\n"] {
        let filled = filled_under(&gated, &bundle, &format!("{state_dir}{broken}")).ok();
        assert_eq!(got_bytes(&filled), 1000 * MIB, "{filled}");
    }
    // If the place of the gate can't be determined, an exec could bypass it.
    let refused = filled_under(&gated, &bundle, &format!("{state_dir}[[[\n")).fails();
    assert!(refused.stderr.contains("cgpu: configuration"), "{refused}");
    gated.soon_uses(0);
    let filled = gated.exec(&bundle, &["fill"]).ok();
    assert_eq!(got_bytes(&filled), 1000 * MIB, "{filled}");
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// An exec finds its container, whatever stands before the id.
#[test]
fn exec_finds_its_container_behind_any_flags() {
    for crun in [false, true] {
        let mut gated = Gated::new();
        if crun {
            gated.over_crun();
        }
        let bundle = gated.sleeping("app", 1000);
        let runtime = gated.host.runtime();
        let mut lines = vec![
            vec!["exec", "--cwd", "/", "--env", "A=app", "app", RMTOOL, "fill"],
            vec!["exec", "-e", "A=b", "-u", "0", "app", RMTOOL, "fill"],
            vec!["exec", "--", "app", RMTOOL, "fill"],
        ];
        if crun {
            lines.push(vec!["exec", "--cw", "/", "-eA=b", "app", RMTOOL, "fill"]);
        }
        for line in lines {
            let filled = runtime.call(&line).ok();
            assert_eq!(got_bytes(&filled), 1000 * MIB, "crun {crun} {line:?}: {filled}");
        }
        runtime.delete(&bundle).ok();
        gated.soon_is_empty();
    }
}
