use std::path::Path;
use std::time::{Duration, Instant};

use crate::monitor::host::{
    DESCRIPTORS, MIB, Monitor, ProgramOutput, QUOTA, end, path, script, until, wait,
};
use crate::support::timeout;
use cgpu_monitor::gate::settings::Managed;

/// An updated monitor knows all that the monitor before the update did.
#[test]
fn monitor_update_retains_all_charges() {
    let monitor = Monitor::new();
    let mut holder = monitor.spawn(&["hold", "700MiB"]);
    monitor.wait_for(700 * MIB);
    monitor.update();
    assert_eq!(monitor.used(), 700 * MIB);
    assert_eq!(monitor.run(&["fill"]).number("got_bytes"), 324 * MIB);
    monitor.update();
    monitor.wait_for(700 * MIB);
    holder.kill().unwrap();
    wait(holder);
    monitor.wait_for(0);
}

#[test]
fn updates_under_load_neither_lose_nor_double_charges() {
    let monitor = Monitor::new();
    // Allocates and frees all the time, each with its own size.
    let load: String = (0..400)
        .map(|at| {
            format!("alloc {}KiB as x{at}\nheap {}KiB as y{at}\nfree x{at}\n", at + 1, at + 2)
        })
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let end = path(&dir, "end");
    let done = ["a", "b", "c"].map(|name| path(&dir, name));
    let load = |done: &String| format!("start\n{load}touch {done}\nwait {end}");
    let children = done.each_ref().map(|done| monitor.spawn(&script(&load(done))));
    let mut wait_us = 300;
    for _ in 0..25 {
        std::thread::sleep(Duration::from_micros(wait_us));
        wait_us = wait_us * 7919 % 20011;
        monitor.update();
    }
    until("all have made their calls", || done.iter().all(|done| Path::new(done).exists()));
    let has = monitor.sim.used(0);
    assert!(has > 0);
    assert_eq!(monitor.used(), has);
    std::fs::write(&end, "").unwrap();
    for child in children {
        let said = ProgramOutput::of(&wait(child));
        assert!(said.success, "{}", said.text);
    }
    assert_eq!(monitor.status().calls.killed, 0);
    monitor.wait_for(0);
    assert_eq!(monitor.sim.used(0), 0);
}

/// Calls that make, name or free objects go one after another; others go beside them.
#[test]
fn hanging_driver_call_delays_only_object_calls() {
    let monitor = Monitor::new();
    let asks = monitor.halfway("start\nalloc 5MiB as a", "info");
    let frees = monitor.halfway("start\nalloc 7MiB as a", "free a");
    monitor.wait_for(12 * MIB);
    monitor.sim.fault("alloc:0x40 hang times 1");
    let mut hanging = monitor.spawn(&["hold", "10MiB"]);
    until("it hangs", || monitor.sim.state()["hanging"] == 1);
    asks.go();
    let said = asks.end();
    said.must("info").must("used_mib=22");
    // What hangs may yet be given, so that it counts; a process that has exited counts no more.
    monitor.wait_for(17 * MIB);
    frees.go();
    let fills = monitor.spawn(&["fill"]);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((monitor.used(), monitor.sim.state()["hanging"].as_u64()), (17 * MIB, Some(1)));
    monitor.sim.fault("clear");
    frees.end().must("free a ok");
    assert!(wait(fills).status.success());
    monitor.wait_for(10 * MIB);
    hanging.kill().unwrap();
    wait(hanging);
    monitor.wait_for(0);
    assert_eq!((monitor.sim.used(0), monitor.status().calls.killed), (0, 0));
}

/// Made twice, it would need twice what there is.
#[test]
fn updates_make_no_allocation_fail_that_fits() {
    let monitor = Monitor::new();
    let load = "alloc 700MiB as a\nfree a\n".repeat(1000);
    let child = monitor.spawn(&script(&format!("start\n{load}")));
    let mut wait_us = 300;
    for _ in 0..40 {
        std::thread::sleep(Duration::from_micros(wait_us));
        wait_us = wait_us * 7919 % 5003;
        monitor.update();
    }
    let said = ProgramOutput::of(&wait(child));
    let failed: Vec<&str> = said.text.lines().filter(|line| line.contains("status=")).collect();
    assert!(said.success && failed.is_empty(), "{failed:?}");
    monitor.wait_for(0);
    assert_eq!(monitor.sim.used(0), 0);
    assert_eq!(monitor.status().calls.killed, 0);
}

/// What is exported and mapped has objects of the monitor's own before it, which the next program has to have, and to
/// free.
#[test]
fn updates_leave_nothing_of_the_monitors_own() {
    let monitor = Monitor::new();
    let load = "alloc 10MiB as a\nexport a\nuvm-map a\nfree a\nimport as b\nuvm-unmap a\nfree b\n";
    let load = format!("start\nuvm-init\n{}", load.repeat(300));
    let child = monitor.spawn(&script(&load));
    let mut wait_us = 300;
    for _ in 0..40 {
        std::thread::sleep(Duration::from_micros(wait_us));
        wait_us = wait_us * 7919 % 15013;
        monitor.update();
    }
    let said = ProgramOutput::of(&wait(child));
    let failed: Vec<&str> = said.text.lines().filter(|line| line.contains("status=")).collect();
    assert!(said.success && failed.is_empty(), "{failed:?}");
    monitor.wait_for(0);
    until("the driver has it all", || monitor.sim.used(0) == 0);
    assert_eq!(monitor.status().calls.killed, 0);
}

