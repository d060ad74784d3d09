//! `cgpu-hook` as runtimes and engines call it: alone from a bundle's hooks, next to the
//! wrapper's own, as podman's `precreate`, and with what no runtime would say. Needs root,
//! runc, crun and FUSE.

#![allow(clippy::unwrap_used, reason = "clippy.toml allows it in tests, not in their helpers")]

use std::fs::{self, File};
use std::path::Path;

use crate::host::{Host, TOTAL_MIB, UUID, ask, state};
use crate::km_standin::{Fault, StandIn};
use crate::support::{Bundle, Runtime, program, run_with_input, run_with_timeout, timeout};
use serde_json::{Value, json};

/// A host on which a hook alone decides: the runtime isn't wrapped.
fn alone() -> Host {
    Host::new()
}

/// The hooks that an administrator's hooks directory gives every container.
fn hooks(host: &Host, activation: &str) -> Value {
    let hook = |stage: &str| {
        json!([{
            "path": env!("CARGO_BIN_EXE_cgpu-hook"),
            "args": ["cgpu-hook", stage, "--config", host.config()],
            "env": ["PATH=/usr/bin:/bin"],
        }])
    };
    json!({activation: hook(activation), "poststop": hook("poststop")})
}

/// A bundle with these hooks that asks for `mib`.
fn hooked(host: &Host, id: &str, activation: &str, mib: u64) -> Bundle {
    let hooks = hooks(host, activation);
    host.bundle(id, |config| {
        ask(config, mib);
        config["hooks"] = hooks;
    })
}

/// The bare runtimes.
fn bare(host: &Host) -> [Runtime<'_>; 2] {
    [host.scratch.runc(), host.scratch.crun()]
}

/// What `cgpu ps` reports of the only container: id, root, state, and its quota in MiB.
fn only(host: &Host) -> (String, String, String, u64) {
    let listed = host.ps();
    let [container] = listed.as_slice() else { panic!("one is registered, not {listed:?}") };
    let text = |field: &str| container[field].as_str().unwrap().to_owned();
    (text("id"), text("root"), text("state"), host.promised_mib())
}

fn path(path: &Path) -> String {
    path.display().to_string()
}

/// Alone, the hook registers a container by bundle and id, and releases it.
#[test]
fn standalone_hook_registers_and_releases_its_container() {
    let host = alone();
    for (at, runtime) in bare(&host).iter().enumerate() {
        for activation in ["prestart", "createRuntime"] {
            let id = format!("{activation}-{at}");
            let bundle = hooked(&host, &id, activation, 4000);
            runtime.create(&bundle).ok();
            let expected = (id, path(&bundle.directory), "active".to_owned(), 4000);
            assert_eq!(only(&host), expected);
            assert_eq!(host.ps()[0]["pid"], runtime.call(&["state", &bundle.id]).json()["pid"]);
            runtime.start(&bundle).ok();
            runtime.delete(&bundle).ok();
            assert_eq!(host.records(), [].into());
        }
    }
    host.check_registry();
}

#[test]
fn alone_it_isolates_where_the_module_is_loaded() {
    let standin = StandIn::mount(&[0]);
    let mut host = alone();
    for backend in ["km", "auto"] {
        host.use_km(standin.path());
        host.set("isolation.backend", backend);
        for runtime in bare(&host) {
            let id = format!("{backend}-0123456789abcdef");
            let bundle = hooked(&host, &id, "createRuntime", 4000);
            runtime.create(&bundle).ok();
            let short_id = &id[..12];
            assert_eq!(standin.instances(0), [short_id]);
            assert_eq!(standin.instance(0, short_id, "memsize"), 4000 << 20);
            assert_eq!(host.ps()[0]["backend"], "km");
            assert_eq!(host.ps()[0]["gpus"][0]["memory_used_bytes"], 0);
            runtime.delete(&bundle).ok();
            assert_eq!(standin.instances(0), [""; 0]);
        }
    }
}

