//! SIGKILL at every place of [`failpoint::ALL`], in the runtime and in its hooks.
//!
//! A place that a call should pass and doesn't fails the test: the call then ends
//! otherwise than by that signal. Hooks get a clean environment, so those of a real
//! container creation get the variable from a wrapped runc that writes it into the bundle's hooks.

use std::fs;
use std::os::unix::process::ExitStatusExt;

use cgpu_host::failpoint;

use crate::host::{Host, TOTAL_MIB, names, state};
use crate::km_standin::StandIn;
use crate::support::{Bundle, Outcome, program, run_with_timeout, timeout, wait_until};

/// Places that `cgpu-runtime create` passes, in their order.
const OF_CREATE: &[&str] = &[
    "recruited",
    "registry-locked",
    "index-dropped",
    "record-written",
    "record-linked",
    "index-written",
    "reserved",
    "launched",
    "bundle-written",
    "bundle-replaced",
    "before-exec",
];

/// Places that the createRuntime hook passes.
const OF_ACTIVATION: &[&str] = &[
    "registry-locked",
    "index-dropped",
    "record-written",
    "record-linked",
    "index-written",
    "hook-activated",
    "hook-isolated",
];

/// Places that the poststop hook, and a command that collects, passes.
const OF_RELEASE: &[&str] =
    &["registry-locked", "hook-deactivated", "index-dropped", "record-removed", "index-written"];

/// Places that a check for exited containers passes.
const OF_CHECK: &[&str] = &["state-read", "holder-asked"];

#[track_caller]
fn was_killed(outcome: &Outcome, place: &str) {
    assert_eq!(outcome.status.signal(), Some(9), "{place} was not reached: {outcome}");
}

/// Both backends: with `none` there's nothing but records, with `km` the stand-in's tree
/// has to be empty as well when nothing is registered.
fn with_each_backend(test: impl Fn(&Host, &dyn Fn())) {
    test(&Host::new(), &|| {});
    let standin = StandIn::mount(&[0]);
    let mut host = Host::new();
    host.use_km(standin.path());
    test(&host, &|| assert_eq!(standin.instances(0), [""; 0], "instances without an owner"));
}

/// That `config.json` is `old`, or the one with our hooks, and whole; and that at most
/// one more file lies next to it, whatever number of crashes there were.
#[track_caller]
fn check_bundle(bundle: &Bundle, old: &[u8], place: &str) {
    let now = fs::read(bundle.directory.join("config.json")).unwrap();
    if now != old {
        let config: serde_json::Value = serde_json::from_slice(&now).unwrap();
        assert_eq!(config["hooks"]["poststop"].as_array().map(Vec::len), Some(1), "{place}");
    }
    let beside: Vec<_> =
        names(&bundle.directory).into_iter().filter(|name| name.contains(".cgpu")).collect();
    assert!(beside.len() <= 1, "{place}: files pile up: {beside:?}");
}

#[test]
fn every_place_is_tried_here() {
    let tried = [OF_CREATE, OF_ACTIVATION, OF_RELEASE, OF_CHECK].concat();
    for place in failpoint::ALL {
        assert!(tried.contains(place), "no crash at {place}");
    }
}

#[test]
fn runtime_killed_anywhere_disturbs_no_later_runtime() {
    with_each_backend(|host, nothing_is_isolated| {
        for place in OF_CREATE {
            let bundle = host.asking(&format!("at-{place}"), TOTAL_MIB / 2 + 1);
            let old = fs::read(bundle.directory.join("config.json")).unwrap();
            for _ in 0..3 {
                was_killed(&host.dying_runtime(place).create(&bundle), place);
                check_bundle(&bundle, &old, place);
                host.check_registry();
            }
            assert_eq!(host.registered(), [].into(), "{place}");
            host.whole_gpu_can_be_had(&format!("after-{place}"));
            nothing_is_isolated();
            // The same bundle once more, as an engine tries again.
            let runtime = host.runtime();
            runtime.create(&bundle).ok();
            let beside = names(&bundle.directory);
            assert!(!beside.iter().any(|name| name.contains(".cgpu")), "{place}: {beside:?}");
            runtime.delete(&bundle).ok();
            nothing_is_isolated();
            assert_eq!(host.records(), [].into(), "{place}");
        }
    });
}

