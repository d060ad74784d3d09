//! Calls in the middle of which the monitor is updated: each is made once.

use std::time::Duration;

use cgpu_monitor::gate::settings::Managed;

use crate::monitor::host::{MIB, Monitor, ProgramOutput, end, path, until};

/// Updates the monitor in the middle of a call that a fault keeps, while others call.
fn updated(fault: &str, (before, call, after): (&str, &str, &str)) -> ProgramOutput {
    let monitor = Monitor::new();
    let mut siblings = vec![monitor.spawn(&["hold", "1MiB"])];
    monitor.wait_for(MIB);
    // None of their calls meets the fault.
    let how = if fault.starts_with("alloc") { "heap" } else { "alloc" };
    let greedy = format!("start\n{}", format!("{how} 1024MiB as x\n").repeat(3000));
    siblings.push(monitor.sibling(&greedy));
    if !fault.starts_with("free") {
        let load = format!("start\n{}", format!("{how} 1MiB as y\nfree y\n").repeat(20000));
        siblings.push(monitor.sibling(&load));
    }
    let program =
        monitor.halfway(&format!("start\nuvm-init\n{before}"), &format!("{call}\n{after}"));
    monitor.sim.fault(fault);
    program.go();
    std::thread::sleep(Duration::from_millis(100));
    monitor.update();
    let said = program.end();
    let ended = siblings.iter_mut().any(|sibling| sibling.try_wait().unwrap().is_some());
    assert!(!ended, "a sibling ended too soon to matter");
    siblings.into_iter().for_each(end);
    monitor.wait_for(0);
    until("the driver has it all", || monitor.sim.used(0) == 0);
    let status = monitor.status();
    assert_eq!((status.calls.killed, status.updates), (0, 1));
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

#[test]
fn each_kind_of_call_is_made_once() {
    let mut failed = Vec::new();
    for (kind, lines) in CALLS {
        for when in ["late 400", "delay 400"] {
            let said = updated(&format!("{kind} {when} times 1"), lines);
            if !said.success {
                failed.push(format!("{kind} {when}: {}", said.text));
            }
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// When the update of a monitor comes whose caller was interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Comes {
    /// While the call is in the driver.
    During,
    /// When the driver is done and others have called since, before the caller comes back.
    After,
}

/// Runs lines with a signal in the middle of the call that a fault keeps, and updates the monitor after the signal.
fn interrupted_and_updated(
    fault: &str,
    (before, call, after): (&str, &str, &str),
    comes: Comes,
) -> ProgramOutput {
    let mut all = ProgramOutput { text: String::new(), success: true };
    let signals: &[&str] = match comes {
        Comes::During => &["alarm 100 0 0", "alarm 100 0 500", "alarm 20 20 0"],
        Comes::After => &["alarm 50 0 700"],
    };
    for signals in signals {
        let monitor = Monitor::with(Managed::Refuse, false);
        let dir = tempfile::tempdir().unwrap();
        let begin = path(&dir, "begin");
        let mut siblings = Vec::new();
        if comes == Comes::After {
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
        if comes == Comes::After {
            // The fault keeps it for 100 ms.
            std::fs::write(&begin, "").unwrap();
            std::thread::sleep(Duration::from_millis(250));
        }
        monitor.update();
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
fn each_that_was_interrupted_is_made_once(when: &str, comes: Comes) {
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
        let said = interrupted_and_updated(&fault, (before, call, after), comes);
        if !said.success {
            failed.push(format!("{kind}: {}", said.text));
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// A call that was interrupted before an update of the monitor is made once.
#[test]
fn a_call_that_was_interrupted_is_made_once() {
    each_that_was_interrupted_is_made_once("late 400", Comes::During);
}

#[test]
fn what_was_done_for_interrupted_callers_survives_updates() {
    each_that_was_interrupted_is_made_once("late 100", Comes::After);
}

/// A call that hangs in the driver can't be left, and the monitor goes on as it is.
#[test]
fn monitor_with_hanging_call_refuses_update_and_continues() {
    let monitor = Monitor::new();
    let asks = monitor.halfway("start\nalloc 5MiB as a", "info");
    monitor.sim.fault("alloc:0x40 hang times 1");
    let hanging = monitor.halfway("start", "");
    hanging.go();
    let child = monitor.spawn(&["hold", "10MiB"]);
    until("it hangs", || monitor.sim.state()["hanging"] == 1);
    assert!(!monitor.try_update());
    asks.go_on().must("info");
    monitor.sim.fault("clear");
    monitor.wait_for(10 * MIB);
    monitor.update();
    assert_eq!((monitor.used(), monitor.status().updates), (10 * MIB, 1));
    end(child);
    hanging.end();
    monitor.wait_for(0);
}

#[test]
fn three_updates_in_a_row_change_no_figure() {
    let monitor = Monitor::new();
    let program = monitor.halfway(
        "start\nuvm-init\nalloc 100MiB as a\nexport a\nfree a\nalloc 200MiB as b\nuvm-map b\nfree b",
        "import as c\nuvm-unmap b",
    );
    let figures = || {
        let status = monitor.status();
        (status.gpus, status.calls, status.durations, status.processes, status.pid)
    };
    let descriptors = || {
        let of = std::fs::read_dir(format!("/proc/{}/fd", monitor.pid())).unwrap();
        let name = |entry: std::fs::DirEntry| std::fs::read_link(entry.path()).ok();
        let mut all: Vec<_> = of.flatten().filter_map(name).collect();
        // What it reads or writes at this moment.
        all.retain(|path| !path.starts_with("/proc") && !path.starts_with("/sys"));
        all.sort_unstable();
        all
    };
    let before = figures();
    let mut open = None;
    for updates in 1..=3 {
        monitor.update();
        assert_eq!((figures(), monitor.status().updates), (before.clone(), updates));
        // What it retains of callers it opens again.
        std::thread::sleep(Duration::from_secs(1));
        let open = open.get_or_insert_with(descriptors);
        until("it has the same files open as after the first one", || descriptors() == *open);
        let program = std::fs::read_link(format!("/proc/{}/fd/1", monitor.pid())).unwrap();
        assert_eq!(program, std::path::Path::new("/dev/null"));
    }
    let said = program.go_on();
    said.must("import c ok").must("uvm-unmap b ok");
    monitor.wait_for(0);
    until("the driver has it all", || monitor.sim.used(0) == 0);
}