/// A module that does not do its part fails the container creation, and leaves nothing.
#[test]
fn failing_module_fails_creation_and_leaves_nothing() {
    let standin = StandIn::mount(&[0]);
    let mut host = alone();
    host.use_km(standin.path());
    host.keep_log();
    for (fault, sentence) in [
        (Fault::NoSlot { gpu: 0 }, "GPU 0 has no "),
        (Fault::IgnoresWrite { gpu: 0, name: "memsize" }, "memsize"),
        (Fault::MakesNothing { gpu: 0 }, "GPU 0"),
        (Fault::ReadFails { path: "0/faulty______/memsize".into() }, "Input/output error"),
    ] {
        for (runtime, crun) in bare(&host).iter().zip([false, true]) {
            standin.fail(fault.clone());
            let bundle = hooked(&host, "faulty", "createRuntime", 4000);
            let refused = runtime.create(&bundle).fails();
            let logged = host.log();
            assert!(logged.contains(" INFO create refused: "), "{logged}");
            // crun does not show what a hook prints.
            let said = if crun { logged } else { refused.stderr };
            assert!(said.contains(sentence), "{fault:?}: {said}");
            host.forget_log();
            standin.heal();
            host.gc();
            assert_eq!(standin.instances(0), [""; 0], "{fault:?}");
            assert_eq!(host.records(), [].into(), "{fault:?}");
            let _ = runtime.delete(&bundle);
        }
    }
    // The first failure is what is reported, not that it could not be undone.
    standin.fail(Fault::IgnoresWrite { gpu: 0, name: "memsize" });
    standin.fail(Fault::DestroyFails);
    let init = host.sleeper();
    let bundle = host.asking("stuck", 4000);
    let reported = state("stuck", init.pid(), &bundle.directory);
    let refused = host.hook(&["createRuntime"], &reported).exits(1);
    assert!(refused.stderr.contains("memsize"), "{refused}");
    assert_eq!(host.promised_mib(), 4000, "what may still be there is still promised");
    standin.heal();
    drop(init);
    host.gc();
    assert_eq!((standin.instances(0).len(), host.records().len()), (0, 0));
}

#[test]
fn standalone_hook_refuses_the_gate_with_remedy() {
    let mut host = alone();
    let bundle = hooked(&host, "gated", "createRuntime", 4000);
    host.set("isolation.km_root", "/nowhere/cgpu_km");
    for backend in ["auto", "gate"] {
        host.set("isolation.backend", backend);
        let refused = host.scratch.runc().create(&bundle).fails();
        let sentence = "cgpu: a hook can't enforce this container's memory quota, because it doesn't \
                        start the container; make cgpu-runtime the engine's runtime, or set \
                        [isolation] backend = \"none\" in the configuration";
        assert!(refused.stderr.contains(sentence), "{refused}");
        assert_eq!(host.records(), [].into());
    }
    // A whole GPU has no quota to enforce.
    host.set("admission.exclusive", true);
    let hooks = hooks(&host, "createRuntime");
    let whole = host.bundle("whole", |config| {
        config["process"]["env"].as_array_mut().unwrap().push(json!("NVIDIA_VISIBLE_DEVICES=all"));
        config["hooks"] = hooks;
    });
    host.scratch.runc().create(&whole).ok();
    assert_eq!(host.ps()[0]["gpus"][0]["memory_limit_bytes"], Value::Null);
    host.scratch.runc().delete(&whole).ok();
    assert_eq!(host.records(), [].into());
}

/// What a container has is settled when a hook is called: one of cgpu's choice it may not have.
#[test]
fn alone_it_chooses_no_gpu() {
    let mut host = alone();
    host.set("isolation.backend", "none");
    let with = |host: &Host, id: &str, env: &[&str]| {
        let hooks = hooks(host, "createRuntime");
        host.bundle(id, |config| {
            let all = config["process"]["env"].as_array_mut().unwrap();
            all.extend(env.iter().map(|variable| json!(variable)));
            config["hooks"] = hooks;
        })
    };
    for (id, env) in [
        ("open", &["CGPU_MEMORY=4000MiB", "NVIDIA_VISIBLE_DEVICES=all"][..]),
        ("counted", &["CGPU_MEMORY=4000MiB", "CGPU_GPUS=1"]),
    ] {
        let refused = host.scratch.runc().create(&with(&host, id, env)).fails();
        let reported = "leaves it to cgpu which GPUs this container has";
        assert!(refused.stderr.contains(reported), "{refused}");
        assert_eq!(host.records(), [].into());
    }
    let named = with(&host, "named", &["CGPU_MEMORY=4000MiB", "CGPU_GPUS=device=0"]);
    host.scratch.runc().create(&named).ok();
    assert_eq!(only(&host).3, 4000);
    host.scratch.runc().delete(&named).ok();
}

