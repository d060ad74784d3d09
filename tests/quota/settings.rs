//! What is set of GPUs and of running containers: applied at once, retained, and refused if nothing
//! would enforce it.

use std::fs;

use serde_json::json;

use crate::gated::{Gated, MIB};
use crate::host::ask;
use crate::support::{Outcome, eventually};

fn set(gated: &Gated, words: &[&str]) -> Outcome {
    gated.host.cgpu(&[&["set"], words].concat())
}

fn get(gated: &Gated, words: &[&str]) -> String {
    gated.host.cgpu(&[&["get"], words].concat()).ok().stdout
}

#[test]
fn gpu_settings_apply_from_next_creation_and_persist() {
    let gated = Gated::new();
    let first = gated.sleeping("first", 1000);
    let said = set(&gated, &["gpu", "0", "max_inst=1"]).ok();
    assert_eq!(said.text(), "GPU 0: policy=1 max_inst=1 prio_ratio=80");
    let refused = gated.host.runtime().create(&gated.bundle("second", 1000, &["true"])).exits(1);
    assert!(refused.stderr.contains("as many as max_inst = 1 allows"), "{refused}");
    assert!(refused.stderr.contains("`cgpu set gpu 0 max_inst=N`"), "{refused}");
    // Another GPU's is another.
    assert_eq!(get(&gated, &["gpu", "1", "max_inst"]), "20\n");
    assert_eq!(get(&gated, &["gpu", "0", "max_inst"]), "1\n");
    assert_eq!(get(&gated, &["gpu", "0", "free_weight"]), "0\n");
    // By UUID, too; and no lower than what is there.
    let uuid = gated.sim.state().gpus[0].uuid.clone();
    set(&gated, &["gpu", &uuid, "max_inst=2"]).ok();
    let second = gated.sleeping("second", 1000);
    let refused = set(&gated, &["gpu", "0", "max_inst=1"]).exits(1);
    assert!(refused.stderr.contains("GPU 0 has 2 containers with a quota"), "{refused}");
    assert_eq!(get(&gated, &["gpu", "0", "max_inst"]), "2\n");
    let events = gated.host.cgpu(&["events"]).ok().stdout;
    assert!(events.lines().any(|line| line.ends_with(" -: GPU 0: max_inst=2")), "{events}");
    // Fixed parts are no more than there are, and what is there can be said again.
    set(&gated, &["gpu", "0", "policy=3"]).ok();
    let refused = set(&gated, &["container", "first", "weight=2"]).exits(1);
    assert!(refused.stderr.contains("has weight 1 of 2 left"), "{refused}");
    set(&gated, &["container", "first", "weight=1", "memory=900MiB"]).ok();
    set(&gated, &["gpu", "0", "policy=5", "prio_ratio=80"]).ok();
    for (words, part) in [
        (&["gpu", "7", "policy=5"][..], "this host has no GPU 7"),
        (&["gpu", "0", "max_inst=26"], "max_inst is a number from 1 to 25"),
        (&["gpu", "0", "max_inst"], "max_inst: write it as key=value"),
        (&["gpu", "0"], "nothing to change"),
        (&["container", "first", "colour=1"], "a container has no setting colour"),
        (&["container", "first", "memory=1", "--memory", "2"], "not as both"),
        (&["first", "second"], "write `cgpu set gpu GPU key=value`"),
    ] {
        let refused = set(&gated, words).exits(1);
        assert!(refused.stderr.contains(part), "{part}: {refused}");
    }
    // Settings that can't be read promise nothing to anybody.
    let file = gated.host.state_dir().join("gpus");
    let retained = fs::read(&file).unwrap();
    fs::write(&file, "{").unwrap();
    let refused = gated.host.runtime().create(&gated.bundle("third", 1000, &["true"])).exits(1);
    assert!(refused.stderr.contains("remove the file to go by the configuration again"));
    fs::write(&file, retained).unwrap();
    for bundle in [&first, &second] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
    assert_eq!(get(&gated, &["gpu", "0", "max_inst"]), "2\n", "no container is there any more");
}

#[test]
fn container_settings_share_names_for_get_and_set() {
    let gated = Gated::new();
    let bundle = gated.bundle_with("both", |config| {
        ask(config, 1000);
        let env = config["process"]["env"].as_array_mut().unwrap();
        env.retain(|variable| !variable.as_str().unwrap().starts_with("NVIDIA_VISIBLE"));
        env.push(json!("NVIDIA_VISIBLE_DEVICES=0,1"));
        config["process"]["args"] = json!(["sleep", "1000"]);
    });
    gated.host.runtime().create(&bundle).ok();
    gated.host.runtime().start(&bundle).ok();
    let mut all = String::new();
    eventually(|| {
        all = get(&gated, &["container", "both"]);
        all.contains("state=active")
    });
    assert_eq!(
        all,
        "memory@0=1000MiB\nmemory_used@0=0MiB\nmemory@1=1000MiB\nmemory_used@1=0MiB\nweight=1\n\
         high-priority=0\nstate=active\nenforced=1\n"
    );
    set(&gated, &["container", "both", "memory@1=2GiB"]).ok();
    assert_eq!(get(&gated, &["container", "both", "memory@1"]), "2048MiB\n");
    assert_eq!(gated.host.limits_mib("both"), [1000, 2048]);
    let refused = set(&gated, &["container", "both", "memory=2GiB"]).exits(1);
    assert!(refused.stderr.contains("which one"), "{refused}");
    let refused = gated.host.cgpu(&["get", "container", "both", "colour"]).exits(1);
    assert!(refused.stderr.contains("there is no figure colour; there are memory@0"), "{refused}");
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

#[test]
fn a_quota_that_changes_under_load_applies_immediately() {
    let gated = Gated::new();
    let line = "while :; do /rmtool fill >/dev/null; done";
    let bundle = gated.bundle("loaded", 1000, &["sh", "-c", line]);
    gated.host.runtime().create(&bundle).ok();
    gated.host.runtime().start(&bundle).ok();
    let (mut lowered, mut refusals) = (0, 0);
    // Between two fills nothing is in use, and then the quota can be lowered.
    let soon = eventually(|| {
        set(&gated, &["container", "loaded", "memory=1000MiB"]).ok();
        let outcome = set(&gated, &["container", "loaded", "memory=300MiB"]);
        if !outcome.status.success() {
            assert!(outcome.stderr.contains("bytes are in use"), "{outcome}");
            refusals += 1;
            assert!(gated.used_bytes(0) <= 1000 * MIB, "the larger of both holds");
            return false;
        }
        lowered += 1;
        // It is asked for more all the time.
        for _ in 0..200 {
            let used_bytes = gated.used_bytes(0);
            assert!(used_bytes <= 300 * MIB, "{used_bytes}");
        }
        lowered >= 10
    });
    assert!(soon, "{lowered} times lowered, {refusals} times refused: {}", gated.host.log());
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}
