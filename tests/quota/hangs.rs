//! Drivers that never answer: how far that reaches.

use std::process::Child;
use std::time::{Duration, Instant};

use cgpu_host::process::ProcessId;
use cgpu_sim::{Action, CallFault, Fault, Kind};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::gated::{Gated, MIB, got_bytes};
use crate::support::{Bundle, eventually};

/// Calls that a monitor can have in the driver at once (`monitor::calls::threads::MOST`).
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

/// The limit that is known. No other container waits, though more calls do than its monitor has threads.
#[test]
fn hanging_call_blocks_only_its_container_until_answered() {
    let gated = Gated::new();
    let (bundle, neighbour) = (gated.sleeping("app", 1000), gated.sleeping("neighbour", 2000));
    let mut all = hang(&gated, &bundle, MOST + 8);
    let mut waiting = gated.start(&bundle, &["run", "start", "alloc 500MiB as a"]);
    gated.fills(&neighbour, 2000);
    assert_eq!(got_bytes(&gated.exec(&neighbour, &["storm", "4"])), 2000 << 20);
    // Its monitor still reports its state: what hangs counts.
    assert_eq!(gated.accounted_bytes("app"), MIB);
    // That its processes have exited is learnt a moment later.
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

/// A container whose driver call hangs can be killed and removed.
#[test]
fn hanging_container_can_be_killed_and_removed() {
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

/// That so much is used by the driver, and soon also by the monitor.
#[track_caller]
fn both_soon_have(gated: &Gated, mib: u64) {
    gated.soon_uses(mib);
    let same = || gated.accounted_bytes("app") == mib * MIB;
    assert!(eventually(same), "{} bytes: {}", gated.accounted_bytes("app"), gated.host.log());
}

/// What hangs in the driver can't be left: the monitor goes on as it is, and its container after that call.
#[test]
fn monitor_is_updated_only_after_its_hanging_call() {
    let gated = Gated::new();
    let (bundle, neighbour) = (gated.sleeping("app", 1000), gated.sleeping("other", 2000));
    gated.sim.fault("alloc:0x40 hang times 1".parse().unwrap());
    let mut hung = gated.start(&bundle, &["hold", "100MiB"]);
    assert!(eventually(|| gated.sim.state().hanging == 1));
    let monitor = gated.monitor("app_________");
    let refused = gated.host.cgpu(&["upgrade-monitors"]).exits(1);
    for part in
        ["app_________: a driver call of the container, or about it, hangs", "nothing is lost"]
    {
        assert!(refused.stderr.contains(part), "{refused}");
    }
    assert!(refused.stdout.contains("other_______ "), "the other one is updated: {refused}");
    // What hangs may yet be given, so that it counts, and nothing else is before it is known.
    let mut fills = gated.start(&bundle, &["fill"]);
    assert_eq!(gated.accounted_bytes("app"), 100 * MIB);
    gated.fills(&neighbour, 2000);
    assert!(hung.try_wait().unwrap().is_none(), "it waits for the driver");
    assert!(fills.try_wait().unwrap().is_none(), "it waits for that one");
    gated.sim.fault(Fault::Clear);
    assert!(fills.wait().unwrap().success());
    both_soon_have(&gated, 100);
    gated.update();
    assert_eq!(gated.monitor("app_________"), monitor);
    assert!(hung.try_wait().unwrap().is_none(), "it has its memory, and holds it");
    gated.fills(&bundle, 900);
    both_soon_have(&gated, 100);
    for bundle in [&bundle, &neighbour] {
        gated.host.runtime().delete(bundle).ok();
    }
    hung.wait().unwrap();
    gated.soon_is_empty();
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

/// Whichever kind of call is slow while the monitor is updated, it is made once.
#[test]
fn slow_call_during_monitor_update_is_made_once() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    for kind in ["alloc:0x40", "heap", "dup", "free", "uvm:33", "control:0x20801303"] {
        gated.sim.fault(format!("{kind} delay 500 times 1").parse().unwrap());
        let mut program = gated.start(&bundle, &ALL);
        assert!(eventually(|| gated.used_bytes(0) > 0 || kind.starts_with("alloc")), "{kind}");
        gated.update();
        let mut other = gated.start(&bundle, &["run", "start", "alloc 500MiB as a", "free a"]);
        assert!(other.wait().unwrap().success(), "{kind}");
        // By a handle, and by a mapping.
        both_soon_have(&gated, 150);
        gated.fills(&bundle, 850);
        end(&gated, &mut program);
        both_soon_have(&gated, 0);
        gated.fills(&bundle, 1000);
    }
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// Ends what runs in the container next to its first process.
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

/// Less than a removal would wait for a monitor that doesn't end (ten seconds).
const MOST_WAIT: Duration = Duration::from_secs(9);

/// A container is removed without waiting for its calls that are pending in the driver.
#[test]
fn removal_does_not_wait_for_calls_in_driver() {
    for is_killed in [false, true] {
        let gated = Gated::new();
        let bundle = gated.sleeping("app", 1000);
        gated.sim.fault("control:0x20801303 hang times 1".parse().unwrap());
        let mut hung = gated.start(&bundle, &["run", "start", "info"]);
        assert!(eventually(|| gated.sim.state().hanging == 1));
        gated.sim.fault("alloc:0x40 hang times 1".parse().unwrap());
        let mut last = gated.start(&bundle, &["hold", "200MiB"]);
        assert!(eventually(|| gated.sim.state().hanging == 2));
        let monitor = ProcessId::of(gated.monitor("app_________").as_raw()).unwrap();
        if is_killed {
            kill(Pid::from_raw(monitor.pid), Signal::SIGKILL).expect("it serves");
        }
        let begun = Instant::now();
        gated.host.runtime().delete(&bundle).ok();
        let took = begun.elapsed();
        assert!(took < MOST_WAIT, "killed {is_killed}: {took:?}");
        assert!(!gated.host.registered().contains("app"), "{:?}", gated.host.ps());
        hung.wait().unwrap();
        last.wait().unwrap();
        // The id can be had again while the driver still has the calls of the one before.
        let again = gated.sleeping("app", 1000);
        gated.fills(&again, 1000);
        gated.sim.fault(Fault::Clear);
        assert!(eventually(|| !monitor.alive()), "{monitor:?}: {}", gated.host.log());
        gated.fills(&again, 1000);
        gated.host.runtime().delete(&again).ok();
        gated.soon_is_empty();
    }
}
