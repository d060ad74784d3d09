//! The gate's worker, against the simulated driver: real programs under a real filter.
//! Needs root, `/dev/fuse`, and the workspace's programs (`cargo build --workspace --bins`).

#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "gate/filter.rs"]
mod filter;
#[path = "gate/host.rs"]
mod host;

use host::{MIB, Monitor, QUOTA, Said, wait};

#[test]
fn a_program_sees_the_quota_as_its_gpu_and_gets_no_more() {
    let monitor = Monitor::new();
    let said = monitor.run(&["demo", "2048MiB"]);
    said.must("1024 MiB total, 1024 MiB free");
    said.must("allocated 1024 MiB of 2048 MiB asked for");
    monitor.wait_for(0);
    assert_eq!(monitor.sim.used(0), 0);
}

#[test]
fn filling_gets_the_quota_to_the_page() {
    let monitor = Monitor::new();
    let said = monitor.run(&["fill"]);
    assert_eq!(said.number("got_bytes"), QUOTA, "{}", said.text);
    said.must("NO_MEMORY");
}
