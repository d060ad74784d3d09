//! Memory of one GPU that has handles below another's device, in whose driver usage they show.

use std::time::{Duration, Instant};

use crate::monitor::attacks::watched;
use crate::monitor::host::{MIB, Monitor, ProgramOutput, path, until};

/// Both GPUs' quotas, and what counts on them.
fn used(monitor: &Monitor) -> (u64, u64) {
    let gpus = monitor.status().gpus;
    (gpus[0].used_bytes, gpus[1].used_bytes)
}

/// `ways` makes handles of memory of the first GPU below the second's device, whose driver usage exceeds its
/// quota then, all of it known: no process is killed, and no more fits than did.
fn innocent(ways: &str, halfway: impl Fn(&Monitor)) -> ProgramOutput {
    let monitor = Monitor::of_two_gpus();
    let before = format!("start\nalloc 700MiB as a\n{ways}\nalloc 600MiB as c");
    let dir = tempfile::tempdir().unwrap();
    let end = path(&dir, "end");
    let after = "alloc 425MiB as over\nalloc 424MiB as rest\nfree rest\nfree a\nfree c";
    let program = monitor.halfway(&before, &format!("{after}\nwait {end}"));
    until("it has both", || used(&monitor) == (700 * MIB, 600 * MIB));
    halfway(&monitor);
    // Some audits, and queries of the handles.
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(used(&monitor), (700 * MIB, 600 * MIB));
    program.go();
    // Its creator's handle is gone: which process owns it now?
    until("but for the names nothing is left", || used(&monitor) == (700 * MIB, 0));
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        let (first, second) = used(&monitor);
        assert!(second == 0 && [0, 700 * MIB].contains(&first), "{first} and {second} bytes");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::fs::write(&end, "").unwrap();
    let said = program.end();
    said.must("alloc over status=0x51").must("alloc rest ok").must("free c ok");
    until("nothing is left", || used(&monitor) == (0, 0) && monitor.sim.used(0) == 0);
    assert_eq!(monitor.status().calls.killed, 0);
    said
}

/// Handles below another GPU's device count on the GPU where their memory is.
#[test]
fn memory_counts_on_its_gpu_despite_foreign_handles() {
    innocent("gpu 1\ndup a as b\ndup a as d", |_| {}).must("dup d ok");
}

#[test]
fn the_same_of_what_is_imported_there() {
    innocent("export a\ngpu 1\nimport as b", |_| {}).must("import b ok");
}

/// The monitor after an update knows in which GPU's driver usage the handles are attributed.
#[test]
fn updated_monitor_knows_where_handles_are_attributed() {
    innocent("gpu 1\ndup a as b\ndup b as d", Monitor::update).must("dup d ok");
}

/// Memory that isn't in a GPU's driver usage, because its handles are below another's device, frees nothing there.
#[test]
fn memory_that_shows_elsewhere_hides_nothing() {
    watched("hide-slack across", Monitor::of_two_gpus());
}
