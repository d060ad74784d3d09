//! Shares of computing time, in real containers: what `cgpu set` says, the driver has.
//!
//! What a slice comes to on a GPU, `make gpu` asks a real one (`tests/gpu`).

use std::fs;
use std::ops::Range;
use std::time::{Duration, Instant};

use cgpu_host::registry::share;
use cgpu_sim::ObjectState;
use cgpu_sim::abi::KEPLER_CHANNEL_GROUP_A;
use nix::sys::signal::{Signal, kill};
use serde_json::json;

use crate::gated::{Gated, RMTOOL};
use crate::host::ask;
use crate::support::{Bundle, Outcome, eventually};

/// A container that sleeps, with these variables next to its quota.
fn container(gated: &Gated, id: &str, variables: &[&str]) -> Bundle {
    let bundle = gated.bundle_with(id, |config| {
        ask(config, 1000);
        let env = config["process"]["env"].as_array_mut().expect("variables are a list");
        env.extend(variables.iter().map(|variable| json!(variable)));
        config["process"]["args"] = json!(["sleep", "1000"]);
    });
    let runtime = gated.host.runtime();
    runtime.create(&bundle).ok();
    runtime.start(&bundle).ok();
    bundle
}

/// Runs a program in a container that has a channel group of the graphics engine and asks for a slice of
/// 2048 µs, as CUDA does.
fn compute(gated: &Gated, bundle: &Bundle) {
    run(gated, bundle, &["compute 1 as g", "control g 0xa06c0103 with 0008000000000000"]);
}

/// The same with kernels of 0.5 ms, for ever.
fn compute_for_ever(gated: &Gated, bundle: &Bundle) {
    run(gated, bundle, &["compute 1 as g", "compute-mode g 2", "kernels g 100000000 of 500"]);
}

fn run(gated: &Gated, bundle: &Bundle, lines: &[&str]) {
    let before = slices(gated).len();
    let script = [&["start"], lines, &["sleep 1000"]].concat();
    let words = [&["exec", "--detach", &bundle.id, RMTOOL, "run"], &script[..]].concat();
    let mut command = gated.host.runtime().command();
    command.args(words).stdin(std::process::Stdio::null()).stdout(std::process::Stdio::null());
    assert!(command.status().expect("the runtime can be started").success());
    assert!(eventually(|| slices(gated).len() > before), "{}", gated.host.log());
}

/// The slices of all channel groups on the first GPU, in order.
fn slices(gated: &Gated) -> Vec<u64> {
    let clients = gated.sim.state().clients;
    let objects = clients.into_iter().flat_map(|client| client.objects);
    let is_group = |object: &ObjectState| object.class == KEPLER_CHANNEL_GROUP_A;
    let mut slices: Vec<u64> = objects.filter(is_group).map(|object| object.timeslice_us).collect();
    slices.sort_unstable();
    slices
}

#[track_caller]
fn soon(gated: &Gated, expected: &[u64], after: &str) {
    let are = eventually(|| slices(gated) == expected);
    assert!(are, "{after}: {:?}, not {expected:?}: {}", slices(gated), gated.host.log());
}

#[track_caller]
fn set(gated: &Gated, words: &[&str]) {
    gated.host.cgpu(&[&["set"], words].concat()).ok();
}

fn policy(gated: &Gated) -> String {
    gated.host.cgpu(&["get", "gpu", "0", "policy"]).ok().text().to_owned()
}

#[test]
fn gpu_and_container_settings_apply_while_computing() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    let one = container(&gated, "one", &[]);
    compute(&gated, &one);
    soon(&gated, &[4096], "alike, if nothing is set");
    assert_eq!(policy(&gated), "1");
    // A weight selects weights, if nothing is set.
    let two = container(&gated, "two", &["ALIYUN_COM_GPU_SCHD_WEIGHT=2"]);
    compute(&gated, &two);
    soon(&gated, &[3200, 6400], "a container of weight 2 came");
    assert_eq!(policy(&gated), "2");
    set(&gated, &["container", "two", "weight=6"]);
    soon(&gated, &[3200, 19200], "weight=6");
    set(&gated, &["gpu", "0", "policy=1"]);
    soon(&gated, &[4096, 4096], "policy=1");
    set(&gated, &["container", "one", "high-priority=1"]);
    soon(&gated, &[4096, 16384], "high priority of 80 %");
    set(&gated, &["gpu", "0", "prio_ratio=60"]);
    soon(&gated, &[4096, 6144], "high priority of 60 %");
    set(&gated, &["container", "one", "high-priority=0"]);
    soon(&gated, &[4096, 4096], "no priority");
    // Two programs of a container share what one had.
    compute(&gated, &one);
    soon(&gated, &[1923, 1923, 4096], "another program of the same container");
    set(&gated, &["gpu", "0", "policy=4"]);
    soon(&gated, &[4096, 4096, 4096], "policy=4");
    set(&gated, &["gpu", "0", "policy=5"]);
    soon(&gated, &[2048, 2048, 2048], "policy=5");
    set(&gated, &["gpu", "0", "policy=2"]);
    soon(&gated, &[1475, 1475, 19200], "policy=2");
    // Monitors that are replaced go on, also if no shares have been reported yet, as before an upgrade.
    let file = share::dir(&gated.host.state_dir()).join(&gated.sim.state().gpus[0].uuid);
    let said = fs::read(&file).expect("it is there");
    fs::remove_file(&file).expect("it is ours");
    gated.host.cgpu(&["upgrade-monitors"]).ok();
    assert_eq!(fs::read(&file).expect("it is there again"), said);
    soon(&gated, &[1475, 1475, 19200], "monitors were replaced");
    set(&gated, &["container", "two", "weight=3"]);
    soon(&gated, &[1475, 1475, 9600], "weight=3");
    runtime.delete(&two).ok();
    soon(&gated, &[1923, 1923], "the other is gone");
    runtime.delete(&one).ok();
    gated.soon_is_empty();
}