#[test]
fn twice_is_as_once() {
    let standin = StandIn::mount(&[0]);
    let mut host = alone();
    host.use_km(standin.path());
    let bundle = host.asking("twice", 4000);
    let init = host.sleeper();
    let reported = state("twice", init.pid(), &bundle.directory);
    host.hook(&["createRuntime"], &reported).ok();
    let writes = standin.writes();
    let again = host.hook(&["createRuntime"], &reported).ok();
    assert_eq!((again.stdout.as_str(), again.stderr.as_str()), ("", ""));
    assert_eq!(standin.writes(), writes, "what is isolated stays as it is");
    assert_eq!(only(&host).3, 4000);
    for _ in 0..2 {
        let ended = host.hook(&["poststop"], &reported).ok();
        assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", ""));
        assert_eq!((standin.instances(0).len(), host.records().len()), (0, 0));
    }
}

/// A recreated container gets what it asks for, and not what the first one had.
#[test]
fn recreated_container_gets_only_its_own_request() {
    let standin = StandIn::mount(&[0]);
    let mut host = alone();
    host.use_km(standin.path());
    let created = |bundle: &Bundle| {
        let init = host.sleeper();
        let reported = state("job", init.pid(), &bundle.directory);
        (host.hook(&["createRuntime"], &reported), init)
    };
    let (first, init) = created(&host.asking("job", 4000));
    first.ok();
    drop(init);
    // Its end was not reported, and the bundle was written again.
    let (second, init) = created(&host.asking("job", 1000));
    second.ok();
    assert_eq!(only(&host).3, 1000);
    assert_eq!(standin.instance(0, "job_________", "memsize"), 1000 << 20);
    drop(init);
    let other = host.asking("other", 10_000);
    let holder = host.sleeper();
    host.hook(&["createRuntime"], state("other", holder.pid(), &other.directory)).ok();
    let (third, _init) = created(&host.asking("job", 8000));
    let refused = third.exits(1);
    assert!(refused.stderr.contains("held by other: 10000 MiB"), "{refused}");
    assert_eq!(host.registered(), ["other".to_owned()].into());
}

#[test]
fn poststop_never_fails() {
    let mut host = alone();
    let bundle = host.asking("gone", 4000);
    let reported = state("gone", 0, &bundle.directory);
    let silent = |host: &Host, words: &[&str], reported: &str| {
        let ended = host.hook(words, reported).ok();
        assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", ""), "{ended}");
    };
    silent(&host, &["poststop"], &reported);
    silent(&host, &["poststop", "--root", "/run/runc", "--id", "gone"], &reported);
    silent(&host, &["poststop", "--reservation", "1-2"], &reported);
    silent(&host, &["poststop"], &state("gone", 0, Path::new("/nowhere")));
    host.hook(&["poststop"], "garbage").ok();
    host.hook(&["poststop"], "").ok();
    // As a bundle may have it that another version of us wrote.
    host.hook(&["poststop", "--of-the-future"], &reported).ok();
    host.hook(&["createRuntime", "--of-the-future"], &reported).exits(2);
    let state_dir = host.scratch.file("file", "").join("state");
    host.set("state_dir", path(&state_dir));
    silent(&host, &["poststop"], &reported);
    fs::write(host.config(), "state_dir = 1").unwrap();
    let broken = host.hook(&["poststop"], &reported).ok();
    assert!(broken.stderr.contains("TOML parse error"), "{broken}");
    let config = path(&host.config());
    let mut flag_first = host.scratch.command(env!("CARGO_BIN_EXE_cgpu-hook"));
    flag_first.args(["--config", &config, "poststop"]);
    run_with_input(&mut flag_first, reported.as_bytes(), timeout()).ok();
    // It is the stage that counts, not a container of that name.
    host.hook(&["createRuntime", "--root", "/run/runc", "--id", "poststop"], &reported).exits(1);
}

