//! A driver whose structs have grown since the release that the monitor takes it for.

use crate::monitor::host::{Monitor, QUOTA, script};

/// As of a release between 600 and 620 that was never compared: the driver copies its own structs,
/// however many bytes the monitor's have, and answers in the fields that are new.
#[test]
fn larger_driver_structs_overwrite_no_monitor_memory() {
    for driver in ["535.161.08", "605.10"] {
        let monitor = Monitor::of_driver(driver);
        monitor.sim.fault("grown 200");
        let lines =
            "alloc 10MiB as a\nuvm-map a\nexport a\nimport as b\nuvm-unmap a\nfree b\nfree a\n";
        let said = monitor.run(&script(&format!(
            "start\nuvm-init\n{}uvm-range 0x1000000000 2MiB",
            lines.repeat(20)
        )));
        assert!(said.success && !said.text.contains("status="), "{driver}: {}", said.text);
        assert_eq!(monitor.run(&["fill"]).number("got_bytes"), QUOTA, "{driver}");
        monitor.wait_for(0);
        assert_eq!(monitor.sim.used(0), 0, "{driver}");
        assert_eq!((monitor.is_alive(), monitor.status().calls.killed), (true, 0), "{driver}");
    }
}
