//! Processes that retain a driver's client whose creator has exited, and with it memory.

use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::gated::{Gated, NO_MEMORY};
use crate::host::ask;
use crate::support::{Bundle, eventually};

/// What the log says of them.
const WHY: &str = "killed: it kept GPU memory of a process that has ended";

/// A script that takes 200 MiB and ends, while a child that it forked before goes on by another.
fn leaves(child: &[&'static str]) -> Vec<&'static str> {
    let before = ["run", "start", "alloc 200MiB as a", "fork {", "session", "quiet"];
    [&before, child, &["sleep 1000", "}", "exit"]].concat()
}

/// Events of processes that were killed: program and reason.
fn killed(gated: &Gated) -> Vec<(Value, Value)> {
    let reported = gated.host.cgpu(&["events", "--json"]).ok().stdout;
    let events =
        reported.lines().map(|line| serde_json::from_str::<Value>(line).expect("it is JSON"));
    let killed = events.filter(|event| event["kind"] == "killed");
    killed.map(|event| (event["program"].clone(), event["reason"].clone())).collect()
}

/// That what the script leaves is gone soon, and so many processes are killed for it.
#[track_caller]
fn is_ended(gated: &Gated, bundle: &Bundle, child: &[&'static str], count: usize, others_mib: u64) {
    let before = killed(gated).len();
    gated.exec(bundle, &leaves(child)).ok();
    gated.soon_uses(others_mib);
    gated.soon_accounts(&bundle.id, others_mib);
    let reported = || killed(gated).split_off(before);
    assert!(eventually(|| reported().len() >= count), "{:?}: {}", reported(), gated.host.log());
    assert_eq!(reported(), vec![(json!("rmtool"), json!(WHY)); count], "{}", gated.host.log());
}

fn end(gated: &Gated, all: &[&Bundle]) {
    for bundle in all {
        gated.host.runtime().kill(bundle, "KILL").ok();
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
}

/// A process that has memory and a child that inherited its files, until a file is there.
fn innocent(gated: &Gated, bundle: &Bundle) -> Child {
    let script =
        ["run", "start", "alloc 100MiB as a", "fork {", "wait /end", "}", "wait /end", "free a"];
    let child = gated.start(bundle, &script);
    gated.soon_accounts(&bundle.id, 100);
    child
}

/// A process that retains memory of an exited process is killed, and the log says why.
#[test]
fn process_retaining_inherited_client_memory_is_killed() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 500);
    let innocent = innocent(&gated, &bundle);
    // One that never called, and one that did.
    is_ended(&gated, &bundle, &[], 1, 100);
    is_ended(&gated, &bundle, &["alloc 50MiB as b"], 1, 100);
    let log = gated.host.log();
    assert!(log.lines().any(|line| line.contains(&format!(" WARN {WHY}"))), "{log}");
    gated.host.runtime().exec(&bundle, &["touch", "/end"]).ok();
    let output = innocent.wait_with_output().expect("it is a child of ours");
    assert!(output.status.success(), "another process and its child were left alone: {output:?}");
    end(&gated, &[&bundle]);
}

/// A client without memory outlives its creator, as a daemon's that asks what GPUs there are. No process is
/// killed for it, and the monitor doesn't ask the driver more often than at any other time.
#[test]
fn inherited_client_without_memory_is_left_alone() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 500);
    let script =
        ["run", "start", "fork {", "session", "quiet", "touch /there", "wait /end", "}", "exit"];
    gated.exec(&bundle, &script).ok();
    let at = |name: &str| gated.host.scratch.path().join("template/rootfs").join(name);
    assert!(eventually(|| at("there").exists()));
    let calls = || gated.sim.state().calls.values().sum::<u64>();
    // Longer than a process that retains memory may live.
    std::thread::sleep(Duration::from_secs(6));
    let (before, since) = (calls(), Instant::now());
    std::thread::sleep(Duration::from_secs(2));
    let (made, seconds) = (calls() - before, since.elapsed().as_secs_f64());
    #[allow(clippy::cast_precision_loss, reason = "it is small")]
    let rate = made as f64 / seconds;
    assert!(rate < 300.0, "{made} calls in {seconds} s");
    assert_eq!(killed(&gated), [], "{}", gated.host.log());
    assert_eq!(gated.sim.state().clients.len(), 2, "that one and the monitor's");
    end(&gated, &[&bundle]);
}

/// Once it has memory, its holder ends.
#[test]
fn process_allocating_through_inherited_client_is_killed() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 500);
    let script = [
        "run",
        "start",
        "fork {",
        "session",
        "quiet",
        "wait /take",
        "alloc 50MiB as b",
        "sleep 1000",
        "}",
        "exit",
    ];
    gated.exec(&bundle, &script).ok();
    gated.host.runtime().exec(&bundle, &["touch", "/take"]).ok();
    assert!(eventually(|| !killed(&gated).is_empty()), "{}", gated.host.log());
    assert_eq!(killed(&gated), [(json!("rmtool"), json!(WHY))]);
    gated.soon_uses(0);
    end(&gated, &[&bundle]);
}

/// No process can be found that has it: so all are killed that made a call.
#[test]
fn driver_file_in_socket_ends_with_its_callers() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 500);
    is_ended(&gated, &bundle, &["alloc 50MiB as b", "close-into-a-socket"], 1, 0);
    end(&gated, &[&bundle]);
}

/// A container that may choose the ids of its processes, on the host too.
fn choosing(gated: &Gated, id: &str, mib: u64) -> Bundle {
    let bundle = gated.bundle_with(id, |config| {
        ask(config, mib);
        config["process"]["args"] = json!(["sleep", "1000"]);
        for (_, set) in config["process"]["capabilities"].as_object_mut().expect("it has some") {
            let set: &mut Vec<Value> = set.as_array_mut().expect("capabilities are a list");
            set.push("CAP_SYS_ADMIN".into());
        }
    });
    let runtime = gated.host.runtime();
    runtime.create(&bundle).ok();
    runtime.start(&bundle).ok();
    bundle
}

/// The number of the process that has memory of the first GPU.
fn number(gated: &Gated) -> Option<u32> {
    let gpus = gated.sim.state().gpus;
    gpus[0].processes.iter().find(|(_, bytes)| **bytes > 0).map(|(number, _)| *number)
}

/// A process is charged nothing for an earlier one that had its id.
#[test]
fn reused_process_id_inherits_no_charge() {
    let gated = Gated::new();
    let other = gated.sleeping("other", 500);
    let mut creator = gated.start(&other, &["run", "start", "alloc 200MiB as a", "wait /end"]);
    gated.soon_accounts("other", 200);
    let number = number(&gated).expect("it has some");
    gated.host.runtime().exec(&other, &["touch", "/end"]).ok();
    creator.wait().expect("it is a child of ours");
    // The driver has it a little longer than the process is there.
    gated.soon_uses(0);
    let bundle = choosing(&gated, "app", 500);
    let first = format!("fork-as {number} {{");
    let script = ["run", &first, "start", "alloc 500MiB as a", "sleep 2", "alloc 1MiB as b", "}"];
    let said = gated.exec(&bundle, &script).fails();
    for line in ["alloc a ok", &format!("alloc b {NO_MEMORY}")] {
        assert!(said.stdout.contains(line), "no {line:?} in {said}\n{}", gated.host.log());
    }
    gated.soon_uses(0);
    end(&gated, &[&bundle, &other]);
}
