//! What a monitor does while its container calls nothing.

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]

use std::fs;
use std::time::Duration;

use nix::unistd::Pid;

use crate::gated::Gated;
use crate::support::eventually;

/// More bytes than wakes read that find nothing new, and fewer than mounts have in `mountinfo`, with the container's
/// state in its runtime's file.
const CHECK_BYTES: u64 = 4096;

/// How often the process woke, and how many bytes it read.
fn done(monitor: Pid) -> (u64, u64) {
    let number = |text: &str, name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().parse().unwrap()
    };
    let tasks = fs::read_dir(format!("/proc/{monitor}/task")).unwrap().flatten();
    // A thread that answers somebody may have ended meanwhile.
    let statuses = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    let wakes = statuses.map(|status| number(&status, "voluntary_ctxt_switches:"));
    let wakes = wakes.sum();
    (wakes, number(&fs::read_to_string(format!("/proc/{monitor}/io")).unwrap(), "rchar:"))
}

/// A container's mounts are read every second until they have settled, and seldom afterwards.
const QUIET: Duration = Duration::from_secs(5);

/// The monitor of a container that never called does next to nothing.
#[test]
fn monitor_of_never_calling_container_stays_idle() {
    let gated = Gated::new();
    let bundle = gated.sleeping("idle", 1000);
    let monitor = gated.monitor("idle________");
    let is_quiet = || {
        let (wakes, bytes) = done(monitor);
        std::thread::sleep(QUIET);
        let now = done(monitor);
        now.1 < bytes + CHECK_BYTES && now.0 <= wakes + 4
    };
    assert!(eventually(is_quiet), "it reads the same again and again");
    // Its calls count as ever.
    gated.exec(&bundle, &["run", "start", "alloc 100MiB as a"]).ok();
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}