#[test]
fn invalid_oci_state_fails_creation_with_reason() {
    let host = alone();
    let bundle = host.asking("odd", 4000);
    for input in ["", "garbage", "[]", "{\"id\": \"odd\"}", "{\"id\": 1, \"bundle\": \"/b\"}"] {
        let refused = host.hook(&["createRuntime"], input).exits(1);
        let sentence = "cgpu: standard input is not the container's OCI state: ";
        assert!(refused.stderr.starts_with(sentence), "{refused}");
        assert!(refused.stderr.ends_with("; a runtime calls this hook with it\n"), "{refused}");
        assert_eq!(refused.stderr.lines().count(), 1);
    }
    let gone = host.sleeper().pid();
    let refused = host.hook(&["createRuntime"], state("odd", gone, &bundle.directory)).exits(1);
    assert_eq!(
        refused.stderr,
        format!("cgpu: container odd: its process {gone} is gone; create it again\n")
    );
    let nowhere = host.hook(&["createRuntime"], state("odd", 1, Path::new("/nowhere"))).exits(1);
    assert!(nowhere.stderr.starts_with("cgpu: bundle /nowhere: config.json: No such"), "{nowhere}");
    assert_eq!(host.records(), [].into());
}

#[test]
fn record_without_pid_lasts_while_bundle_exists() {
    let host = alone();
    let no_pid = |bundle: &Bundle| json!({"id": bundle.id, "bundle": bundle.directory}).to_string();
    for (id, zero) in [("absent", false), ("zero", true)] {
        let bundle = host.asking(id, TOTAL_MIB);
        let reported = if zero { state(id, 0, &bundle.directory) } else { no_pid(&bundle) };
        host.hook(&["createRuntime"], &reported).ok();
        assert_eq!(only(&host).2, "active");
        assert_eq!(host.ps()[0]["pid"], Value::Null);
        assert_eq!(host.gc(), "");
        fs::remove_dir_all(&bundle.directory).unwrap();
        assert_eq!(host.gc(), format!("{id} of {}\n", bundle.directory.display()));
    }
}

#[test]
fn container_without_request_starts_whatever_is_broken() {
    let standin = StandIn::mount(&[0]);
    let mut host = alone();
    host.use_km(standin.path());
    let hooks = hooks(&host, "createRuntime");
    let plain = host.bundle("plain", |config| config["hooks"] = hooks);
    let start = |host: &Host| {
        let runtime = host.scratch.runc();
        runtime.create(&plain).ok();
        runtime.delete(&plain).ok();
    };
    start(&host);
    assert!(!host.state_dir().exists(), "no container asked for anything");
    fs::write(host.scratch.path().join("gpus.json"), "{").unwrap();
    start(&host);
    let containers = host.scratch.directory("state/containers");
    fs::write(containers.join("damaged.json"), "{").unwrap();
    start(&host);
    let state_dir = host.scratch.file("file", "").join("state");
    host.set("state_dir", path(&state_dir));
    start(&host);
    // Nor does a process that has exited matter to it.
    host.hook(&["createRuntime"], state("plain", 0x3fff_ffff, &plain.directory)).ok();
    assert_eq!(standin.writes(), []);
}

