//! A monitor that is killed: its container's driver calls fail from then on, and nothing is served again.

use std::time::Duration;

use crate::monitor::host::{Monitor, until};

#[test]
fn calls_fail_once_the_monitor_is_gone() {
    let monitor = Monitor::new();
    let program = monitor.halfway("start\nalloc 100MiB as a", "alloc 1MiB as b\ninfo");
    monitor.kill();
    until("it is gone", || !monitor.is_alive());
    let said = program.go_on();
    // ENOSYS: its listener is closed.
    said.must("alloc b errno=38");
    assert!(!said.text.contains("b ok"), "{}", said.text);
    assert_eq!(monitor.sim.used(0), 0, "the program has ended");
}

/// A call that waits in the driver has finished when the driver returns from it, and isn't made again.
#[test]
fn killed_monitor_fails_and_never_repeats_pending_calls() {
    let monitor = Monitor::new();
    let program = monitor.halfway("start\nalloc 100MiB as a", "alloc 10MiB as b\nalloc 10MiB as c");
    monitor.sim.fault("alloc:0x40 hang times 1");
    program.go();
    until("it hangs", || monitor.sim.state()["hanging"] == 1);
    let before = monitor.sim.state()["calls"]["alloc"].as_u64();
    monitor.kill();
    std::thread::sleep(Duration::from_millis(100));
    monitor.sim.fault("clear");
    let said = program.end();
    said.must("alloc b errno=38").must("alloc c errno=38");
    assert_eq!(monitor.sim.state()["calls"]["alloc"].as_u64(), before, "no call was made again");
    until("the driver has it all", || monitor.sim.used(0) == 0);
    assert!(!monitor.is_alive());
}
