//! Memory that the driver takes next to quotas: context buffers of channel groups.

use crate::monitor::host::{MIB, Monitor, script, until, wait};

/// Groups that a container has at most, and what each takes.
const MOST: u64 = 256;
const GROUP: u64 = 8 * MIB;

fn monitor() -> Monitor {
    let monitor = Monitor::new();
    monitor.sim.fault("group 8MiB");
    monitor
}

/// Before the bound was, one container had all 4096 MiB of its GPU so, under a quota of 1024.
#[test]
fn channel_groups_stay_within_their_bound() {
    for what in ["groups", "channels"] {
        let monitor = monitor();
        let said = monitor.run(&script(&format!("start\n{what} 600 as g")));
        said.must(&format!("groups made={MOST} status=0x1a"));
        until("all is free again", || monitor.sim.used(0) == 0);
        // A process that has exited has none.
        let said = monitor.run(&script(&format!("start\n{what} {MOST} as g")));
        said.must(&format!("groups made={MOST} \n"));
        until("all is free again", || monitor.sim.used(0) == 0);
        assert!(monitor.log().contains("[isolation] channel_groups is their bound"));
        assert_eq!(monitor.status().calls.killed, 0);
    }
}

/// Channel groups are counted by the monitor before and after an update, and freed ones are counted
/// back.
#[test]
fn channel_group_count_survives_updates_and_frees() {
    for what in ["groups", "channels"] {
        let monitor = monitor();
        let holder = monitor.halfway(&format!("start\n{what} 600 as g"), "free g\nsleep 1000");
        assert_eq!(monitor.sim.used(0), MOST * GROUP);
        let more = |count: u64| {
            let said = monitor.run(&script(&format!("start\n{what} 5 as g")));
            said.must(&format!("groups made={count} status=0x1a"));
        };
        more(0);
        monitor.update();
        more(0);
        holder.go();
        until("one is free", || monitor.sim.used(0) == (MOST - 1) * GROUP);
        more(1);
        monitor.update();
        more(1);
        holder.kill();
        until("all is free", || monitor.sim.used(0) == 0);
        let said = monitor.run(&script(&format!("start\n{what} {MOST} as g")));
        said.must(&format!("groups made={MOST} \n"));
    }
}

/// Another handle retains a group whose first handle is freed.
#[test]
fn other_names_of_a_channel_group_count() {
    let monitor = monitor();
    let lines = "start\ngroups 255 as g\ndup g as h\nfree g\ngroups 5 as i\ndup h as k\n\
                 free-device\nfree-client";
    let child = monitor.spawn(&script(lines));
    let output = wait(child);
    let text = String::from_utf8_lossy(&output.stdout);
    let expected = [
        "groups made=255 ",
        "dup h ok",
        "free g ok",
        "groups made=1 status=0x1a",
        "dup k status=0x1a",
    ];
    for line in expected {
        assert!(text.contains(line), "no {line:?} in {text}");
    }
    until("all is free", || monitor.sim.used(0) == 0);
    let said = monitor.run(&script("start\ngroups 256 as g\nfree-device\ndevice 0\ngroups 1 as g"));
    said.must("groups made=256 ").must("groups made=1 \n");
}
