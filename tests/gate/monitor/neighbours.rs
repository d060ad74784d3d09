//! Programs that want more of a GPU than their container's share, judged by what a neighbour gets.
//!
//! The neighbour is past the monitor, with the slice that the share gives it, and always has work.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cgpu_core::sched::{Period, Span};
use cgpu_host::registry::share::{Share, Turns};

use crate::monitor::host::{Monitor, end, program, script, spawn_with_us, until};

/// Alike, and each has so many per cent of the GPU: the rest goes by switching.
const FAIR_PER_CENT: u128 = 47;

/// Work for ever, in kernels of 0.5 ms.
const WORK: &str = "kernels g 100000000 of 500";

const WORK_OUTSIDE: &str = "kernels c 100000000 of 500";

/// A monitor of a container that is to have as much as its neighbour.
fn alike() -> Monitor {
    let monitor = Monitor::sharing();
    monitor.share(Some(&share(4096)));
    until("it has heard of it", || monitor.status().gpus[0].round.is_some());
    monitor
}

fn share(own_us: u64) -> Share {
    let own = ("test00000000".to_owned(), Period { us: own_us, each: false });
    let other = ("another00000".to_owned(), Period { us: 4096, each: false });
    Share { policy: 1, rounds: [own, other].into(), turns: None }
}

/// A program next to the container.
struct Neighbour {
    child: Child,
    client: u64,
}

impl Neighbour {
    fn beside(monitor: &Monitor) -> Self {
        let lines = ["start", "compute 1 as g", "compute-mode g 2", SLICE, WORK, "sleep 1000"];
        let mut command = Command::new(program("rmtool"));
        command.arg("--dev").arg(monitor.sim.dev()).args(script(&lines.join("\n")));
        command.stdout(Stdio::null());
        let child = spawn_with_us(&mut command);
        let pid = u64::from(child.id());
        let found = || {
            let state = monitor.sim.state();
            let clients = state["clients"].as_array().expect("a list").clone();
            let own = clients.into_iter().find(|client| client["process"] == pid)?;
            let computes =
                |client: &serde_json::Value| busy_us_of(client).is_some_and(|busy_us| busy_us > 0);
            Some(own).filter(computes)?["handle"].as_u64()
        };
        until("the neighbour computes", || found().is_some());
        Neighbour { client: found().expect("it does"), child }
    }

    fn busy_us(&self, monitor: &Monitor) -> u64 {
        let state = monitor.sim.state();
        let mut clients = state["clients"].as_array().expect("a list").iter();
        let own = clients.find(|client| client["handle"] == self.client);
        own.and_then(busy_us_of).expect("it is there")
    }

    /// Waits for a moment in which the neighbour has so many per cent of the GPU, for as long as an attack
    /// goes on: in any other, the monitor may have come late.
    #[track_caller]
    fn soon_has(&self, monitor: &Monitor, per_cent: u128, beside: &str) {
        until(&format!("the neighbour has {per_cent} per cent beside {beside}"), || {
            let (begun, before) = (Instant::now(), self.busy_us(monitor));
            std::thread::sleep(Duration::from_millis(800));
            let busy_us = u128::from(self.busy_us(monitor) - before);
            100 * busy_us / begun.elapsed().as_micros() >= per_cent
        });
    }

    fn ends(self) {
        end(self.child);
    }
}

/// 4096 µs.
const SLICE: &str = "control g 0xa06c0103 with 0010000000000000";

fn busy_us_of(client: &serde_json::Value) -> Option<u64> {
    let objects = client["objects"].as_array()?.iter();
    Some(objects.filter_map(|object| object["busy_us"].as_u64()).sum())
}

/// A program that sets its own slice and mode has no more than its share.
#[test]
fn program_setting_its_own_slice_gets_no_more() {
    let monitor = alike();
    let neighbour = Neighbour::beside(&monitor);
    // 65,536 µs; WFI, and kernels of 50 ms, which then would outlast all slices.
    let greedy = "start\ncompute 1 as g\ncontrol g 0xa06c0103 with 0000010000000000\ncompute-mode g 0\n\
                  kernels g 1000000 of 50000";
    let greedy = monitor.halfway(greedy, "sleep 1000");
    neighbour.soon_has(
        &monitor,
        FAIR_PER_CENT * 95 / 100,
        "one with a slice and a mode of its own",
    );
    greedy.kill();
    neighbour.soon_has(&monitor, 99, "no other");
    neighbour.ends();
}