/// Weights are relative and keep no container out; a request that its GPU's policy doesn't enforce is reported once.
#[test]
fn unenforced_share_is_reported_and_weights_admit_all() {
    let gated = Gated::new();
    let heavy = ["ALIYUN_COM_GPU_SCHD_WEIGHT=15", "ALIYUN_COM_GPU_HIGH_PRIO=1"];
    let one = container(&gated, "one", &heavy);
    let more = container(&gated, "more", &heavy[..1]);
    assert!(!gated.host.log().contains("nothing holds"), "{}", gated.host.log());
    set(&gated, &["gpu", "0", "policy=5"]);
    let two = container(&gated, "two", &["ALIYUN_COM_GPU_SCHD_WEIGHT=4"]);
    let log = gated.host.log();
    let reported =
        |line: &&str| line.contains("id=\"two\"") && line.contains("nothing holds its weight 4");
    assert_eq!(log.lines().filter(reported).count(), 1, "{log}");
    let shown = gated.host.cgpu(&["inspect", "-b", two.directory.to_str().expect("UTF-8")]).ok();
    assert!(shown.stdout.contains("weight 4, priority normal (not held on these GPUs)"), "{shown}");
    for bundle in [&one, &more, &two] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
}

/// A driver that sets no slices, as those of virtual GPUs: a request for a share gets an error with its status, and
/// the rest goes on as under policy 5.
#[test]
fn share_request_reports_driver_without_time_slices() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    gated.sim.fault("control:0xa06c0103 status 0x56".parse().expect("a fault"));
    let says_status = |refused: &Outcome, status: &str, of: &str| {
        let parts =
            ["can't share the computing time of GPU 0", "SET_TIMESLICE", status, "policy=5"];
        for part in parts {
            assert!(refused.stderr.contains(part), "{of}: {part}: {refused}");
        }
    };
    let says = |refused: &Outcome, of: &str| says_status(refused, "0x56", of);
    says(&gated.host.cgpu(&["set", "gpu", "0", "policy=2"]).fails(), "policy=2");
    assert_eq!(policy(&gated), "1", "it is what it was");
    let heavy = gated.bundle_with("heavy", |config| {
        ask(config, 1000);
        let env = config["process"]["env"].as_array_mut().expect("variables are a list");
        env.push(json!("ALIYUN_COM_GPU_SCHD_WEIGHT=2"));
    });
    says(&runtime.create(&heavy).fails(), "a create");
    let plain = container(&gated, "plain", &[]);
    for words in ["weight=2", "high-priority=1"] {
        says(&gated.host.cgpu(&["set", "container", "plain", words]).fails(), words);
    }
    set(&gated, &["container", "plain", "weight=1"]);
    set(&gated, &["gpu", "0", "policy=5"]);
    set(&gated, &["gpu", "0", "max_inst=10"]);
    run(&gated, &plain, &["compute 1 as g"]);
    soon(&gated, &[1024], "the driver's own slice");
    // It is asked once a boot: what it answers later is not read.
    gated.sim.fault("clear".parse().expect("a fault"));
    says(&gated.host.cgpu(&["set", "gpu", "0", "policy=2"]).fails(), "asked again");
    fs::remove_file(gated.host.state_dir().join("slices-tried")).expect("it is there");
    // A status that may pass is reported, and not remembered.
    gated.sim.fault("control:0xa06c0103 status 0x65".parse().expect("a fault"));
    let busy = gated.host.cgpu(&["set", "gpu", "0", "policy=2"]).fails();
    says_status(&busy, "0x65", "a timeout");
    gated.sim.fault("clear".parse().expect("a fault"));
    set(&gated, &["gpu", "0", "policy=2"]);
    soon(&gated, &[4096], "another boot");
    runtime.delete(&plain).ok();
    gated.soon_is_empty();
}

