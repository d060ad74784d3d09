//! What a monitor does while its container rests: next to nothing, until there is something to see.

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::unistd::Pid;

use crate::gated::Gated;
use crate::support::{eventually, run_with_timeout};

/// More bytes than wakes read that find nothing new, and fewer than mounts have in `mountinfo`, with the container's
/// state in its runtime's file.
const LOOK_BYTES: u64 = 4096;

/// How often the process woke, and how many bytes it read.
fn done(worker: Pid) -> (u64, u64) {
    let number = |text: &str, name: &str| -> u64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().parse().unwrap()
    };
    let tasks = fs::read_dir(format!("/proc/{worker}/task")).unwrap().flatten();
    // A thread that answers somebody may have ended meanwhile.
    let statuses = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
    let wakes = statuses.map(|status| number(&status, "voluntary_ctxt_switches:"));
    let wakes = wakes.sum();
    (wakes, number(&fs::read_to_string(format!("/proc/{worker}/io")).unwrap(), "rchar:"))
}

/// Longer than between two looks at the figures of a GPU.
const TWO_LOOKS: Duration = Duration::from_secs(5);

/// Whether the process wakes, and reads less than a look at mounts does, in a while that it looks in.
fn rests(worker: Pid) -> bool {
    let (begun, before) = (Instant::now(), done(worker));
    assert!(eventually(|| done(worker).0 >= before.0 + 2), "{worker} does not wake");
    std::thread::sleep(TWO_LOOKS.saturating_sub(begun.elapsed()));
    done(worker).1 < before.1 + LOOK_BYTES
}

#[test]
fn a_monitor_of_a_container_that_rests_looks_at_its_mounts_again_when_they_change() {
    let gated = Gated::new();
    let bundle = gated.sleeping("rests", 1000);
    let (_, worker) = gated.monitor("rests_______");
    // The mounts of a container that has just begun may still be being made.
    assert!(eventually(|| rests(worker)), "it reads the same again and again");
    let (wakes, read) = done(worker);
    let pid = gated.host.container("rests")["pid"].as_i64().unwrap();
    let mut mount = Command::new("nsenter");
    mount.args(["--target", &pid.to_string(), "--mount", "mount", "-t", "tmpfs", "none", "/tmp"]);
    run_with_timeout(&mut mount, Duration::from_secs(60)).ok();
    let has_looked = || done(worker).1 >= read + LOOK_BYTES;
    // Without the change it would look after fifteen looks, a minute.
    assert!(eventually(|| has_looked() || done(worker).0 > wakes + 8));
    assert!(has_looked(), "it did not see that a mount came");
    // What it calls the driver for is counted as ever.
    gated.exec(&bundle, &["run", "start", "alloc 100MiB as a"]).ok();
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}