/// Interrupted callers are charged once, even if the runtime can't make them wait.
#[test]
fn interrupted_callers_are_charged_once_without_wait_support() {
    for attack in ["interrupt", "signal-storm"] {
        let monitor = Monitor::with(Managed::Refuse, false);
        let said = monitor.run(&["attack", attack]);
        println!("{attack}: {} {:?}", said.text.trim(), monitor.status().calls);
        monitor.wait_for(0);
        assert_eq!(monitor.sim.used(0), 0);
        assert_eq!(monitor.status().calls.killed, 0, "{}", said.text);
    }
}

/// The driver said that it was done, and no process's driver usage has the memory: none is charged for it.
#[test]
fn lost_free_causes_neither_refusal_nor_kill() {
    let monitor = Monitor::new();
    monitor.sim.fault("free lose times 1");
    let losing = monitor.halfway("start\nalloc 1000MiB as a\nfree a", "close\nstart");
    assert_eq!(monitor.sim.state()["gpus"][0]["lost_bytes"], 1000 * MIB);
    monitor.wait_for(0);
    assert_eq!(monitor.run(&["fill"]).number("got_bytes"), QUOTA);
    // Longer than an audit takes to find what exceeds the quota.
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!((monitor.used(), monitor.status().calls.killed), (0, 0));
    losing.go_on().must("free a ok");
    until("it ends with its client", || monitor.sim.used(0) == 0);
    assert_eq!((monitor.used(), monitor.status().calls.killed), (0, 0));
}

/// A process that can't be checked isn't dead: managed memory, which is in no driver usage,
/// would be free for others.
#[test]
fn descriptor_exhaustion_declares_no_process_dead() {
    let monitor = Monitor::with(Managed::Charge, true);
    let dir = tempfile::tempdir().unwrap();
    let end = dir.path().join("end");
    let load = format!("start\nuvm-init\nmanaged 64MiB\nwait {}", end.display());
    let child = monitor.spawn(&script(&load));
    monitor.wait_for(64 * MIB);
    monitor.limit_descriptors(1);
    std::thread::sleep(Duration::from_millis(2500));
    monitor.limit_descriptors(DESCRIPTORS);
    assert_eq!(monitor.used(), 64 * MIB);
    assert_eq!(monitor.run(&["fill"]).number("got_bytes"), QUOTA - 64 * MIB);
    std::fs::write(&end, "").unwrap();
    assert!(wait(child).status.success());
    monitor.wait_for(0);
    assert_eq!(monitor.status().calls.killed, 0);
}

/// More than the quota, because the driver rounds up, is taken back; where it can't be, the
/// driver has it still.
#[test]
fn what_the_driver_does_not_free_counts() {
    let monitor = Monitor::new();
    monitor.sim.fault("round 600MiB");
    monitor.sim.fault("free status 0x56");
    let dir = tempfile::tempdir().unwrap();
    let end = dir.path().join("end");
    let load = format!("start\nalloc 1MiB as a\nalloc 1MiB as b\nwait {}", end.display());
    let child = monitor.spawn(&script(&load));
    monitor.wait_for(1200 * MIB);
    assert_eq!(monitor.sim.used(0), 1200 * MIB);
    std::thread::sleep(Duration::from_millis(700));
    assert_eq!((monitor.used(), monitor.status().calls.killed), (1200 * MIB, 0));
    monitor.sim.fault("clear");
    std::fs::write(&end, "").unwrap();
    ProgramOutput::of(&wait(child)).must("b status=0x51");
    monitor.wait_for(0);
    assert_eq!(monitor.sim.used(0), 0);
}

/// The driver rounds up, and shows it before the call is back: that looks like memory allocated
/// bypassing the gate, and here, beyond the quota.
#[test]
fn driver_rounding_of_pending_calls_blames_no_process() {
    // An audit waits for the one, and not so long for the other.
    for late_ms in [80, 300] {
        let monitor = Monitor::new();
        monitor.sim.fault("round 600MiB");
        monitor.sim.fault(&format!("alloc:0x40 late {late_ms}"));
        let dir = tempfile::tempdir().unwrap();
        let end = dir.path().join("end");
        // The driver is asked soon after each new client; what counts meanwhile, at most.
        let ask_until = |done: &dyn Fn() -> bool| {
            let begun = Instant::now();
            let mut most = 0;
            while !done() {
                let late = begun.elapsed() > timeout();
                assert!(!late, "{late_ms} ms: {:?}", monitor.status());
                monitor.run(&script("start\nclose"));
                most = most.max(monitor.used());
            }
            most
        };
        let load = |name: &str| format!("start\nalloc 1MiB as {name}\nwait {}", end.display());
        let first = monitor.spawn(&script(&load("a")));
        let most = ask_until(&|| monitor.used() == 600 * MIB);
        assert!(most <= 600 * MIB || late_ms > 100, "{most}");
        let second = monitor.spawn(&script(&load("b")));
        ask_until(&|| monitor.status().calls.over_quota > 0);
        monitor.wait_for(600 * MIB);
        assert_eq!(monitor.status().calls.killed, 0);
        std::fs::write(&end, "").unwrap();
        ProgramOutput::of(&wait(first)).must("a ok");
        ProgramOutput::of(&wait(second)).must("b status=0x51");
        monitor.wait_for(0);
        assert_eq!(monitor.sim.used(0), 0);
    }
}