/// Under the default policy no container asked for a share: the container goes on without one, and none is shown.
#[test]
fn share_the_driver_cannot_enforce_is_not_shown() {
    let gated = Gated::new();
    gated.sim.fault("control:0xa06c0103 status 0x56".parse().expect("a fault"));
    let plain = container(&gated, "plain", &[]);
    let share = || {
        let shown = gated.host.cgpu(&["ps"]).ok().stdout;
        let row = shown.lines().find(|row| row.starts_with("plain ")).map(str::to_owned);
        row.and_then(|row| row.split_whitespace().nth(5).map(str::to_owned))
    };
    assert_eq!(share().as_deref(), Some("100%"), "nothing is known of the driver yet");
    compute(&gated, &plain);
    assert!(eventually(|| share().as_deref() == Some("-")), "{:?}", share());
    let is_reported = || gated.host.log().contains("a share of computing time can't be held");
    assert!(eventually(is_reported), "{}", gated.host.log());
    gated.host.runtime().delete(&plain).ok();
    gated.soon_is_empty();
}

/// For how many microseconds the kernels of each program have run, in the order in which they came.
fn busy_us(gated: &Gated) -> Vec<u64> {
    let clients = gated.sim.state().clients;
    let objects = clients.into_iter().flat_map(|client| client.objects);
    let is_group = |object: &ObjectState| object.class == KEPLER_CHANNEL_GROUP_A;
    objects.filter(is_group).map(|object| object.busy_us).collect()
}

/// Waits for a second in which each program has so many per cent of the GPU, give or take two: in any
/// other, monitors or this test may have come late.
#[track_caller]
fn soon_share(gated: &Gated, expected: &[u128], after: &str) {
    let mut last = Vec::new();
    let have = eventually(|| {
        let (begun, before) = (Instant::now(), busy_us(gated));
        std::thread::sleep(Duration::from_secs(1));
        let now = busy_us(gated);
        let elapsed_us = begun.elapsed().as_micros();
        let ran = now.iter().zip(&before).map(|(now, before)| u128::from(now - before));
        last = ran.map(|busy_us| (100 * busy_us + elapsed_us / 2) / elapsed_us).collect();
        last.len() == expected.len()
            && last.iter().zip(expected).all(|(has, expected)| has.abs_diff(*expected) <= 2)
    });
    assert!(have, "{after}: {last:?} per cent, not {expected:?}: {}", gated.host.log());
}

/// Waits until `cgpu ps` shows for each container, by its name in the table, the share that is its own, and that
/// it had one of so many per cent lately: the driver's samples reach back 14 seconds.
#[track_caller]
fn soon_shown(gated: &Gated, expected: &[(&str, &str, Range<u32>)]) {
    let mut last = String::new();
    let shows = eventually(|| {
        last = gated.host.cgpu(&["ps"]).ok().stdout;
        expected.iter().all(|(id, share, held)| {
            let mut rows = last.lines().map(|row| row.split_whitespace().collect::<Vec<_>>());
            let row = rows.find(|row| row.first() == Some(id)).unwrap_or_default();
            let shown = row.get(6).and_then(|held| held.strip_suffix('%')?.parse().ok());
            row.get(5) == Some(share) && shown.is_some_and(|shown| held.contains(&shown))
        })
    });
    assert!(shows, "{last}");
}

