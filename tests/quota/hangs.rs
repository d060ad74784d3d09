//! Drivers that never answer: how far that reaches.

use std::process::Child;
use std::time::{Duration, Instant};

use cgpu::process::ProcessId;
use cgpu_sim::{Action, CallFault, Fault, Kind};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::gated::{Gated, MIB, got_bytes};
use crate::support::{Bundle, eventually};

/// Calls that a monitor can have in the driver at once (`monitor::journal::layout::SLOTS`).
const MOST: u32 = 32;

/// Has so many processes of the container ask for a MiB each, of whom the driver keeps one: the others wait
/// for that.
#[track_caller]
fn hang(gated: &Gated, bundle: &Bundle, count: u32) -> Child {
    gated.sim.fault(Fault::Call(CallFault {
        kind: Some(Kind::Alloc),
        what: Some(0x40),
        action: Action::Hang,
        times: Some(1),
    }));
    let one = ["fork {", "start", "alloc 1MiB as a", "}"];
    let words: Vec<&str> = std::iter::once("run").chain((0..count).flat_map(|_| one)).collect();
    let all = gated.start(bundle, &[&words[..], &["join"]].concat());
    assert!(eventually(|| gated.sim.state().hanging == 1), "{}", gated.host.log());
    all
}

/// The limit that is known. Nobody else waits, though more do than its monitor has threads.
#[test]
fn a_container_whose_call_hangs_waits_alone_and_goes_on_when_it_is_answered() {
    let gated = Gated::new();
    let (bundle, neighbour) = (gated.sleeping("app", 1000), gated.sleeping("neighbour", 2000));
    let mut all = hang(&gated, &bundle, MOST + 8);
    let mut waiting = gated.start(&bundle, &["run", "start", "alloc 500MiB as a"]);
    gated.fills(&neighbour, 2000);
    assert_eq!(got_bytes(&gated.exec(&neighbour, &["storm", "4"])), 2000 << 20);
    // Its monitor still tells how things stand: what hangs counts.
    assert_eq!(gated.accounted_bytes("app"), MIB);
    // That its processes are over is learnt a moment later.
    assert!(eventually(|| gated.accounted_bytes("neighbour") == 0));
    assert!(
        waiting.try_wait().unwrap().is_none(),
        "it is answered, beyond the limit that is known"
    );
    gated.sim.fault(Fault::Clear);
    assert!(all.wait().unwrap().success(), "all of them got their MiB");
    assert!(waiting.wait().unwrap().success());
    gated.fills(&bundle, 1000);
    for bundle in [&bundle, &neighbour] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
}

#[test]
fn a_container_whose_call_hangs_can_be_killed_and_removed() {
    let gated = Gated::new();
    let (bundle, neighbour) = (gated.sleeping("app", 1000), gated.sleeping("neighbour", 2000));
    let mut all = hang(&gated, &bundle, MOST + 8);
    let runtime = gated.host.runtime();
    runtime.kill(&bundle, Signal::SIGKILL.as_str().trim_start_matches("SIG")).ok();
    assert!(!all.wait().unwrap().success(), "they were killed, not answered");
    runtime.delete(&bundle).ok();
    // Its quota may stay reserved until its monitor gives the driver up.
    assert!(!gated.host.registered().contains("app"), "{:?}", gated.host.ps());
    gated.fills(&neighbour, 2000);
    // The id can be had again while the driver still has the call of the one before.
    assert_eq!(gated.sim.state().hanging, 1);
    let again = gated.sleeping("app", 1000);
    gated.fills(&again, 1000);
    gated.sim.fault(Fault::Clear);
    for bundle in [&again, &neighbour] {
        runtime.delete(bundle).ok();
    }
    gated.soon_is_empty();
}

/// Longer than it takes to see that a worker is over, and to start another, on a busy machine; who
/// waits for the driver waits for ever.
const SOON: Duration = Duration::from_secs(60);

/// How a container comes to another worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Upgrade,
    Kill,
}