#[test]
fn hook_killed_anywhere_fails_creation_without_leftovers() {
    let failing = |host: &Host, name: &str, real: &str, place: &str| {
        // Only our hooks are written without white space.
        let script = format!(
            "#!/bin/sh\nfor word; do [ \"$word\" = create ] && sed -i \
             's#\"env\":\\[\"PATH=#\"env\":[\"{}={place}\",\"PATH=#' config.json; done\n\
             exec {real} \"$@\"\n",
            failpoint::VARIABLE
        );
        host.scratch.script(name, &script)
    };
    for real in ["runc", "crun"] {
        let standin = StandIn::mount(&[0]);
        let mut host = Host::new();
        host.use_km(standin.path());
        let program = match real {
            "runc" => program("runc"),
            _ => host.scratch.crun_program(),
        };
        for place in OF_ACTIVATION {
            let script =
                failing(&host, &format!("{real}-{place}"), &program.to_string_lossy(), place);
            host.wrap(script);
            let bundle = host.asking(&format!("{real}-at-{place}"), TOTAL_MIB);
            let killed = host.runtime().create(&bundle).fails();
            // runc's and crun's words for a hook that died of SIGKILL.
            let said = ["signal: killed", "exit code: 137", "exited with status 137"];
            assert!(said.iter().any(|said| killed.stderr.contains(said)), "{place}: {killed}");
            let written = fs::read_to_string(bundle.directory.join("config.json")).unwrap();
            assert!(written.contains(place), "the variable did not get through: {written}");
            host.check_registry();
            host.wrap(&program);
            host.whole_gpu_can_be_had(&format!("{real}-after-{place}"));
            assert_eq!(standin.instances(0), [""; 0], "{real} {place}");
            assert_eq!(host.records(), [].into(), "{real} {place}");
        }
    }
}

/// A hook killed anywhere in an activation can be called again.
#[test]
fn hook_killed_during_activation_can_be_called_again() {
    with_each_backend(|host, nothing_is_isolated| {
        for place in OF_ACTIVATION {
            let bundle = host.asking(&format!("at-{place}"), TOTAL_MIB);
            let init = host.sleeper();
            let reported = state(&bundle.id, init.pid(), &bundle.directory);
            was_killed(&host.hook_dying(&["createRuntime"], &reported, place), place);
            host.check_registry();
            host.hook(&["createRuntime"], &reported).ok();
            assert_eq!(host.promised_mib(), TOTAL_MIB, "{place}");
            assert_eq!(host.ps()[0]["state"], "active", "{place}");
            host.hook(&["poststop"], &reported).ok();
            nothing_is_isolated();
            assert_eq!(host.records(), [].into(), "{place}");
        }
    });
}

/// A hook that was killed in between, and the same if `cgpu ps` is called.
#[test]
fn isolation_is_on_wherever_a_container_is_active() {
    let standin = StandIn::mount(&[0]);
    let mut host = Host::new();
    host.use_km(standin.path());
    for place in OF_ACTIVATION {
        let bundle = host.asking(&format!("at-{place}"), TOTAL_MIB);
        let init = host.sleeper();
        let reported = state(&bundle.id, init.pid(), &bundle.directory);
        was_killed(&host.hook_dying(&["createRuntime"], &reported, place), place);
        let active = host.ps().iter().any(|container| container["state"] == "active");
        let isolated = standin.instances(0).len() == 1
            && standin.instance(0, &standin.instances(0)[0], "memsize") == TOTAL_MIB << 20;
        assert!(isolated || !active, "{place}: active, and nothing holds it to its quota");
        drop(init);
        host.gc();
        assert_eq!(standin.instances(0), [""; 0], "{place}");
    }
}

