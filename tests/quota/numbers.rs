//! Processes whose numbers others had, of whom the driver still has memory.

use std::process::Child;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};

use crate::gated::{Gated, MIB, NO_MEMORY};
use crate::host::ask;
use crate::support::{Bundle, eventually};

/// Leaves memory to a child, and ends.
const LEAVES: [&str; 9] =
    ["run", "start", "alloc 200MiB as a", "fork {", "session", "quiet", "sleep 20", "}", "exit"];

/// The number of the dead who has so much of the first GPU.
fn dead(gated: &Gated, bytes: u64) -> Option<u32> {
    let gpus = gated.sim.state().gpus;
    let mut all = gpus[0].processes.iter().filter(|(_, has)| **has == bytes);
    all.find(|(number, _)| is_dead(**number)).map(|(number, _)| *number)
}

/// Another one.
fn dead_but(gated: &Gated, but: u32) -> Option<u32> {
    let gpus = gated.sim.state().gpus;
    let mut all = gpus[0].processes.iter().filter(|(number, has)| **number != but && **has > 0);
    all.find(|(number, _)| is_dead(**number)).map(|(number, _)| *number)
}

fn is_dead(number: u32) -> bool {
    !std::path::Path::new(&format!("/proc/{number}")).exists()
}

/// A container that sees the host's processes, and may choose their numbers.
fn choosing(gated: &Gated, id: &str, mib: u64) -> Bundle {
    let bundle = gated.bundle_with(id, |config| {
        ask(config, mib);
        config["process"]["args"] = json!(["sleep", "1000"]);
        let namespaces = config["linux"]["namespaces"].as_array_mut().expect("it has some");
        namespaces.retain(|namespace| namespace["type"] != "pid");
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

/// Another container that has left 200 MiB, and the number of the dead who made them.
fn left(gated: &Gated) -> (Bundle, u32) {
    left_by(gated, &LEAVES)
}

/// The same by that script.
fn left_by(gated: &Gated, script: &[&str]) -> (Bundle, u32) {
    let other = gated.sleeping("other", 500);
    gated.exec(&other, script).ok();
    let mut number = None;
    eventually(|| {
        number = dead(gated, 200 * MIB);
        number.is_some()
    });
    (other, number.unwrap_or_else(|| panic!("{:?}", gated.sim.state().gpus[0].processes)))
}

/// Starts rmtool's script as a process of that number.
fn start_as(gated: &Gated, bundle: &Bundle, number: u32, script: &str) -> Child {
    let first = format!("fork-as {number} {{");
    let lines = ["run", &first].into_iter().chain(script.lines()).chain(["}"]);
    gated.start(bundle, &lines.collect::<Vec<_>>())
}

fn said(child: Child) -> String {
    let output = child.wait_with_output().expect("it is a child of ours");
    format!("{}: {}", output.status, String::from_utf8_lossy(&output.stdout))
}

#[test]
fn a_process_pays_nothing_for_a_dead_one_of_another_container_who_had_its_number() {
    let gated = Gated::new();
    let (other, number) = left(&gated);
    let bundle = choosing(&gated, "app", 500);
    let script = "start\nalloc 100MiB as a\nsleep 2\nalloc 400MiB as b\nsleep 1\nfree b\n\
                  alloc 400MiB as c\nalloc 1MiB as d";
    let told = said(start_as(&gated, &bundle, number, script));
    for line in ["alloc b ok", "alloc c ok", &format!("alloc d {NO_MEMORY}")] {
        assert!(told.contains(line), "no {line:?} in {told}\n{}", gated.host.log());
    }
    // Who had it in the same container is charged.
    gated.exec(&bundle, &LEAVES).ok();
    eventually(|| dead_but(&gated, number).is_some());
    let number = dead_but(&gated, number).expect("it has left something");
    let script = "start\nsleep 1\nalloc 300MiB as a\nalloc 1MiB as b";
    let told = said(start_as(&gated, &bundle, number, script));
    for line in ["alloc a ok", &format!("alloc b {NO_MEMORY}")] {
        assert!(told.contains(line), "no {line:?} in {told}\n{}", gated.host.log());
    }
    end(&gated, &[&bundle, &other]);
}

/// Neither by the monitor's next worker, nor when the dead one's memory is free.
#[test]
fn it_has_no_more_for_it_either() {
    let gated = Gated::new();
    let (other, number) = left(&gated);
    let bundle = choosing(&gated, "app", 500);
    let root = gated.host.scratch.path().join("template/rootfs");
    let [has, gone] = ["has", "gone"].map(|name| root.join(name));
    let script = "start\nalloc 300MiB as a\nsleep 1\nalloc 200MiB as b\ntouch /has\nwait /gone\n\
                  alloc 1MiB as c\nfree b\nalloc 200MiB as d\nalloc 1MiB as e";
    let child = start_as(&gated, &bundle, number, script);
    assert!(eventually(|| has.exists()), "{}", said(child));
    let (_, worker) = gated.monitor("app_________");
    kill(worker, Signal::SIGKILL).expect("it is there");
    eventually(|| gated.monitor("app_________").1 != worker);
    for used_mib in [700, 500] {
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(gated.accounted_bytes("app"), 500 * MIB, "{}", gated.host.log());
            if used_mib == 700 {
                assert_eq!(gated.accounted_bytes("other"), 200 * MIB, "{}", gated.host.log());
            }
        }
        assert_eq!(gated.used_bytes(0), used_mib * MIB);
        let _ = gated.host.runtime().kill(&other, "KILL"); // it's gone, the second time
        gated.soon_uses(500);
    }
    std::fs::write(&gone, "").expect("a file can be made there");
    let told = said(child);
    for line in [&format!("alloc c {NO_MEMORY}"), "alloc d ok", &format!("alloc e {NO_MEMORY}")] {
        assert!(told.contains(line), "no {line:?} in {told}\n{}", gated.host.log());
    }
    end(&gated, &[&bundle, &other]);
}

/// What a dead one's heirs take later, by his client.
#[test]
fn nor_for_what_his_heirs_take_when_it_has_the_number() {
    let gated = Gated::new();
    let leaves = [
        "run",
        "start",
        "alloc 200MiB as a",
        "fork {",
        "session",
        "quiet",
        "wait /take",
        "alloc 250MiB as b",
        "touch /taken",
        "wait /give",
        "free b",
        "touch /given",
        "sleep 20",
        "}",
        "exit",
    ];
    let (other, number) = left_by(&gated, &leaves);
    let bundle = choosing(&gated, "app", 500);
    let root = gated.host.scratch.path().join("template/rootfs");
    let at = |name: &str| root.join(name);
    let script = "start\nalloc 500MiB as a\ntouch /has\nwait /gone\nalloc 1MiB as b\nfree a\n\
                  alloc 500MiB as c\nalloc 1MiB as d\ntouch /done\nwait /end\nalloc 1MiB as e\n\
                  free c\nalloc 500MiB as f\nalloc 1MiB as g";
    let child = start_as(&gated, &bundle, number, script);
    let there = |name: &str| eventually(|| at(name).exists());
    let tell = |name: &str| std::fs::write(at(name), "").expect("a file can be made there");
    let both_have = |used_mib: u64, other_mib: u64| {
        for _ in 0..8 {
            std::thread::sleep(Duration::from_millis(200));
            assert_eq!(gated.accounted_bytes("app"), 500 * MIB, "{}", gated.host.log());
            assert_eq!(gated.accounted_bytes("other"), other_mib * MIB, "{}", gated.host.log());
        }
        assert_eq!(gated.used_bytes(0), used_mib * MIB);
    };
    assert!(there("has"), "{}\n{}", said(child), gated.host.log());
    tell("take");
    assert!(there("taken"), "{}\n{}", said(child), gated.host.log());
    both_have(950, 450);
    tell("gone");
    assert!(there("done"), "{}\n{}", said(child), gated.host.log());
    // By the next worker of either, and when there is less of it, too.
    for id in ["app_________", "other_______"] {
        let (_, worker) = gated.monitor(id);
        kill(worker, Signal::SIGKILL).expect("it is there");
        eventually(|| gated.monitor(id).1 != worker);
        both_have(950, 450);
    }
    tell("give");
    assert!(there("given"), "{}\n{}", said(child), gated.host.log());
    both_have(700, 200);
    tell("end");
    let told = said(child);
    let refused = ["b", "d", "e", "g"].map(|name| format!("alloc {name} {NO_MEMORY}"));
    for line in ["alloc c ok", "alloc f ok"].into_iter().chain(refused.iter().map(String::as_str)) {
        assert!(told.contains(line), "no {line:?} in {told}\n{}", gated.host.log());
    }
    end(&gated, &[&bundle, &other]);
}

/// Or nobody could be told whose memory is under them.
#[test]
fn the_numbers_of_the_dead_outlive_a_worker() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 500);
    let file = gated.host.state_dir().join("gate/app_________/former");
    let numbers = || std::fs::read_to_string(&file).unwrap_or_default().lines().count();
    // Somebody is left who may have their clients.
    let mut holder = gated.start(&bundle, &["run", "start", "wait /end"]);
    for died in 1..4 {
        gated.exec(&bundle, &["run", "start", "alloc 1MiB as a"]).ok();
        assert!(eventually(|| numbers() == died), "{died}: {}", numbers());
        let (_, worker) = gated.monitor("app_________");
        kill(worker, Signal::SIGKILL).expect("it is there");
        eventually(|| gated.monitor("app_________").1 != worker);
    }
    gated.host.runtime().exec(&bundle, &["touch", "/end"]).ok();
    holder.wait().expect("it is a child of ours");
    end(&gated, &[&bundle]);
}

fn end(gated: &Gated, all: &[&Bundle]) {
    for bundle in all {
        let _ = gated.host.runtime().kill(bundle, "KILL"); // it may have ended
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
}