/// Puts another worker in the place of the container's; the one before, which the driver keeps
/// from ending, unless it has nothing of it.
#[track_caller]
fn change(gated: &Gated, how: Change) -> ProcessId {
    let (keeper, worker) = gated.monitor("app_________");
    let before = ProcessId::of(worker.as_raw()).expect("it serves");
    let begun = Instant::now();
    match how {
        Change::Upgrade => drop(gated.host.cgpu(&["upgrade-monitors"]).ok()),
        Change::Kill => kill(worker, Signal::SIGKILL).expect("it serves"),
    }
    // One that is being killed is believed until it is dead.
    assert!(eventually(|| gated.monitor("app_________").1 != worker), "{}", gated.host.log());
    let serves = || gated.host.container("app")["gpus"][0]["memory_used_bytes"].is_u64();
    assert!(eventually(serves), "{how:?}: {}", gated.host.log());
    let took = begun.elapsed();
    assert!(took < SOON, "{how:?}: {took:?}");
    assert_eq!(gated.monitor("app_________").0, keeper);
    before
}

/// That so much is used by the driver, and soon also by the monitor.
#[track_caller]
fn both_soon_have(gated: &Gated, mib: u64) {
    gated.soon_uses(mib);
    let same = || gated.accounted_bytes("app") == mib * MIB;
    assert!(eventually(same), "{} bytes: {}", gated.accounted_bytes("app"), gated.host.log());
}

#[track_caller]
fn is_soon_gone(gated: &Gated, process: ProcessId) {
    assert!(eventually(|| !process.alive()), "{process:?}: {}", gated.host.log());
}

#[test]
fn a_worker_whose_call_hangs_can_be_replaced_and_the_container_goes_on_after_that_call() {
    for how in [Change::Upgrade, Change::Kill] {
        let gated = Gated::new();
        let (bundle, neighbour) = (gated.sleeping("app", 1000), gated.sleeping("other", 2000));
        gated.sim.fault("alloc:0x40 hang times 1".parse().unwrap());
        let mut hung = gated.start(&bundle, &["hold", "100MiB"]);
        assert!(eventually(|| gated.sim.state().hanging == 1));
        let first = change(&gated, how);
        assert!(first.alive(), "the driver has a thread of it: {}", gated.host.log());
        // What hangs may yet be given, so that it counts, and nothing else is before it is known.
        let mut fills = gated.start(&bundle, &["fill"]);
        assert_eq!(gated.accounted_bytes("app"), 100 * MIB);
        // This one has no call in the driver, and leaves nothing.
        let second = change(&gated, how);
        is_soon_gone(&gated, second);
        gated.fills(&neighbour, 2000);
        assert!(hung.try_wait().unwrap().is_none(), "it waits for the driver");
        assert!(fills.try_wait().unwrap().is_none(), "it waits for that one");
        gated.soon_uses(0);
        assert_eq!(gated.sim.state().hanging, 1, "{how:?}");
        gated.sim.fault(Fault::Clear);
        assert!(fills.wait().unwrap().success());
        both_soon_have(&gated, 100);
        is_soon_gone(&gated, first);
        assert!(hung.try_wait().unwrap().is_none(), "it has its memory, and holds it");
        gated.fills(&bundle, 900);
        both_soon_have(&gated, 100);
        for bundle in [&bundle, &neighbour] {
            gated.host.runtime().delete(bundle).ok();
        }
        hung.wait().unwrap();
        gated.soon_is_empty();
    }
}

/// Calls that make, name, map and free memory, or none, one after the other.
const ALL: [&str; 12] = [
    "run",
    "start",
    "alloc 100MiB as a",
    "heap 50MiB as b",
    "dup a as c",
    "free a",
    "uvm-init",
    "uvm-map b",
    "free b",
    "info",
    "dup c as d",
    "sleep 1000",
];

#[test]
fn whatever_call_hangs_while_its_worker_is_replaced_is_made_once() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let kinds = ["alloc:0x40", "heap", "dup", "free", "uvm:33", "control:0x20801303"];
    for (kind, how) in kinds.into_iter().zip([Change::Kill, Change::Upgrade].into_iter().cycle()) {
        gated.sim.fault(format!("{kind} hang times 1").parse().unwrap());
        let mut program = gated.start(&bundle, &ALL);
        assert!(eventually(|| gated.sim.state().hanging == 1), "{kind}");
        let before = change(&gated, how);
        let mut other = gated.start(&bundle, &["run", "start", "alloc 500MiB as a", "free a"]);
        gated.sim.fault(Fault::Clear);
        assert!(other.wait().unwrap().success(), "{kind}");
        // By a name, and by a mapping.
        both_soon_have(&gated, 150);
        is_soon_gone(&gated, before);
        gated.fills(&bundle, 850);
        end(&gated, &mut program);
        both_soon_have(&gated, 0);
        gated.fills(&bundle, 1000);
    }
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// The driver may keep so many workers of one container (`monitor::keeper`), this one among them.
const MOST_LEAVING: usize = 8;