#[test]
fn release_killed_anywhere_is_finished_by_the_next() {
    with_each_backend(|host, nothing_is_isolated| {
        for place in OF_RELEASE {
            let bundle = host.asking(&format!("at-{place}"), TOTAL_MIB);
            let runtime = host.runtime();
            runtime.create(&bundle).ok();
            runtime.kill(&bundle, "KILL").ok();
            assert!(wait_until(timeout(), || runtime.status(&bundle) == "stopped"));
            let words = host.key_words(&bundle.id);
            let words: Vec<&str> =
                std::iter::once("poststop").chain(words.iter().map(String::as_str)).collect();
            let reported = state(&bundle.id, 0, &bundle.directory);
            was_killed(&host.hook_dying(&words, &reported, place), place);
            host.check_registry();
            // The runtime's own call, which comes after.
            runtime.delete(&bundle).ok();
            nothing_is_isolated();
            host.whole_gpu_can_be_had(&format!("after-{place}"));
        }
    });
}

#[test]
fn collection_killed_anywhere_is_finished_by_next_creation() {
    with_each_backend(|host, nothing_is_isolated| {
        for place in OF_RELEASE {
            let bundle = host.asking(&format!("at-{place}"), TOTAL_MIB);
            let init = host.sleeper();
            let reported = state(&bundle.id, init.pid(), &bundle.directory);
            host.hook(&["createRuntime"], &reported).ok();
            drop(init);
            let other = host.asking(&format!("killed-{place}"), 1);
            was_killed(&host.dying_runtime(place).create(&other), place);
            host.check_registry();
            host.whole_gpu_can_be_had(&format!("after-{place}"));
            nothing_is_isolated();
        }
    });
}

/// A check by ps or gc that is killed anywhere changes nothing.
#[test]
fn check_killed_anywhere_changes_nothing() {
    let host = Host::new();
    let bundle = host.asking("looked-for", TOTAL_MIB);
    host.runtime().create(&bundle).ok();
    let (records, containers) = (host.records(), host.ps());
    for place in OF_CHECK {
        for verb in ["ps", "gc"] {
            let mut command = host
                .scratch
                .command(crate::support::sibling(env!("CARGO_BIN_EXE_cgpu-runtime"), "cgpu"));
            command.arg("--config").arg(host.config()).arg(verb);
            command.env(failpoint::VARIABLE, place);
            was_killed(&run_with_timeout(&mut command, timeout()), place);
            host.check_registry();
            assert_eq!((host.records(), host.ps()), (records.clone(), containers.clone()));
        }
    }
    host.runtime().delete(&bundle).ok();
}

/// A precreate, or its hook, that is killed anywhere reserves nothing twice.
#[test]
fn killed_precreate_or_hook_reserves_nothing_twice() {
    // Of `rename`, too: the reservation gets the container's key.
    for place in ["record-written", "record-linked", "record-removed", "index-written"] {
        let standin = StandIn::mount(&[0]);
        let mut host = Host::new();
        host.use_km(standin.path());
        let bundle = host.asking("announced", TOTAL_MIB / 2);
        let config = fs::read(bundle.directory.join("config.json")).unwrap();
        let edited = host.hook(&["precreate"], config).ok().json();
        let token = edited["hooks"]["createRuntime"][0]["args"][3].as_str().unwrap().to_owned();
        let init = host.sleeper();
        let reported = state(&bundle.id, init.pid(), &bundle.directory);
        let words = ["createRuntime", "--reservation", &token];
        was_killed(&host.hook_dying(&words, &reported, place), place);
        host.check_registry();
        assert!(host.promised_mib() <= TOTAL_MIB / 2, "{place}: {:?}", host.ps());
        // Called again, it is active; what is left of the token then takes nothing away.
        host.hook(&words, &reported).ok();
        assert_eq!(host.promised_mib(), TOTAL_MIB / 2, "{place}");
        for record in host.records() {
            if record.starts_with("precreate") {
                host.edit_record("precreate", |record| record["holder"]["until_boot_s"] = 0.into());
            }
        }
        host.gc();
        assert_eq!(standin.instances(0).len(), 1, "{place}: its isolation was ended");
        drop(init);
        host.hook(&["poststop", "--reservation", &token], &reported).ok();
        assert_eq!(host.records(), [].into(), "{place}");
        assert_eq!(standin.instances(0), [""; 0], "{place}");
    }
}
