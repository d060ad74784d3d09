//! Calls that a worker had in the driver when it died: the next one finishes them, once.

use std::path::Path;
use std::time::Duration;

use cgpu::gate::settings::Managed;

use crate::host::{MIB, Monitor, Said, end, path, script, until, wait};

/// What is there while the next worker takes over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// Calls that are refused, for each of which the driver is asked, and a sibling's that fit.
    Refusals,
    /// The call, still in the driver.
    ItsGhost,
}

/// Kills the worker in the middle of a call that a fault keeps, whose caller waits.
fn recovered(fault: &str, (before, call, after): (&str, &str, &str), beside: Beside) -> Said {
    let busy = beside == Beside::Refusals;
    let monitor = Monitor::new();
    let dir = tempfile::tempdir().unwrap();
    let (ready, go) = (path(&dir, "ready"), path(&dir, "go"));
    let mut siblings = Vec::new();
    if busy {
        // Refused all the time: audits that pause, one after the other; and one who allocates.
        siblings.push(monitor.spawn(&["hold", "1MiB"]));
        monitor.wait_for(MIB);
        // None of their calls meets the fault.
        let how = if fault.starts_with("alloc") { "heap" } else { "alloc" };
        let greedy = format!("start\n{}", format!("{how} 1024MiB as x\n").repeat(3000));
        siblings.push(monitor.sibling(&greedy));
        if !fault.starts_with("free") {
            let load = format!("start\n{}", format!("{how} 1MiB as y\nfree y\n").repeat(20000));
            siblings.push(monitor.sibling(&load));
        }
    }
    let lines = format!("start\nuvm-init\n{before}\ntouch {ready}\nwait {go}\n{call}\n{after}");
    let child = monitor.spawn(&script(&lines));
    until("it is ready", || Path::new(&ready).exists());
    std::thread::sleep(Duration::from_millis(300));
    monitor.sim.fault(fault);
    std::fs::write(&go, "").unwrap();
    std::thread::sleep(Duration::from_millis(150));
    let former = (beside == Beside::ItsGhost).then(|| monitor.abandon());
    if former.is_none() {
        monitor.replace();
    }
    let said = Said::of(&wait(child));
    if let Some(mut former) = former {
        former.wait().unwrap();
    }
    let ended = siblings.iter_mut().any(|sibling| sibling.try_wait().unwrap().is_some());
    assert!(!ended, "a sibling ended too soon to matter");
    std::thread::sleep(Duration::from_millis(300));
    let used = monitor.used();
    siblings.into_iter().for_each(end);
    monitor.wait_for(0);
    assert_eq!((monitor.sim.used(0), monitor.status().calls.killed), (0, 0), "{used}");
    said
}

/// By their faults: what comes before, the call, and what comes after.
const CALLS: [(&str, (&str, &str, &str)); 8] = [
    ("alloc:0x40", ("", "alloc 700MiB as a", "free a\nalloc 900MiB as c")),
    ("alloc:0x40", ("", "alloc-any 700MiB as a", "free a\nalloc 900MiB as c")),
    ("heap", ("", "heap 700MiB as a", "free a\nalloc 900MiB as c")),
    ("dup", ("alloc 700MiB as a", "dup a as b", "free a\nfree b\nalloc 900MiB as c")),
    ("free", ("alloc 700MiB as a", "free a", "alloc 900MiB as c")),
    ("control:0x3d05", ("alloc 700MiB as a", "export a", "free a\nimport as b\nfree b")),
    ("control:0x3d06", ("alloc 700MiB as a\nexport a\nfree a", "import as b", "free b")),
    (
        "uvm:33",
        (
            "alloc 700MiB as a\nuvm-range 0x1000000000 700MiB",
            "uvm-map a at 0x1000000000",
            "free a\nuvm-cut 0x1000000000 700MiB\nalloc 900MiB as c",
        ),
    ),
];

