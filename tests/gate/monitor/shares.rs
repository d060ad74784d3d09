//! Shares of computing time: slices of channel groups, by a file that the monitor follows.

use std::time::{Duration, Instant};

use cgpu_core::sched::{Period, Span};
use cgpu_host::registry::share::{Share, Turns};

use nix::sys::signal::Signal;

use crate::monitor::host::{Monitor, script, until};

/// What the container has that the monitor of these tests is of, and one next to it.
fn share(us: u64, each: bool) -> Share {
    let other = ("another00000".to_owned(), Period { us: 4096, each });
    let own = ("test00000000".to_owned(), Period { us, each });
    Share { policy: 2, rounds: [own, other].into(), turns: None }
}

/// A monitor that has read its share.
fn sharing(us: u64) -> Monitor {
    let monitor = Monitor::sharing();
    monitor.share(Some(&share(us, false)));
    until("it has heard of it", || monitor.status().gpus[0].round.is_some());
    monitor
}

/// The compute preemption mode of the only channel group.
fn mode(monitor: &Monitor) -> Option<u64> {
    let state = monitor.sim.state();
    let clients = state["clients"].as_array().expect("a list").iter();
    let mut objects = clients.flat_map(|client| client["objects"].as_array().expect("a list"));
    objects.find_map(|object| object["compute_mode"].as_u64())
}

#[track_caller]
fn until_slices(monitor: &Monitor, expected: &[u64]) {
    until(&format!("slices are {expected:?}"), || monitor.slices() == expected);
}

/// 2048 µs, as CUDA asks for.
const ASKS: &str = "control g 0xa06c0103 with 0008000000000000";

/// A group has its slice before it runs, and the new one whenever the share changes.
#[test]
fn group_slice_is_set_before_running_and_updated() {
    let monitor = sharing(8192);
    let lines = format!("start\ncompute 1 as g\n{ASKS}");
    let holder = monitor.halfway(&lines, "sleep 1000");
    // At once: the call that schedules it sets it, and what the program asks for isn't made.
    assert_eq!(monitor.slices(), [8192]);
    monitor.share(Some(&share(24576, false)));
    until_slices(&monitor, &[24576]);
    // The next monitor goes on, though no change is reported to it.
    monitor.update();
    monitor.share(Some(&share(4096, false)));
    until_slices(&monitor, &[4096]);
    monitor.share(None);
    // The former monitor knew what its program had asked for; this one gives it what CUDA asks for.
    until_slices(&monitor, &[2048]);
    holder.kill();
}

/// A program has the slice that it asked for once no share sets slices any more.
#[test]
fn requested_slice_is_restored_once_shares_end() {
    let monitor = sharing(8192);
    let holder = monitor.halfway(&format!("start\ncompute 1 as g\n{ASKS}"), "sleep 1000");
    assert_eq!(monitor.slices(), [8192]);
    monitor.share(None);
    until_slices(&monitor, &[2048]);
    holder.kill();
}

/// Groups for other engines (2: a copy engine) wait for no program's kernels.
#[test]
fn only_computing_groups_share_one_period() {
    let monitor = sharing(4096);
    let one = monitor.halfway("start\ncompute 1 as g\ncompute 9 as c", "sleep 1000");
    until_slices(&monitor, &[4096, 4096]);
    let other = monitor.halfway("start\ncompute 1 as g", "sleep 1000");
    until_slices(&monitor, &[1923, 1923, 4096]);
    // A process that exits frees its slice, and so does a group that is freed.
    other.kill();
    until_slices(&monitor, &[4096, 4096]);
    let freed = monitor.halfway("start\ncompute 1 as g", "free g\nsleep 1000");
    until_slices(&monitor, &[1923, 1923, 4096]);
    freed.go();
    until_slices(&monitor, &[4096, 4096]);
    // Another handle retains a group whose first handle is freed: it counts, and follows.
    let renamed = monitor.halfway("start\ncompute 1 as g\ndup g as h\nfree g", "sleep 1000");
    until_slices(&monitor, &[1923, 1923, 4096]);
    renamed.kill();
    until_slices(&monitor, &[4096, 4096]);
    // Under policy 4 groups aren't added up.
    let more = monitor.halfway("start\ncompute 1 as g", "sleep 1000");
    monitor.share(Some(&share(8192, true)));
    until_slices(&monitor, &[8192, 8192, 8192]);
    for process in [one, freed, more] {
        process.kill();
    }
}

