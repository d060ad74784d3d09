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
    let program =
        monitor.halfway(&format!("start\nuvm-init\n{before}"), &format!("{call}\n{after}"));
    std::thread::sleep(Duration::from_millis(300));
    monitor.sim.fault(fault);
    program.go();
    std::thread::sleep(Duration::from_millis(150));
    let former = (beside == Beside::ItsGhost).then(|| monitor.abandon());
    if former.is_none() {
        monitor.replace();
    }
    let said = program.end();
    if let Some(mut former) = former {
        former.wait().unwrap();
    }
    let ended = siblings.iter_mut().any(|sibling| sibling.try_wait().unwrap().is_some());
    assert!(!ended, "a sibling ended too soon to matter");
    std::thread::sleep(Duration::from_millis(300));
    let used = monitor.used();
    siblings.into_iter().for_each(end);
    monitor.wait_for(0);
    // What was made for who was killed meanwhile is undone a moment later.
    until("the driver has it all", || monitor.sim.used(0) == 0);
    assert_eq!(monitor.status().calls.killed, 0, "{used}");
    said
}

/// By their faults: what comes before, the call, and what comes after.
const CALLS: [(&str, (&str, &str, &str)); 12] = [
    ("alloc:0x40", ("", "alloc 700MiB as a", "free a\nalloc 900MiB as c")),
    ("alloc:0x40", ("", "alloc-any 700MiB as a", "free a\nalloc 900MiB as c")),
    ("heap", ("", "heap 700MiB as a", "free a\nalloc 900MiB as c")),
    ("dup", ("alloc 700MiB as a", "dup a as b", "free a\nfree b\nalloc 900MiB as c")),
    ("free", ("alloc 700MiB as a", "free a", "alloc 900MiB as c")),
    ("control:0x3d05", ("alloc 700MiB as a", "export a", "free a\nimport as b\nfree b")),
    ("control:0x3d06", ("alloc 700MiB as a\nexport a\nfree a", "import as b", "free b")),
    (
        "control:0x3d0c",
        (
            "alloc 300MiB as a\nalloc 200MiB as b\nexport-list 4 0 a b\nfree a\nfree b",
            "import-list-chosen 0 as c d",
            "free c\nfree d",
        ),
    ),
    (
        "uvm:33",
        (
            "alloc 700MiB as a\nuvm-range 0x1000000000 700MiB",
            "uvm-map a at 0x1000000000",
            "free a\nuvm-cut 0x1000000000 700MiB\nalloc 900MiB as c",
        ),
    ),
    (
        "uvm:34",
        (
            "alloc 700MiB as a\nuvm-range 0x1000000000 700MiB\nuvm-map a at 0x1000000000\nfree a",
            "uvm-free 0x1000000000 700MiB",
            "alloc 900MiB as c",
        ),
    ),
    ("uvm:37", ("close-uvm", "uvm-init", "alloc 900MiB as c")),
    (
        "uvm:38",
        (
            "alloc 700MiB as a\nuvm-range 0x1000000000 700MiB\nuvm-map a at 0x1000000000\nfree a",
            "uvm-unregister gpu",
            "alloc 900MiB as c",
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

/// When a worker dies whose caller was interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dies {
    /// While the call is in the driver.
    During,
    /// When the driver is done and others have called since, before the caller comes back.
    After,
}

/// Runs lines with a signal in the middle of the call that a fault keeps, and kills the worker
/// after the signal.
fn interrupted_and_recovered(
    fault: &str,
    (before, call, after): (&str, &str, &str),
    dies: Dies,
) -> Said {
    let mut all = Said { text: String::new(), success: true };
    let signals: &[&str] = match dies {
        Dies::During => &["alarm 100 0 0", "alarm 100 0 500", "alarm 20 20 0"],
        Dies::After => &["alarm 50 0 700"],
    };
    for signals in signals {
        let monitor = Monitor::with(Managed::Refuse, false);
        let dir = tempfile::tempdir().unwrap();
        let begin = path(&dir, "begin");
        let mut siblings = Vec::new();
        if dies == Dies::After {
            let load =
                format!("start\nwait {begin}\n{}", "alloc 1MiB as y\nfree y\n".repeat(20000));
            siblings.extend((0..6).map(|_| monitor.sibling(&load)));
        }
        let program = monitor.halfway(
            &format!("start\nuvm-init\n{before}"),
            &format!("{signals}\n{call}\nsignals\n{after}"),
        );
        monitor.sim.fault(fault);
        program.go();
        std::thread::sleep(Duration::from_millis(200));
        if dies == Dies::After {
            // The fault keeps it for 100 ms.
            std::fs::write(&begin, "").unwrap();
            std::thread::sleep(Duration::from_millis(250));
        }
        monitor.replace();
        let said = program.end();
        siblings.into_iter().for_each(end);
        all.success &= said.success && !said.text.contains("status=");
        all.text += &format!("{signals}: {}\n", said.text);
        monitor.wait_for(0);
        until("the driver has it all", || monitor.sim.used(0) == 0);
        assert_eq!(monitor.status().calls.killed, 0);
    }
    all
}

/// Each kind of call, as on kernels before 5.19, where callers don't wait for their answer.
#[track_caller]
fn each_that_was_interrupted_is_made_once(when: &str, dies: Dies) {
    let range = "alloc 700MiB as a\nuvm-range 0x1000000000 700MiB";
    let unmap = "free a\nuvm-cut 0x1000000000 700MiB\nalloc 1000MiB as c";
    let mapped = format!("{range}\nuvm-map a at 0x1000000000\nfree a");
    let list = "alloc 300MiB as a\nalloc 200MiB as b\nexport-list 4 0 a b\nfree a\nfree b";
    let mut failed = Vec::new();
    for (kind, before, call, after) in [
        ("alloc:0x40", "", "alloc 700MiB as a", "free a\nalloc 1000MiB as c"),
        ("alloc:0x40", "", "alloc-any 700MiB as a", "free a\nalloc 1000MiB as c"),
        ("heap", "", "heap 700MiB as a", "free a\nalloc 1000MiB as c"),
        ("dup", "alloc 700MiB as a", "dup a as b", "free a\nfree b\nalloc 1000MiB as c"),
        ("uvm:33", range, "uvm-map a at 0x1000000000", unmap),
        ("uvm:34", &mapped, "uvm-free 0x1000000000 700MiB", "alloc 1000MiB as c"),
        ("free", "alloc 700MiB as a", "free a", "alloc 700MiB as b"),
        ("control:0x3d05", "alloc 700MiB as a", "export a", "free a\nimport as b\nfree b"),
        ("control:0x3d06", "alloc 700MiB as a\nexport a\nfree a", "import as b", "free b"),
        ("control:0x3d0c", list, "import-list 0 as c d", "free c\nfree d"),
        ("control:0x3d0c", list, "import-list-chosen 0 as c d", "free c\nfree d"),
    ] {
        let fault = format!("{kind} {when} times 1");
        let said = interrupted_and_recovered(&fault, (before, call, after), dies);
        if !said.success {
            failed.push(format!("{kind}: {}", said.text));
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn a_call_that_was_interrupted_before_its_worker_died_is_made_once() {
    each_that_was_interrupted_is_made_once("late 400", Dies::During);
}

#[test]
fn what_was_done_for_an_interrupted_caller_outlives_the_worker() {
    each_that_was_interrupted_is_made_once("late 100", Dies::After);
}

/// The worker before had made the duplicate, and its source is freed while the next one makes it again. Whichever
/// comes first: the caller has what it was told of, and that counts once.
#[test]
fn a_duplicate_whose_source_is_freed_meanwhile_is_not_left_over() {
    let monitor = Monitor::new();
    let dir = tempfile::tempdir().unwrap();
    let [free, freed, told, go] = ["free", "freed", "told", "go"].map(|name| path(&dir, name));
    monitor.sim.fault("dup late 300 times 1");
    let lines = format!(
        "start\nalloc 700MiB as a\nfork {{\nwait {free}\nfree a\ntouch {freed}\nwait {go}\n}}\n\
         dup a as b\nalloc 700MiB as c\ntouch {told}\nwait {go}\njoin"
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
    until("it is told", || Path::new(&told).exists());
    until("one alone is there", || (monitor.sim.used(0), monitor.used()) == (700 * MIB, 700 * MIB));
    std::fs::write(&go, "").unwrap();
    let said = Said::of(&wait(child));
    let is_there = |line: &str| said.text.lines().any(|said| said == line);
    assert_ne!(is_there("dup b ok"), is_there("alloc c ok"), "{}", said.text);
    assert_eq!(monitor.status().calls.killed, 0, "{}", said.text);
    monitor.wait_for(0);
}

/// A list that the worker before had imported, for a caller that gave up.
#[test]
fn all_of_a_list_that_nobody_takes_is_undone() {
    let monitor = Monitor::with(Managed::Refuse, false);
    let program = monitor.halfway(
        "start\nalloc 300MiB as a\nalloc 200MiB as b\nexport-list 4 0 a b\nfree a\nfree b",
        "interrupt 100\nimport-list 0 as c d\nclose-export\nsleep 60",
    );
    std::thread::sleep(Duration::from_millis(300));
    monitor.sim.fault("control:0x3d0c late 400 times 1");
    program.go();
    std::thread::sleep(Duration::from_millis(200));
    monitor.replace();
    // It lives, and nobody names them or has the file.
    until("all is free", || (monitor.sim.used(0), monitor.used()) == (0, 0));
    program.kill();
}

/// Freed by the worker before, and asked for again by the next one.
#[test]
fn a_client_that_the_worker_before_freed_is_freed() {
    let monitor = Monitor::new();
    let program = monitor.halfway("start\nalloc 700MiB as a", "free-client");
    std::thread::sleep(Duration::from_millis(500));
    monitor.sim.fault("free late 300 times 1");
    program.go();
    until("the driver freed it", || monitor.sim.used(0) == 0);
    monitor.replace();
    let said = program.end();
    assert!(said.success, "{}", said.text);
}

/// A call that only asks comes onto the lane where the driver must make an object to tell.
#[test]
fn a_call_that_asks_for_a_gpu_on_the_lane_does_so_for_the_next_worker_too() {
    let monitor = Monitor::new();
    let program = monitor.halfway("open\nclient\ndevice 0", "info");
    // The subdevice that the worker makes below that device.
    monitor.sim.fault("alloc:0x2080 hang times 1");
    program.go();
    until("it hangs", || monitor.sim.state()["hanging"] == 1);
    let mut former = monitor.abandon();
    monitor.sim.fault("clear");
    former.wait().unwrap();
    program.end().must("heap-info ok total_mib=1024");
    assert!(monitor.run(&script("start\nalloc 900MiB as a")).success);
    monitor.wait_for(0);
}