#[track_caller]
fn each_is_made_once(whens: &[&str], beside: Beside) {
    let mut failed = Vec::new();
    for (kind, lines) in CALLS {
        for when in whens {
            let said = recovered(&format!("{kind} {when} times 1"), lines, beside);
            if !said.success {
                failed.push(format!("{kind} {when}: {}", said.text));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn each_kind_of_call_is_made_once_whether_the_driver_had_done_it_or_not() {
    each_is_made_once(&["late 400", "delay 400"], Beside::Nothing);
}

#[test]
fn each_kind_of_call_is_made_once_while_audits_let_nobody_begin() {
    each_is_made_once(&["late 400"], Beside::Refusals);
}

#[test]
fn each_kind_of_call_is_made_once_while_it_is_still_in_the_driver() {
    each_is_made_once(&["late 1000"], Beside::ItsGhost);
}

/// Runs lines with a signal in the middle of the call that a fault keeps for 400 ms, and kills the
/// worker after the signal, while the call is still in the driver.
fn interrupted_and_recovered(fault: &str, before: &str, call: &str, after: &str) -> Said {
    let mut all = Said { text: String::new(), success: true };
    for signals in ["alarm 100 0 0", "alarm 100 0 500", "alarm 20 20 0"] {
        let monitor = Monitor::with(Managed::Refuse, false);
        let dir = tempfile::tempdir().unwrap();
        let (ready, go) = (path(&dir, "ready"), path(&dir, "go"));
        let lines = format!(
            "start\nuvm-init\n{before}\ntouch {ready}\nwait {go}\n{signals}\n{call}\nsignals\n{after}"
        );
        let child = monitor.spawn(&script(&lines));
        until("it is ready", || Path::new(&ready).exists());
        monitor.sim.fault(fault);
        std::fs::write(&go, "").unwrap();
        std::thread::sleep(Duration::from_millis(200));
        monitor.replace();
        let said = Said::of(&wait(child));
        all.success &= said.success && !said.text.contains("status=");
        all.text += &format!("{signals}: {}\n", said.text);
        monitor.wait_for(0);
        assert_eq!((monitor.sim.used(0), monitor.status().calls.killed), (0, 0));
    }
    all
}

/// As on kernels before 5.19, where callers don't wait for their answer.
#[test]
fn a_call_that_was_interrupted_before_its_worker_died_is_made_once() {
    let range = "alloc 700MiB as a\nuvm-range 0x1000000000 700MiB";
    let unmap = "free a\nuvm-cut 0x1000000000 700MiB\nalloc 1000MiB as c";
    for (kind, before, call, after) in [
        ("alloc:0x40", "", "alloc 700MiB as a", "free a\nalloc 1000MiB as c"),
        ("alloc:0x40", "", "alloc-any 700MiB as a", "free a\nalloc 1000MiB as c"),
        ("dup", "alloc 700MiB as a", "dup a as b", "free a\nfree b\nalloc 1000MiB as c"),
        ("uvm:33", range, "uvm-map a at 0x1000000000", unmap),
        ("free", "alloc 700MiB as a", "free a", "alloc 700MiB as b"),
        ("control:0x3d05", "alloc 700MiB as a", "export a", "free a\nimport as b\nfree b"),
        ("control:0x3d06", "alloc 700MiB as a\nexport a\nfree a", "import as b", "free b"),
    ] {
        let said =
            interrupted_and_recovered(&format!("{kind} late 400 times 1"), before, call, after);
        assert!(said.success, "{kind}: {}", said.text);
    }
}

/// The worker before had made the duplicate. When it is made again its source is gone, and what the
/// caller isn't told of must not count against it, nor stay.
#[test]
fn a_duplicate_that_can_no_more_be_made_is_not_left_over() {
    let monitor = Monitor::new();
    let dir = tempfile::tempdir().unwrap();
    let (free, freed, go) = (path(&dir, "free"), path(&dir, "freed"), path(&dir, "go"));
    monitor.sim.fault("dup late 300 times 1");
    let lines = format!(
        "start\nalloc 700MiB as a\nfork {{\nwait {free}\nfree a\ntouch {freed}\nwait {go}\n}}\n\
         dup a as b\nalloc 700MiB as c\nwait {go}\njoin"
    );
    let child = monitor.spawn(&script(&lines));
    until("the driver has it", || {
        monitor.sim.state()["calls"]["dup"].as_u64().is_some_and(|count| count > 0)
    });
    std::thread::sleep(Duration::from_millis(50));
    monitor.kill();
    monitor.sim.fault("dup delay 500 times 1");
    monitor.start();
    std::fs::write(&free, "").unwrap();
    until("it is freed", || Path::new(&freed).exists());
    std::thread::sleep(Duration::from_millis(1500));
    let (driver, used) = (monitor.sim.used(0), monitor.used());
    std::fs::write(&go, "").unwrap();
    let said = Said::of(&wait(child));
    assert_eq!((driver, used), (700 * MIB, 700 * MIB), "c alone: {}", said.text);
    assert_eq!(monitor.status().calls.killed, 0, "{}", said.text);
    monitor.wait_for(0);
}

/// Freed by the worker before, and asked for again by the next one.
#[test]
fn a_client_that_the_worker_before_freed_is_freed() {
    let monitor = Monitor::new();
    let dir = tempfile::tempdir().unwrap();
    let (ready, go) = (path(&dir, "ready"), path(&dir, "go"));
    let lines = format!("start\nalloc 700MiB as a\ntouch {ready}\nwait {go}\nfree-client");
    let child = monitor.spawn(&script(&lines));
    until("it has it", || Path::new(&ready).exists());
    std::thread::sleep(Duration::from_millis(500));
    monitor.sim.fault("free late 300 times 1");
    std::fs::write(&go, "").unwrap();
    until("the driver freed it", || monitor.sim.used(0) == 0);
    monitor.replace();
    let said = Said::of(&wait(child));
    assert!(said.success, "{}", said.text);
}