#[test]
fn mapping_pending_during_an_update_counts() {
    let monitor = Monitor::new();
    monitor.sim.fault("uvm:33 delay 500 times 1");
    let place = tempfile::tempdir().unwrap();
    let (freed, go) = (place.path().join("freed"), place.path().join("go"));
    let lines = format!(
        "start\nuvm-init\nalloc 700MiB as a\nuvm-map a\nfree a\ntouch {}\nwait {}\n\
         alloc 400MiB as b\nuvm-unmap a\nalloc 1000MiB as c",
        freed.display(),
        go.display()
    );
    let child = monitor.spawn(&script(&lines));
    monitor.wait_for(700 * MIB);
    std::thread::sleep(Duration::from_millis(200));
    monitor.update();
    until("the call is made", || freed.exists());
    assert_eq!(monitor.used(), 700 * MIB);
    // What another program knows it by is the file, and its mapped ranges.
    monitor.update();
    assert_eq!(monitor.used(), 700 * MIB);
    std::fs::write(&go, "").unwrap();
    let said = ProgramOutput::of(&wait(child));
    said.must("b status=0x51").must("c ok");
    monitor.wait_for(0);
    assert_eq!(monitor.sim.used(0), 0);
}

#[test]
fn updates_lose_no_mapping() {
    let monitor = Monitor::new();
    let load =
        "alloc 700MiB as a\nuvm-map a at 0x1000000000\nfree a\nuvm-cut 0x1000000000 700MiB\n";
    let load = load.repeat(200);
    let child =
        monitor.spawn(&script(&format!("start\nuvm-init\nuvm-range 0x1000000000 700MiB\n{load}")));
    let mut wait_us = 300;
    for _ in 0..20 {
        std::thread::sleep(Duration::from_micros(wait_us));
        wait_us = wait_us * 7919 % 5003;
        monitor.update();
        let driver = monitor.sim.used(0);
        assert!(driver <= QUOTA, "{driver}");
    }
    let said = ProgramOutput::of(&wait(child));
    assert!(!said.text.contains("status=0x51"), "{}", said.text);
    monitor.wait_for(0);
    assert_eq!(monitor.sim.used(0), 0);
    assert_eq!(monitor.status().calls.killed, 0);
}

/// Each process of these is behind a listener of its own, as each `exec` is.
#[test]
fn endless_calls_do_not_starve_later_listeners() {
    let monitor = Monitor::new();
    let busy = format!("start\n{}", "alloc 1MiB as a\nfree a\n".repeat(20_000));
    let mut siblings: Vec<_> = (0..4).map(|_| monitor.sibling(&busy)).collect();
    std::thread::sleep(Duration::from_millis(300));
    let said = monitor.run(&script("start\nalloc 1MiB as b"));
    assert!(said.success, "{}", said.text);
    let ended = siblings.iter_mut().any(|sibling| sibling.try_wait().unwrap().is_some());
    siblings.into_iter().for_each(end);
    assert!(!ended, "who came last was heard after others had ended");
}

/// A container whose use can't be seen has no quota, and the log says so; not at every audit.
#[test]
fn failed_audit_is_logged_once() {
    let cases = [
        ("control:0x2080018e status 0x56", "what processes hold of GPU 0 (status 0x56)"),
        ("control:0x2080018e errno 5", "what processes hold of GPU 0 (I/O error)"),
    ];
    for (fault, reported) in cases {
        let monitor = Monitor::new();
        let dir = tempfile::tempdir().unwrap();
        let [ready, go] = ["ready", "go"].map(|name| path(&dir, name));
        let lines = format!("start\nalloc 10MiB as a\ntouch {ready}\nwait {go}\nalloc 1MiB as b");
        let child = monitor.spawn(&script(&lines));
        until("it is ready", || Path::new(&ready).exists());
        monitor.sim.fault(fault);
        until("the log reports it", || monitor.log().contains(reported));
        std::thread::sleep(Duration::from_millis(1500));
        let log = monitor.log();
        let lines = log.lines().filter(|line| line.contains(reported)).count();
        assert_eq!(lines, 1, "{fault}: {log}");
        std::fs::write(&go, "").unwrap();
        wait(child);
    }
}