#[test]
fn unreadable_configuration_stops_only_containers_with_requests() {
    let mut host = alone();
    let all_hooks = hooks(&host, "createRuntime");
    let plain = host.bundle("plain", |config| config["hooks"] = all_hooks);
    let asking = hooked(&host, "asking", "createRuntime", 3000);
    host.set("no_such_key", 1);
    let runtime = host.scratch.runc();
    runtime.create(&plain).ok();
    runtime.delete(&plain).ok();
    let refused = runtime.create(&asking).fails();
    assert!(refused.stderr.contains("no_such_key"), "{refused}");
    let precreate = |bundle: &Bundle| {
        let config = fs::read_to_string(bundle.directory.join("config.json")).unwrap();
        (host.hook(&["precreate"], &config), config)
    };
    let (reported, config) = precreate(&plain);
    assert_eq!(reported.ok().stdout, config);
    let (reported, _) = precreate(&asking);
    assert!(reported.fails().stderr.contains("no_such_key"));
}

#[test]
fn wrapper_and_directory_hooks_register_once() {
    let standin = StandIn::mount(&[0]);
    let mut host = alone();
    host.use_km(standin.path());
    for (activation, real) in
        [("prestart", program("runc")), ("createRuntime", host.scratch.crun_program())]
    {
        host.wrap(real);
        let bundle = hooked(&host, &format!("both-{activation}"), activation, TOTAL_MIB);
        let runtime = host.runtime();
        runtime.create(&bundle).ok();
        let root = path(&runtime.root().canonicalize().unwrap());
        assert_eq!(only(&host), (bundle.id.clone(), root, "created".into(), TOTAL_MIB));
        assert_eq!(standin.instances(0).len(), 1);
        runtime.delete(&bundle).ok();
        assert_eq!((standin.instances(0).len(), host.records().len()), (0, 0));
    }
}

#[test]
fn next_creation_collects_if_no_poststop_hook_ran() {
    let standin = StandIn::mount(&[0]);
    let mut host = alone();
    host.use_km(standin.path());
    let mut hooks = hooks(&host, "createRuntime");
    hooks["createRuntime"].as_array_mut().unwrap().push(json!({"path": "/bin/false"}));
    let failing = host.bundle("failing", |config| {
        ask(config, TOTAL_MIB);
        config["hooks"] = hooks;
    });
    host.scratch.crun().create(&failing).fails();
    assert_eq!(host.registered(), [].into());
    let next = hooked(&host, "next", "createRuntime", TOTAL_MIB);
    host.scratch.crun().create(&next).ok();
    assert_eq!(host.registered(), ["next".to_owned()].into());
    assert_eq!(standin.instances(0), ["next________"]);
}

// precreate

fn precreate(host: &Host, config: &[u8]) -> Vec<u8> {
    host.hook(&["precreate"], config).ok().stdout.into_bytes()
}

#[test]
fn precreate_changes_no_byte_where_nothing_is_asked() {
    let host = alone();
    for text in [
        "{ \"z\": 1e3,\t\"a\": [1.50, \"\\u003c\"],\n \"process\": {\"env\": [\"A=b\"]} }",
        "{}",
        "{}\n\n",
    ] {
        assert_eq!(String::from_utf8(precreate(&host, text.as_bytes())).unwrap(), text);
    }
    assert!(!host.state_dir().exists());
    let refused = host.hook(&["precreate"], "garbage").exits(1);
    assert_eq!(refused.stdout, "");
    assert!(refused.stderr.contains("config.json is not valid JSON"), "{refused}");
}

/// The precreate hook adds what the wrapper adds, and no more the second time.
#[test]
fn precreate_edits_like_wrapper_and_is_idempotent() {
    let host = alone();
    let bundle = host.asking("piped", 4000);
    let config = fs::read(bundle.directory.join("config.json")).unwrap();
    let text = String::from_utf8(config.clone()).unwrap();
    let strange = text.replacen('{', "{ \"x-unknown\": [1e3, 1.50, \"\\u003c\"],", 1);
    let once = precreate(&host, strange.as_bytes());
    let once_text = String::from_utf8(once.clone()).unwrap();
    assert!(once_text.starts_with("{ \"x-unknown\": [1e3, 1.50, \"\\u003c\"],"), "{once_text}");
    let value: Value = serde_json::from_slice(&once).unwrap();
    let env = value["process"]["env"].as_array().unwrap();
    assert!(env.contains(&json!(format!("NVIDIA_VISIBLE_DEVICES={UUID}"))));
    assert_eq!(value["hooks"]["createRuntime"].as_array().unwrap().len(), 1);
    assert_eq!(host.promised_mib(), 4000);
    assert_eq!(precreate(&host, &once), once);
    assert_eq!(host.promised_mib(), 4000, "the same reservation");
    assert_eq!(host.records().len(), 1);
}