#[test]
fn forking_program_gets_no_more_than_its_share() {
    let monitor = alike();
    let neighbour = Neighbour::beside(&monitor);
    let mut forks = Vec::new();
    for (count, per_cent) in [(4, 95), (16, 90)] {
        while forks.len() < count {
            let lines = format!("start\ncompute 1 as g\ncompute-mode g 2\n{WORK}");
            forks.push(monitor.halfway(&lines, "sleep 1000"));
        }
        neighbour.soon_has(&monitor, FAIR_PER_CENT * per_cent / 100, &format!("{count} processes"));
    }
    forks.into_iter().for_each(crate::monitor::host::Halfway::kill);
    // As many groups in one process.
    let groups = "compute 1 as g\ncompute-mode g 2\nkernels g 100000000 of 500\n".repeat(64);
    let many = monitor.halfway(&format!("start\n{groups}"), "sleep 1000");
    neighbour.soon_has(&monitor, FAIR_PER_CENT * 90 / 100, "64 groups of one process");
    many.kill();
    neighbour.ends();
}

/// Who rests doesn't count, as the driver's own samples tell; who wakes three at once has no more than its
/// share soon after.
#[test]
fn container_waking_three_processes_gets_no_more() {
    let monitor = alike();
    let neighbour = Neighbour::beside(&monitor);
    let group = "start\ncompute 1 as g\ncompute-mode g 2";
    let busy = monitor.halfway(&format!("{group}\n{WORK}"), "sleep 1000");
    let rests = [(); 3].map(|()| monitor.halfway(group, &format!("{WORK}\nsleep 1000")));
    // The neighbour's is one of the longest.
    until("the one that works has all of the slice", || {
        monitor.slices() == [836, 836, 836, 4096, 4096]
    });
    neighbour.soon_has(&monitor, FAIR_PER_CENT * 95 / 100, "one that works and three that rest");
    rests.iter().for_each(crate::monitor::host::Halfway::go);
    until("all four share it", || monitor.slices() == [836, 836, 836, 836, 4096]);
    neighbour.soon_has(&monitor, FAIR_PER_CENT * 95 / 100, "three that woke");
    rests.into_iter().chain([busy]).for_each(crate::monitor::host::Halfway::kill);
    neighbour.ends();
}

/// A program that can't be reached any more when its share becomes smaller is taken off the GPU, and
/// comes back with its share.
#[test]
fn program_hiding_its_descriptor_retains_no_larger_share() {
    let monitor = alike();
    let neighbour = Neighbour::beside(&monitor);
    let lines = format!("start\ncompute 1 as g\ncompute-mode g 2\n{WORK}\nclose-into-a-socket");
    let hides = monitor.halfway(&lines, "sleep 1000");
    neighbour.soon_has(&monitor, FAIR_PER_CENT * 95 / 100, "one that has hidden its descriptor");
    monitor.share(Some(&share(1024)));
    neighbour.soon_has(&monitor, 75, "one whose share became a fifth");
    assert!(monitor.log().contains("a program is taken off the GPU"), "{}", monitor.log());
    monitor.share(Some(&share(4096)));
    until("it is back", || monitor.channels_off().iter().all(|off| !off));
    hides.kill();
    neighbour.ends();
}

/// No slice can be set of a channel outside a group: a container has few of these, and its groups have the less.
#[test]
fn container_computing_outside_groups_gets_little_more() {
    let monitor = alike();
    let neighbour = Neighbour::beside(&monitor);
    let channel = format!("channel 1 by 0xc56f as c\ncompute-mode c 2\n{WORK_OUTSIDE}\n").repeat(4);
    let lines = format!("start\ncompute 1 as g\ncompute-mode g 2\n{WORK}\n{channel}");
    // Video isn't shared: engine 0x13 decodes.
    let more = "channel 1 by 0xc56f as more\nchannel 0x13 by 0xc56f as video";
    let outside = monitor.halfway(&lines, more);
    until("its group has what is left", || monitor.slices() == [256, 4096]);
    neighbour.soon_has(&monitor, FAIR_PER_CENT * 85 / 100, "one with four channels outside groups");
    outside.go_on().must("channel more status=0x1a").must("channel video ok");
    assert!(monitor.log().contains("compute outside groups is refused"), "{}", monitor.log());
    neighbour.ends();
}

/// What the monitor checked is another thing by the time that the driver reads it. A group that is to run has to
/// be scheduled, and the monitor makes that call.
#[test]
fn object_of_swapped_class_gets_no_more() {
    let monitor = alike();
    let neighbour = Neighbour::beside(&monitor);
    monitor.sim.fault("alloc:0x9067 swap 0xa06c");
    let lines = format!("start\ncompute 1 by 0x9067 as g\ncompute-mode g 2\n{WORK}");
    let group = monitor.halfway(&lines, "sleep 1000");
    assert_eq!(monitor.slices(), [4096, 4096]);
    neighbour.soon_has(&monitor, FAIR_PER_CENT * 95 / 100, "a group whose creation was not seen");
    group.kill();
    monitor.sim.fault("clear");
    monitor.sim.fault("alloc:0x9067 swap 0xc56f");
    let channel = format!("channel 1 by 0x9067 as c\ncompute-mode c 2\n{WORK_OUTSIDE}\n").repeat(4);
    let more = "channel 1 by 0x9067 as more";
    let channels = monitor.halfway(&format!("start\n{channel}"), more);
    neighbour.soon_has(
        &monitor,
        FAIR_PER_CENT * 85 / 100,
        "four channels whose creation was not seen",
    );
    channels.go_on().must("channel more status=0x1a");
    neighbour.ends();
}