#[test]
fn an_upgrade_leaves_a_container_the_last_worker_that_the_driver_may_keep() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let mut programs = Vec::new();
    let mut former = Vec::new();
    for round in 1..=MOST_LEAVING {
        // Controls go beside each other.
        gated.sim.fault("control:0x20801303 hang times 1".parse().unwrap());
        let asks = ["run", "start", "alloc 10MiB as a", "info", "sleep 1000"];
        programs.push(gated.start(&bundle, &asks));
        assert!(eventually(|| gated.sim.state().hanging == round as u64), "{round}");
        if round < MOST_LEAVING {
            former.push(change(&gated, Change::Upgrade));
        }
    }
    let last = gated.monitor("app_________");
    let refused = gated.host.cgpu(&["upgrade-monitors"]);
    assert!(!refused.status.success(), "{refused}");
    assert!(gated.host.log().contains("this one stays"), "{}", gated.host.log());
    assert_eq!(gated.monitor("app_________"), last);
    assert!(former.iter().all(|worker| worker.alive()));
    gated.fills(&bundle, 1000 - 10 * MOST_LEAVING as u64);
    gated.sim.fault(Fault::Clear);
    former.into_iter().for_each(|worker| is_soon_gone(&gated, worker));
    both_soon_have(&gated, 10 * MOST_LEAVING as u64);
    change(&gated, Change::Upgrade);
    assert_ne!(gated.monitor("app_________").1, last.1);
    gated.host.runtime().delete(&bundle).ok();
    for program in &mut programs {
        program.wait().unwrap();
    }
    gated.soon_is_empty();
}

/// Ends what runs in the container beside its first process.
#[track_caller]
fn end(gated: &Gated, program: &mut Child) {
    let files = gated.sim.state().files;
    let users = files.iter().filter_map(|file| i32::try_from(file.process).ok());
    for pid in users.filter(|pid| !crate::gated::monitors(&gated.host).contains(pid)) {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL); // gone already, then
    }
    let ended = program.wait().expect("it is ours");
    assert!(!ended.success(), "it was to sleep: {}", gated.host.log());
}

/// Less than a removal would wait for a worker that doesn't end (ten seconds).
const MOST_WAIT: Duration = Duration::from_secs(9);

#[test]
fn a_container_whose_former_worker_the_driver_has_is_removed_without_waiting_for_it() {
    for how in [Change::Upgrade, Change::Kill] {
        let gated = Gated::new();
        let bundle = gated.sleeping("app", 1000);
        gated.sim.fault("control:0x20801303 hang times 1".parse().unwrap());
        let mut hung = gated.start(&bundle, &["run", "start", "info"]);
        assert!(eventually(|| gated.sim.state().hanging == 1));
        let first = change(&gated, how);
        // And one that the worker has itself, when it is to end.
        gated.sim.fault("alloc:0x40 hang times 1".parse().unwrap());
        let mut last = gated.start(&bundle, &["hold", "200MiB"]);
        assert!(eventually(|| gated.sim.state().hanging == 2));
        let second = ProcessId::of(gated.monitor("app_________").1.as_raw()).unwrap();
        let begun = Instant::now();
        gated.host.runtime().delete(&bundle).ok();
        let took = begun.elapsed();
        assert!(took < MOST_WAIT, "{how:?}: {took:?}");
        assert!(!gated.host.registered().contains("app"), "{:?}", gated.host.ps());
        hung.wait().unwrap();
        last.wait().unwrap();
        // The id can be had again while the driver still has the calls of the one before.
        assert!(first.alive() && second.alive());
        let again = gated.sleeping("app", 1000);
        gated.fills(&again, 1000);
        gated.sim.fault(Fault::Clear);
        is_soon_gone(&gated, first);
        is_soon_gone(&gated, second);
        gated.fills(&again, 1000);
        gated.host.runtime().delete(&again).ok();
        gated.soon_is_empty();
    }
}