/// Wait-for-idle, by which a kernel outlasts its slice, becomes CILP where slices are a container's.
#[test]
fn no_kernel_outlasts_a_slice_where_containers_share() {
    let monitor = sharing(4096);
    let lines = "start\ncompute 1 as g\ncompute-mode g 0";
    let of_mode = |expected: u64| {
        let holder = monitor.halfway(lines, "sleep 1000");
        assert_eq!(mode(&monitor), Some(expected));
        holder.kill();
        until("its group is gone", || mode(&monitor).is_none());
    };
    of_mode(2);
    // Under policy 4 programs share among themselves, each as it likes.
    monitor.share(Some(&share(4096, true)));
    until("it has heard", || monitor.status().gpus[0].round.is_some_and(|round| round.each));
    of_mode(0);
    monitor.share(None);
    until("it has heard", || monitor.status().gpus[0].round.is_none());
    of_mode(0);
}

/// Who was in no sample of 14 seconds doesn't count; who wakes has what each has while all work.
#[test]
fn idle_process_takes_nothing_of_other_slices() {
    let monitor = sharing(4096);
    let busy = monitor.halfway("start\ncompute 1 as g", "sleep 1000");
    let rests = monitor.halfway("start\ncompute 1 as g", "sleep 1000");
    until_slices(&monitor, &[1923, 1923]);
    monitor.sim.fault(&format!("busy {}", busy.pid()));
    until_slices(&monitor, &[1923, 4096]);
    monitor.sim.fault(&format!("busy {} {}", busy.pid(), rests.pid()));
    until_slices(&monitor, &[1923, 1923]);
    // Another's process is none of the container's; then all may be busy.
    monitor.sim.fault("busy 1");
    until_slices(&monitor, &[1923, 1923]);
    for process in [busy, rests] {
        process.kill();
    }
}

#[test]
fn without_a_share_slices_are_the_programs_own() {
    let monitor = Monitor::sharing();
    let holder = monitor.halfway(&format!("start\ncompute 1 as g\n{ASKS}"), "sleep 1000");
    assert_eq!(monitor.slices(), [2048]);
    assert_eq!(monitor.status().gpus[0].round, None);
    holder.kill();
}

/// DISABLE_CHANNELS, which the driver makes for anybody and which enables, too; PREEMPT,
/// SET_INTERLEAVE_LEVEL, MAKE_REALTIME, which this one has not.
#[test]
fn program_cannot_take_time_windows_of_others() {
    let monitor = Monitor::sharing();
    let refused =
        ["subdevice 0x2080110b 536", "g 0xa06c0105 8", "g 0xa06c0107 4", "g 0xa06c0110 4"];
    let lines: Vec<String> = refused.iter().map(|of| format!("control {of}")).collect();
    let lines = format!("start\ncompute 1 as g\n{}", lines.join("\n"));
    let said = monitor.run(&script(&lines));
    for of in refused {
        let command = of.split(' ').nth(1).unwrap_or_default();
        said.must(&format!("control {command} status=0x56"));
        let logged = monitor
            .log()
            .lines()
            .any(|line| line.contains(command) && line.contains("takes others' turns on the GPU"));
        assert!(logged, "{command}: {}", monitor.log());
    }
}

/// A driver that refuses slices: the program goes on, and the status says why.
#[test]
fn driver_refusal_of_slice_is_reported_not_fatal() {
    let monitor = sharing(0);
    monitor.sim.fault("control:0xa06c0103 status 0x56");
    let holder = monitor.halfway("start\ncompute 1 as g", "sleep 1000");
    let reported = || monitor.status().gpus[0].share_refused.clone();
    until("the refusal is reported", || reported().is_some_and(|why| why.contains("0x56")));
    holder.kill();
}

/// A frame of 400 ms, of which the container has what is said, in milliseconds.
fn turns(spans: &[(u64, u64)]) -> Share {
    let span = |(from, to): &(u64, u64)| Span { from_us: from * 1000, to_us: to * 1000 };
    let spans = [("test00000000".to_owned(), spans.iter().map(span).collect())].into();
    let turns = Some(Turns { frame_us: 400_000, spans });
    Share { policy: 0, turns, ..share(4096, false) }
}

/// A program that would compute for ever.
const BUSY: &str = "start\ncompute 1 as g\nkernels g 100000000 of 500";

/// For how many microseconds kernels have run.
fn busy_us(monitor: &Monitor) -> u64 {
    let state = monitor.sim.state();
    let clients = state["clients"].as_array().expect("a list").iter();
    let objects = clients.flat_map(|client| client["objects"].as_array().expect("a list"));
    objects.map(|object| object["busy_us"].as_u64().expect("a number")).sum()
}