/// Turns of the container: from when to when, in milliseconds of a frame of 400.
fn spans(spans: &[(u64, u64)]) -> Share {
    let span = |(from, to): &(u64, u64)| Span { from_us: from * 1000, to_us: to * 1000 };
    let spans = [("test00000000".to_owned(), spans.iter().map(span).collect())].into();
    Share { policy: 0, turns: Some(Turns { frame_us: 400_000, spans }), ..share(4096) }
}

/// Under turns: a program that starts while its container is off, with one group after another, computes when
/// its turn comes, as often as that is, and whichever monitor serves it then. The driver counts how often it disables.
#[test]
fn program_started_while_off_computes_in_its_window() {
    let monitor = Monitor::sharing();
    monitor.share(Some(&spans(&[])));
    until("it has heard of it", || monitor.status().gpus[0].round.is_some());
    let lines =
        format!("start\ncompute 1 as g\ncompute 1 as h\ncompute 1 as i\ncompute-mode g 2\n{WORK}");
    let program = monitor.halfway(&lines, "sleep 1000");
    let busy_us = || {
        let state = monitor.sim.state();
        let clients = state["clients"].as_array().expect("a list").iter();
        clients.filter_map(busy_us_of).sum::<u64>()
    };
    let are = |off: bool| {
        let channels = monitor.channels_off();
        channels.len() == 3 && channels.iter().all(|is_off| *is_off == off)
    };
    for round in 0..4 {
        until("its channels are off", || are(true));
        if round == 2 {
            monitor.update();
        }
        monitor.share(Some(&spans(&[(0, 400)])));
        until("its channels are on", || are(false));
        let before = busy_us();
        until("it computes", || busy_us() > before);
        monitor.share(Some(&spans(&[])));
    }
    program.kill();
}

/// Under turns: scheduling again and again enables no group that is off; and a monitor that is
/// killed in the middle of a turn is followed by one that goes on.
#[test]
fn program_rescheduling_itself_repeatedly_stays_off() {
    let monitor = Monitor::sharing();
    monitor.share(Some(&spans(&[(0, 200)])));
    until("it has heard of it", || monitor.status().gpus[0].round.is_some());
    let neighbour = Neighbour::beside(&monitor);
    let again = "control g 0xa06c0101 with 010000\ncontrol g 0xa06c0101 with 010100\n".repeat(200);
    let lines = format!("start\ncompute 1 as g\ncompute-mode g 2\n{WORK}");
    let storm = monitor.halfway(&lines, &format!("{again}sleep 1000"));
    // Half of the time alone, half of it alike would be 73; always alike, 47.
    storm.go();
    neighbour.soon_has(&monitor, 65, "one that schedules itself");
    monitor.share(Some(&spans(&[])));
    for _ in 0..5 {
        monitor.update();
    }
    neighbour.soon_has(&monitor, 95, "one that is off");
    storm.kill();
    neighbour.ends();
}

/// Under turns: a container that is off names a neighbour's channel as its own, which the driver refuses.
#[test]
fn program_naming_foreign_channel_disables_no_neighbour() {
    let monitor = Monitor::sharing();
    let spans = [("test00000000".to_owned(), Vec::new())].into();
    let turns = Some(Turns { frame_us: 400_000, spans });
    monitor.share(Some(&Share { policy: 0, turns, ..share(4096) }));
    until("it has heard of it", || monitor.status().gpus[0].round.is_some());
    let neighbour = Neighbour::beside(&monitor);
    let state = monitor.sim.state();
    let mut clients = state["clients"].as_array().expect("a list").iter();
    let theirs = clients.find(|client| client["handle"] == neighbour.client).expect("it is there");
    let objects = theirs["objects"].as_array().expect("a list");
    let of_class = |class: u64| {
        let of = objects.iter().find(|object| object["class"] == class).expect("there is one");
        of["handle"].as_u64().expect("a number")
    };
    let (device, channel) = (of_class(0x80), of_class(0xc56f));
    let lines = format!(
        "start\ncompute 1 as g\nchannel-named {} {device} {channel}\nchannel-named {} {device} {channel}",
        neighbour.client, neighbour.client,
    );
    let names = monitor.halfway(&lines, "sleep 1000");
    until("its own is off", || monitor.channels_off().iter().any(|off| *off));
    for _ in 0..3 {
        neighbour.soon_has(&monitor, 95, "one that has named its channel");
        assert_eq!(monitor.channels_off().iter().filter(|off| **off).count(), 1);
    }
    names.kill();
    neighbour.ends();
}