#[test]
fn precreate_hooks_assign_the_reservation_to_the_container() {
    let standin = StandIn::mount(&[0]);
    let mut host = alone();
    host.use_km(standin.path());
    for runtime in bare(&host) {
        let bundle = host.asking("piped", TOTAL_MIB);
        let file = bundle.directory.join("config.json");
        let original = fs::read(&file).unwrap();
        // podman asks again for every start of a container, with its own configuration.
        for round in 0..2 {
            fs::write(&file, precreate(&host, &original)).unwrap();
            assert_eq!(only(&host).2, "reserved");
            runtime.create(&bundle).ok();
            let expected =
                ("piped".to_owned(), path(&bundle.directory), "active".to_owned(), TOTAL_MIB);
            assert_eq!(only(&host), expected, "round {round}");
            assert_eq!(host.records().len(), 1);
            assert_eq!(standin.instances(0).len(), 1);
            runtime.delete(&bundle).ok();
            assert_eq!((standin.instances(0).len(), host.records().len()), (0, 0));
        }
        // And a container whose configuration is used again as it is.
        runtime.create(&bundle).ok();
        assert_eq!(only(&host).2, "active");
        runtime.delete(&bundle).ok();
        assert_eq!((standin.instances(0).len(), host.records().len()), (0, 0));
    }
}

#[test]
fn unclaimed_reservation_expires() {
    let host = alone();
    let bundle = host.asking("forgotten", TOTAL_MIB);
    let config = fs::read(bundle.directory.join("config.json")).unwrap();
    precreate(&host, &config);
    let refused = host.hook(&["precreate"], &config).exits(1);
    assert!(refused.stderr.contains("has 0 MiB of 16000 MiB left"), "{refused}");
    assert_eq!(refused.stdout, "", "an engine must not take half a configuration");
    host.edit_record("precreate", |record| record["holder"]["until_boot_s"] = json!(1));
    assert_eq!(host.registered(), [].into());
    host.whole_gpu_can_be_had("next");
    precreate(&host, &config);
}

#[test]
fn a_precreate_that_can_not_answer_promises_nothing() {
    let host = alone();
    let bundle = host.asking("unheard", TOTAL_MIB);
    let config = fs::read(bundle.directory.join("config.json")).unwrap();
    // One line, and shorter than what standard output keeps back.
    let plain = "{\"process\": {\"env\": []}}".as_bytes();
    for input in [config.as_slice(), plain] {
        let mut command = host.scratch.command("sh");
        command.args(["-c", "exec \"$0\" precreate --config \"$1\" > /dev/full"]);
        command.arg(env!("CARGO_BIN_EXE_cgpu-hook")).arg(host.config());
        let failed = run_with_input(&mut command, input, timeout()).exits(1);
        assert_eq!(
            failed.stderr,
            "cgpu: cannot write the configuration to standard output: No space left on device \
             (os error 28)\n"
        );
    }
    assert_eq!(host.records(), [].into());
}

// What the configuration and the variables come to.

/// What `cgpu inspect` reports of a bundle with these variables and annotations.
fn inspected(host: &Host, env: &[&str], annotations: &Value) -> Value {
    let bundle = host.bundle("inspected", |config| {
        config["process"]["env"] = json!(env);
        config["annotations"] = annotations.clone();
    });
    let words = ["inspect", "--format", "json", "--bundle", &path(&bundle.directory)];
    let outcome = host.cgpu(&words);
    if outcome.status.success() { outcome.json() } else { outcome.exits(1).stderr.into() }
}