/// Each policy as the simulated GPU, which divides as an H100 was seen to, divides between two containers
/// that always have work.
#[test]
fn each_policy_gives_containers_what_it_promises() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    let (one, two) = (container(&gated, "one", &[]), container(&gated, "two", &[]));
    compute_for_ever(&gated, &one);
    soon_share(&gated, &[100], "alone");
    compute_for_ever(&gated, &two);
    soon_share(&gated, &[47, 47], "alike");
    set(&gated, &["container", "two", "weight=3"]);
    soon_share(&gated, &[24, 73], "a weight selects policy 2");
    soon_shown(&gated, &[("one", "25%", 20..31), ("two", "75%", 65..80)]);
    set(&gated, &["gpu", "0", "max_inst=4"]);
    set(&gated, &["gpu", "0", "policy=3"]);
    soon_share(&gated, &[25, 75], "policy=3");
    set(&gated, &["container", "two", "weight=2"]);
    soon_share(&gated, &[25, 50], "a part that no container has stays empty");
    // No more than there is, for containers, weights and settings.
    let refused = |words: &[&str], why: &str| {
        let refused = gated.host.cgpu(&[&["set"], words].concat()).fails();
        assert!(refused.stderr.contains(why), "{refused}");
    };
    refused(&["container", "two", "weight=4"], "weight");
    refused(&["gpu", "0", "max_inst=2"], "max_inst=2");
    let third = gated.bundle_with("third", |config| {
        ask(config, 1000);
        let env = config["process"]["env"].as_array_mut().expect("variables are a list");
        env.push(json!("ALIYUN_COM_GPU_SCHD_WEIGHT=2"));
    });
    let create = runtime.create(&third).fails();
    assert!(create.stderr.contains("weight"), "{create}");
    set(&gated, &["gpu", "0", "policy=0"]);
    soon_share(&gated, &[25, 25], "policy=0");
    set(&gated, &["container", "two", "high-priority=1"]);
    soon_share(
        &gated,
        &[5, 94],
        "80 % against the container whose turn it is, and all of the rest",
    );
    set(&gated, &["container", "two", "high-priority=0"]);
    // Monitors that are replaced go on.
    gated.host.cgpu(&["upgrade-monitors"]).ok();
    set(&gated, &["gpu", "0", "max_inst=2"]);
    soon_share(&gated, &[50, 50], "max_inst=2");
    for (policy, shares) in [("policy=4", [47, 47]), ("policy=5", [45, 45])] {
        set(&gated, &["gpu", "0", policy]);
        soon_share(&gated, &shares, policy);
    }
    set(&gated, &["gpu", "0", "policy=0"]);
    runtime.delete(&two).ok();
    soon_share(&gated, &[50], "what was another's stays empty");
    set(&gated, &["gpu", "0", "policy=1"]);
    soon_share(&gated, &[100], "policy=1");
    // A container that the driver has seen nothing of for long has had nothing.
    let resting = container(&gated, "resting", &[]);
    soon_shown(&gated, &[("one", "50%", 90..101), ("resting", "50%", 0..1)]);
    runtime.delete(&resting).ok();
    runtime.delete(&one).ok();
    gated.soon_is_empty();
}

#[test]
fn idle_container_retains_its_time_if_configured() {
    let mut gated = Gated::new();
    gated.host.set("compute.idle", "keep");
    let (one, two) = (container(&gated, "one", &[]), container(&gated, "two", &[]));
    compute_for_ever(&gated, &one);
    soon_share(&gated, &[50], "policy 1: up to half, though the other rests");
    set(&gated, &["container", "two", "weight=3"]);
    soon_share(&gated, &[25], "policy 2: a fourth");
    compute_for_ever(&gated, &two);
    soon_share(&gated, &[25, 75], "policy 2, both");
    set(&gated, &["gpu", "0", "policy=4"]);
    soon_share(&gated, &[47, 47], "policy=4");
    for bundle in [&one, &two] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
}

/// If the monitor of a container is killed, the monitor of another on the same GPU serves its time windows, and if
/// that is killed, too, the next.
#[test]
fn time_windows_continue_for_unsupervised_containers() {
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    set(&gated, &["gpu", "0", "max_inst=4"]);
    set(&gated, &["gpu", "0", "policy=3"]);
    // The last one has nothing to do.
    let weights = [("one", 1), ("two", 1), ("three", 2)];
    let bundles = weights.map(|(id, weight)| {
        container(&gated, id, &[&format!("ALIYUN_COM_GPU_SCHD_WEIGHT={weight}")])
    });
    let [one, two, three] = &bundles;
    compute_for_ever(&gated, one);
    compute_for_ever(&gated, two);
    compute(&gated, three);
    soon_share(&gated, &[25, 25, 0], "all have their monitors");
    for (short_id, after) in
        [("one_________", "one has none"), ("two_________", "one and two have none")]
    {
        kill(gated.monitor(short_id), Signal::SIGKILL).expect("it is there");
        // Its neighbour on the GPU reports it.
        let id = short_id.trim_end_matches('_');
        let reported = || gated.host.cgpu(&["events", "--json", id]).ok().stdout;
        assert!(eventually(|| reported().contains("\"kind\":\"monitor_lost\"")), "{}", reported());
        soon_share(&gated, &[25, 25, 0], after);
    }
    // Where there are no turns any more they are on the GPU.
    set(&gated, &["gpu", "0", "policy=5"]);
    soon_share(&gated, &[45, 45, 0], "policy=5");
    set(&gated, &["gpu", "0", "policy=3"]);
    soon_share(&gated, &[25, 25, 0], "policy=3 again");
    for bundle in [one, two, three] {
        runtime.delete(bundle).ok();
    }
    gated.soon_is_empty();
}
