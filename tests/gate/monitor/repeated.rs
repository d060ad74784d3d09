//! Calls that are made twice, and failed the first time: nothing was done then, whichever process asks.

use std::path::Path;
use std::time::Duration;

use cgpu_monitor::gate::settings::Managed;

use crate::monitor::host::{MIB, Monitor, ProgramOutput, path, script, until, wait};

/// What a program did, and what it then had.
#[derive(Debug)]
struct Had {
    text: String,
    driver_bytes: u64,
    state_bytes: u64,
}

/// Runs lines whose calls signals can interrupt.
fn interruptible(lines: &str) -> Had {
    let monitor = Monitor::with(Managed::Refuse, false);
    let program = monitor.halfway(&format!("start\nuvm-init\n{lines}"), "");
    let (driver_bytes, state_bytes) = (monitor.sim.used(0), monitor.used());
    let text = program.go_on().text;
    assert_eq!(monitor.status().calls.killed, 0, "{text}");
    Had { text, driver_bytes, state_bytes }
}

const MAPPED: &str = "alloc 700MiB as a\nuvm-range 0x1000000000 700MiB\n\
                      uvm-map a at 0x1000000000\nfree a";

/// Only the mapping has a handle of it, so no process's driver usage shows it.
#[test]
fn range_wrongly_freed_twice_stays_charged() {
    for how in ["uvm-free", "uvm-cut"] {
        let had = interruptible(&format!(
            "{MAPPED}\nrepeats 1\n{how} 0x1000000000 701MiB\nrepeats 0\nalloc 700MiB as b"
        ));
        let within = had.driver_bytes <= 1024 * MIB && had.state_bytes >= had.driver_bytes;
        assert!(within, "{how}: {had:?}");
    }
}

#[test]
fn client_freed_twice_by_another_file_stays_charged() {
    let had = interruptible(
        "alloc 700MiB as a\nrepeats 1\nfree-client-by-other\nrepeats 0\nalloc 700MiB as b",
    );
    assert_eq!((had.driver_bytes, had.state_bytes), (700 * MIB, 700 * MIB), "{had:?}");
    assert!(had.text.contains("alloc b status="), "{had:?}");
}

/// Else managed memory there would be taken for what was announced.
#[test]
fn a_pool_that_is_refused_twice_announces_nothing() {
    let had = interruptible(
        "repeats 1\nuvm-pool 0x10000001000 1048575KiB\nuvm-pool 0x100000ff001 1048575KiB\n\
         repeats 0\nmanaged 512MiB at 0x10000100000",
    );
    assert!(had.text.contains("managed errno"), "{had:?}");
}

/// The driver wasn't even asked.
#[test]
fn range_failing_by_errno_announces_nothing() {
    let monitor = Monitor::of_driver("595.45.04");
    let said = monitor.run(&script(
        "start\nuvm-init\nuvm-p2p-of-nothing 0x10000000000 1GiB\n\
         managed 512MiB at 0x10000100000",
    ));
    said.must("uvm-p2p-of-nothing errno").must("managed errno");
}

/// A struct as it came back is a struct to ask with.
#[test]
fn one_struct_makes_several() {
    let had = interruptible("heaps 100MiB");
    assert_eq!((had.driver_bytes, had.state_bytes), (300 * MIB, 300 * MIB), "{had:?}");
}

/// Whatever the struct's status was before the call.
#[test]
fn free_made_before_an_update_is_reported() {
    let monitor = Monitor::new();
    let before = format!("start\nuvm-init\n{MAPPED}");
    let program = monitor.halfway(&before, "stale 255\nuvm-free 0x1000000000 700MiB");
    std::thread::sleep(Duration::from_millis(300));
    monitor.sim.fault("uvm:34 late 400 times 1");
    program.go();
    std::thread::sleep(Duration::from_millis(150));
    monitor.update();
    let said = program.end();
    assert!(said.success, "{}", said.text);
}

/// On any kernel: a wrong free during which a monitor died.
#[test]
fn range_not_freed_before_an_update_stays_charged() {
    let monitor = Monitor::new();
    let dir = tempfile::tempdir().unwrap();
    let [ready, reported, go] = ["ready", "reported", "go"].map(|name| path(&dir, name));
    let lines = format!(
        "start\nuvm-init\n{MAPPED}\ntouch {ready}\nuvm-free 0x1000000000 701MiB\ntouch {reported}\n\
         wait {go}"
    );
    monitor.sim.fault("uvm:34 late 400 times 1");
    let child = monitor.spawn(&script(&lines));
    until("it is ready", || Path::new(&ready).exists());
    std::thread::sleep(Duration::from_millis(150));
    monitor.update();
    until("it is reported", || Path::new(&reported).exists());
    let (driver, state) = (monitor.sim.used(0), monitor.used());
    std::fs::write(&go, "").unwrap();
    let said = ProgramOutput::of(&wait(child));
    assert!(state >= driver, "driver {driver} state {state} {}", said.text);
}

/// A thread's call failed, and no thread took the answer; the next monitor undoes what the call hadn't created.
#[test]
fn abandoned_failed_call_undoes_no_earlier_object() {
    for replaced in [false, true] {
        let monitor = Monitor::with(Managed::Refuse, false);
        let dir = tempfile::tempdir().unwrap();
        let (ready, go) = (path(&dir, "ready"), path(&dir, "go"));
        monitor.sim.fault("alloc:0x40 delay 400 times 1");
        let child = monitor.spawn(&script(&format!("start\ntaken {ready} {go}")));
        until("it is ready", || Path::new(&ready).exists());
        if replaced {
            monitor.update();
        }
        std::fs::write(&go, "").unwrap();
        let said = ProgramOutput::of(&wait(child));
        assert!(said.success, "replaced {replaced}: {}", said.text);
    }
}

/// An export names a device that the memory isn't of, whose own is freed meanwhile.
#[test]
fn what_is_exported_is_what_was_entered() {
    let monitor = Monitor::new();
    monitor.sim.fault("control:0x3d05 delay 800 times 1");
    let program = monitor.halfway("start\nexchanged\nalloc 700MiB as b", "");
    std::thread::sleep(Duration::from_millis(2500));
    let (driver, state) = (monitor.sim.used(0), monitor.used());
    let said = program.go_on();
    assert!(driver <= 1024 * MIB, "driver {driver} state {state} {}", said.text);
}