/// The quotas in MiB of what was inspected.
fn limits_mib(inspected: &Value) -> Vec<Option<u64>> {
    let gpus = inspected["plan"]["gpus"].as_array().unwrap_or_else(|| panic!("{inspected}"));
    gpus.iter().map(|gpu| gpu["memory_limit_bytes"].as_u64().map(|bytes| bytes >> 20)).collect()
}

/// The configuration decides which containers may ask, and for what.
#[test]
fn configuration_decides_which_requests_are_accepted() {
    let quota = ["ALIYUN_COM_GPU_MEM_CONTAINER=4000", "ALIYUN_COM_GPU_MEM_DEV=16000"];
    let whole = ["NVIDIA_VISIBLE_DEVICES=all"];
    let none = json!({});
    let annotated = json!({
        "aliyun.com/gpu-mem-container": "1000", "aliyun.com/gpu-mem-dev": "16000",
    });
    let host = Host::new();
    assert_eq!(limits_mib(&inspected(&host, &quota, &none)), [Some(4000)]);
    assert_eq!(limits_mib(&inspected(&host, &quota, &annotated)), [Some(1000)]);
    assert_eq!(limits_mib(&inspected(&host, &whole, &none)), [None]);

    let with = |key: &str, value: toml::Value| {
        let mut host = Host::new();
        host.set(key, value);
        host
    };
    let host = with("admission.trust_annotations", false.into());
    assert_eq!(limits_mib(&inspected(&host, &quota, &annotated)), [Some(4000)]);
    assert_eq!(inspected(&host, &[], &annotated)["plan"], Value::Null);
    let host = with("admission.trust_env", false.into());
    assert_eq!(limits_mib(&inspected(&host, &quota, &annotated)), [Some(1000)]);
    assert_eq!(inspected(&host, &quota, &none)["plan"], Value::Null);
    let host = with("admission.require_quota", true.into());
    assert_eq!(limits_mib(&inspected(&host, &quota, &none)), [Some(4000)]);
    let refused = inspected(&host, &whole, &none);
    assert!(refused.as_str().unwrap().contains("(require_quota)"), "{refused}");
    let host = with("admission.exclusive", true.into());
    assert_eq!(limits_mib(&inspected(&host, &whole, &none)), [None]);
    let host = with("admission.overcommit", 0.2.into());
    let refused = inspected(&host, &quota, &none);
    assert!(refused.as_str().unwrap().contains("can promise 3200 MiB in all"), "{refused}");
    let host = with("admission.max_inst", 3.into());
    let refused =
        inspected(&host, &[&quota[..], &["ALIYUN_COM_GPU_SCHD_WEIGHT=4"]].concat(), &none);
    assert!(refused.as_str().unwrap().contains("a weight of 1 to 3"), "{refused}");
}

/// Unlimited and shared use of a GPU exclude each other if so configured.
#[test]
fn unlimited_and_shared_use_are_exclusive_if_configured() {
    let mut host = Host::new();
    let runtime = host.runtime();
    let shared = host.asking("shared", 4000);
    let whole = host.bundle("whole", |config| {
        config["process"]["env"].as_array_mut().unwrap().push(json!("NVIDIA_VISIBLE_DEVICES=0"));
    });
    runtime.create(&whole).ok();
    runtime.create(&shared).ok();
    for bundle in [&whole, &shared] {
        runtime.delete(bundle).ok();
    }
    host.set("admission.exclusive", true);
    let runtime = host.runtime();
    for (first, second, held) in
        [(&whole, &shared, "whole: the whole GPU"), (&shared, &whole, "shared: 4000 MiB")]
    {
        runtime.create(first).ok();
        let refused = runtime.create(second).exits(1);
        assert!(refused.stderr.contains(&format!("held by {held};")), "{refused}");
        runtime.delete(first).ok();
    }
    assert_eq!(host.records(), [].into());
}