/// Waits for two frames in which kernels run for so many per cent of it: in any other, monitor or
/// test may have come late.
#[track_caller]
fn until_busy(monitor: &Monitor, per_cent: std::ops::Range<u128>) {
    until(&format!("kernels run for {per_cent:?} per cent of the time"), || {
        let (begun, before) = (Instant::now(), busy_us(monitor));
        std::thread::sleep(Duration::from_millis(800));
        let busy_us = u128::from(busy_us(monitor) - before);
        per_cent.contains(&(100 * busy_us / begun.elapsed().as_micros()))
    });
}

/// A container runs in its own time windows only, and always if its share has no windows.
#[test]
fn container_runs_only_in_its_time_windows() {
    let monitor = sharing(4096);
    let holder = monitor.halfway(BUSY, "sleep 1000");
    until_busy(&monitor, 97..101);
    monitor.share(Some(&turns(&[(80, 180)])));
    until_busy(&monitor, 23..28);
    // The next program goes on with the channels that it finds in the snapshot.
    monitor.update();
    monitor.share(Some(&turns(&[(0, 120), (280, 400)])));
    until_busy(&monitor, 56..65);
    // One whose share has no turns brings back what the one before has taken off.
    monitor.share(Some(&turns(&[])));
    until("it is off", || monitor.channels_off() == [true]);
    monitor.update();
    monitor.share(Some(&share(4096, false)));
    until_busy(&monitor, 97..101);
    monitor.share(Some(&turns(&[(80, 180)])));
    until_busy(&monitor, 23..28);
    // A share without turns, and no share at all, bring everybody back.
    monitor.share(Some(&share(4096, false)));
    until_busy(&monitor, 97..101);
    monitor.share(Some(&turns(&[])));
    until_busy(&monitor, 0..1);
    assert_eq!(monitor.channels_off(), [true]);
    monitor.share(None);
    until_busy(&monitor, 97..101);
    assert_eq!(monitor.channels_off(), [false]);
    // A monitor that is signalled to exit enables its container again.
    monitor.share(Some(&turns(&[])));
    until("it is off", || monitor.channels_off() == [true]);
    monitor.signal(Signal::SIGTERM).unwrap();
    until("it has ended", || !monitor.is_alive());
    assert_eq!(monitor.channels_off(), [false]);
    holder.kill();
}

/// Who makes a channel, or schedules a group, while its container is off the GPU doesn't run.
#[test]
fn channels_created_while_off_stay_off() {
    let monitor = Monitor::sharing();
    monitor.share(Some(&turns(&[])));
    let first = monitor.halfway("start\ncompute 1 as g", "sleep 1000");
    until("it is off", || monitor.channels_off() == [true]);
    let again = monitor.halfway(
        &format!("{BUSY}\ncontrol g 0xa06c0101 with 010000\ncontrol g 0xa06c0101 with 010100"),
        "sleep 1000",
    );
    until("both are off", || monitor.channels_off() == [true, true]);
    // Copies take no turns: who schedules a group for them is enabled at once.
    let copies = monitor.halfway("start\ncompute 9 as c", "sleep 1000");
    assert_eq!(monitor.channels_off(), [true, true, false]);
    copies.kill();
    until("its channel is gone", || monitor.channels_off().len() == 2);
    until_busy(&monitor, 0..1);
    // A channel that is freed keeps no other from going on.
    first.kill();
    monitor.share(Some(&turns(&[(0, 200)])));
    until_busy(&monitor, 47..55);
    again.kill();
}

/// More groups than have slices of the least length run a part at a time: a neighbour has its share.
#[test]
fn of_many_programs_some_run_at_a_time() {
    let monitor = sharing(4096);
    let many = 18;
    let lines = format!("start\n{}", "compute 1 as g\nkernels g 100000000 of 500\n".repeat(many));
    let holder = monitor.halfway(&lines, "sleep 1000");
    until("each is off at some time, and none always", || {
        let off = monitor.channels_off();
        off.len() == many && off.iter().filter(|off| **off).count() == 12
    });
    until_slices(&monitor, &vec![474; many]);
    until_busy(&monitor, 50..75);
    // Where groups don't add up, all run.
    monitor.share(Some(&share(4096, true)));
    until("all are on", || monitor.channels_off().iter().all(|off| !off));
    holder.kill();
}