#[test]
fn mixed_mode_gives_share_next_to_unlimited_gpus() {
    let gpu =
        |index: u32| json!({"index": index, "uuid": format!("GPU-{index}"), "memory_mib": 16130});
    let host = Host::with_gpus(&json!([gpu(0), gpu(1), gpu(2)]));
    let env = [
        "PATH=/bin",
        "ALIYUN_COM_GPU_MEM_CONTAINER=4",
        "ALIYUN_COM_GPU_MEM_DEV=15",
        "ALIYUN_COM_GPU_VISIBLE_DEVICES=2",
        "NVIDIA_VISIBLE_DEVICES=0,1,2",
    ];
    let bundle = host.bundle("mixed", |config| config["process"]["env"] = json!(env));
    let runtime = host.runtime();
    runtime.create(&bundle).ok();
    let limits: Vec<Value> = (0..3)
        .map(|at| host.container("mixed")["gpus"][at]["memory_limit_bytes"].clone())
        .collect();
    assert_eq!(limits, [Value::Null, Value::Null, json!(4301u64 << 20)]);
    let mut expected = env.map(str::to_owned);
    expected[4] = "NVIDIA_VISIBLE_DEVICES=GPU-0,GPU-1,GPU-2".to_owned();
    assert_eq!(bundle.config()["process"]["env"], json!(expected), "the others stay");
    runtime.delete(&bundle).ok();
}

/// Weight and priority reach the module, which the container cannot reach.
#[test]
fn weight_and_priority_reach_module_hidden_from_container() {
    let standin = StandIn::mount(&[0]);
    let mut host = Host::new();
    host.use_km(standin.path());
    let bundle = host.bundle("weighty", |config| {
        ask(config, 4000);
        let env = config["process"]["env"].as_array_mut().unwrap();
        env.extend([json!("ALIYUN_COM_GPU_SCHD_WEIGHT=3"), json!("ALIYUN_COM_GPU_HIGH_PRIO=1")]);
    });
    let runtime = host.runtime();
    runtime.create(&bundle).ok();
    let value = |name| standin.instance(0, "weighty_____", name);
    assert_eq!((value("memsize"), value("weight"), value("highprio")), (4000 << 20, 3, 1));
    let masked = bundle.config()["linux"]["maskedPaths"].clone();
    assert!(masked.as_array().unwrap().contains(&json!(standin.path())), "{masked}");
    runtime.delete(&bundle).ok();
    assert_eq!(standin.instances(0), [""; 0]);
}

// What a hook inherits.

#[test]
fn hook_inherits_nothing_from_the_containers_author() {
    for crun in [false, true] {
        let mut host = alone();
        if crun {
            host.wrap(host.scratch.crun_program());
        }
        // Ours, with a hook next to it that notes what it gets.
        let bin = host.scratch.directory("bin");
        let mut copy = host.scratch.command("cp");
        copy.arg(env!("CARGO_BIN_EXE_cgpu-runtime")).arg(&bin);
        run_with_timeout(&mut copy, timeout()).ok();
        let note = host.scratch.path().join("note");
        File::create(&note).unwrap();
        host.scratch.script(
            "bin/cgpu-hook",
            &format!(
                "#!/bin/sh\ncat /proc/$$/environ >> {}\nexec {} \"$@\"\n",
                note.display(),
                env!("CARGO_BIN_EXE_cgpu-hook")
            ),
        );
        let bundle = host.bundle("author", |config| {
            ask(config, 4000);
            for variable in ["LD_PRELOAD=/evil.so", "CGPU_CONFIG=/evil", "CGPU_FAILPOINT=reserved"]
            {
                config["process"]["env"].as_array_mut().unwrap().push(json!(variable));
            }
        });
        let runtime = host
            .scratch
            .runtime(bin.join("cgpu-runtime"))
            .env("CGPU_CONFIG", path(&host.config()))
            .env("LD_BIND_NOW", "engine");
        runtime.create(&bundle).ok();
        runtime.delete(&bundle).ok();
        let noted = String::from_utf8(fs::read(note).unwrap()).unwrap();
        let mut variables: Vec<&str> =
            noted.split('\0').filter(|variable| !variable.is_empty()).collect();
        variables.sort_unstable();
        let only = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        assert_eq!(variables, [only], "poststop, crun: {crun}");
        assert_eq!(host.records(), [].into());
    }
}
