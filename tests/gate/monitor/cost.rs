use std::io::Write;

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Instant;

use cgpu_core::sched::Period;
use cgpu_host::registry::share::Share;

use crate::monitor::host::{Monitor, ProgramOutput, end, program, until, wait};

/// Resident memory of a process in KiB: all of it, and what isn't its program's file, which
/// is larger in a debug build and others' too.
fn resident_kib(pid: u32) -> (u64, u64) {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let of = |name: &str| -> u64 {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    (of("VmRSS"), of("RssAnon") + of("RssShmem"))
}

/// The most that a monitor takes for itself, in KiB: 2 MiB at first, 4 MiB with 10,000 objects.
const IDLE_KIB: u64 = 2048;
const WITH_OBJECTS_KIB: u64 = 4096;

#[test]
fn a_monitor_stays_small_with_ten_thousand_objects() {
    let monitor = Monitor::new();
    let (all_before, before) = resident_kib(monitor.pid());
    assert!(before <= IDLE_KIB, "{before} KiB");
    let mut child = monitor.spawn(&["run"]);
    let mut script = child.stdin.take().unwrap();
    writeln!(script, "start").unwrap();
    for at in 0..10_000 {
        writeln!(script, "alloc 4KiB as x{at}").unwrap();
    }
    writeln!(script, "sleep 600000").unwrap();
    drop(script);
    let output = child.stdout.take().unwrap();
    std::thread::spawn(move || std::io::copy(&mut { output }, &mut std::io::sink()));
    let begun = std::time::Instant::now();
    while monitor.used() < 10_000 * 4096 {
        assert!(begun.elapsed().as_secs() < 240, "{} are used", monitor.used());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    // What calls took for themselves is given back a while after.
    let begun = std::time::Instant::now();
    let (all, after) = loop {
        let (all, after) = resident_kib(monitor.pid());
        if after <= WITH_OBJECTS_KIB || begun.elapsed().as_secs() > 60 {
            break (all, after);
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    };
    println!(
        "resident: {all_before} KiB, with 10000 objects {all} KiB; of its own {before} and {after} KiB"
    );
    assert!(after <= WITH_OBJECTS_KIB, "{before} KiB became {after}");
    child.kill().unwrap();
    wait(child);
}

#[test]
#[ignore = "prints what calls cost; asserts nothing"]
fn what_calls_cost() {
    let monitor = Monitor::new();
    let untrapped = std::process::Command::new(program("rmtool"))
        .arg("--dev")
        .arg(monitor.sim.dev())
        .args(["bench", "2000"])
        .output()
        .unwrap();
    println!("without: {}", ProgramOutput::of(&untrapped).text);
    println!("with:    {}", monitor.run(&["bench", "2000"]).text);
}

nix::ioctl_readwrite!(control, b'F', 0x2a, [u64; 4]);
nix::ioctl_readwrite!(free, b'F', 0x29, [u64; 2]);
nix::ioctl_readwrite!(alloc_memory, b'F', 0x27, [u64; 7]);

/// Calls that a program makes before it does anything, and of which most are controls.
const START_UP: u32 = 2000;

const FIGURES: [&str; 5] =
    ["continued_ns", "control_ns", "refused_ns", "executed_ns", "start_up_us"];

/// A control that is executed, and one that is refused; of no client.
const EXECUTED: u64 = 0x2080_0110;
const REFUSED: u64 = 0xe0_0101;

/// Memory of the host, for `NV_ESC_RM_ALLOC_MEMORY`: that continues.
const HOST_MEMORY: u64 = 0x3e << 32;

fn median_ns(mut round: impl FnMut()) -> u128 {
    let mut times: Vec<u128> = Vec::new();
    for _ in 0..5000 {
        let begun = Instant::now();
        round();
        times.push(begun.elapsed().as_nanos());
    }
    times.sort_unstable();
    times[times.len() / 2]
}

/// Run under the filter, and without, by [`what_continuing_and_refusing_costs`].
#[test]
#[ignore = "a program for another test"]
#[allow(unsafe_code, reason = "an ioctl")]
fn probe() {
    let Some(dev) = std::env::var_os("CGPU_PROBE_DEV") else { return };
    let path = PathBuf::from(dev).join("nvidiactl");
    let node = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let other = std::fs::File::open("/dev/zero").unwrap();
    let mut params = [0_u64; 8];
    let address = params.as_mut_ptr().addr() as u64;
    let median_of = |command: u64| {
        median_ns(|| {
            let mut call = [0, command, address, 64];
            // SAFETY: the struct is as long as the request says.
            let _ = unsafe { control(node.as_raw_fd(), &raw mut call) };
        })
    };
    // What continues does so whatever its descriptor is, so here without the driver's time.
    let continued = median_ns(|| {
        let mut call = [0, HOST_MEMORY, 0, 0, 0, 0, 0];
        // SAFETY: the struct is as long as the request says.
        let _ = unsafe { alloc_memory(other.as_raw_fd(), &raw mut call) };
    });
    let reported = median_of(EXECUTED);
    let refused = median_of(REFUSED);
    // Freed of no client: executed, and the driver says no.
    let mut call = [0; 2];
    let executed = median_ns(|| {
        call = [0; 2];
        // SAFETY: the struct is as long as the request says.
        let _ = unsafe { free(node.as_raw_fd(), &raw mut call) };
    });
    println!(
        "continued_ns={continued} control_ns={reported} refused_ns={refused} executed_ns={executed}"
    );
    let begun = Instant::now();
    for at in 0..START_UP {
        if at % 20 < 17 {
            let mut call = [0, EXECUTED, address, 64];
            // SAFETY: the struct is as long as the request says.
            let _ = unsafe { control(node.as_raw_fd(), &raw mut call) };
        } else {
            let mut call = [0; 2];
            // SAFETY: as above.
            let _ = unsafe { free(node.as_raw_fd(), &raw mut call) };
        }
    }
    println!("start_up_us={}", begun.elapsed().as_micros());
}

#[test]
#[ignore = "prints what calls cost; asserts nothing"]
fn what_continuing_and_refusing_costs() {
    let monitor = Monitor::new();
    let program = || {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "--nocapture", "monitor::cost::probe"]);
        command.env("CGPU_PROBE_DEV", monitor.sim.dev());
        command
    };
    for round in 0..3 {
        let without = ProgramOutput::of(&program().output().unwrap());
        let with = ProgramOutput::of(&wait(monitor.spawn_as(&mut program())));
        for key in FIGURES {
            let (bare, gated) = (without.number(key), with.number(key));
            println!(
                "round {round}: {key} {bare}, gated {gated}: {:+}",
                gated as i64 - bare as i64
            );
        }
    }
}

/// How soon a share that has changed is applied, for a container of eight programs; turns, at their next
/// edge.
#[test]
#[ignore = "prints how long it takes; asserts nothing"]
fn share_change_delay_is_printed() {
    let monitor = Monitor::sharing();
    let share = |us| {
        let own = ("test00000000".to_owned(), Period { us, each: true });
        Share { policy: 4, rounds: [own].into(), turns: None }
    };
    monitor.share(Some(&share(4096)));
    let programs: Vec<_> =
        (0..8).map(|_| monitor.halfway("start\ncompute 1 as g", "sleep 1000")).collect();
    let mut took_us = Vec::new();
    for round in 0..100 {
        let us = if round % 2 == 0 { 8192 } else { 4096 };
        let begun = Instant::now();
        monitor.share(Some(&share(us)));
        while monitor.slices() != [us; 8] {}
        took_us.push(begun.elapsed().as_micros());
    }
    took_us.sort_unstable();
    println!("applied after {} us, {} at most", took_us[50], took_us[99]);
    programs.into_iter().for_each(crate::monitor::host::Halfway::kill);
}

/// The processor time that a process has taken, in milliseconds.
fn taken_ms(pid: u32) -> u64 {
    let stat = procfs::process::Process::new(pid.cast_signed()).and_then(|of| of.stat()).unwrap();
    (stat.utime + stat.stime) * 1000 / procfs::ticks_per_second()
}

/// A tenth of a processor, and a fifth of a second at once: a caller that needs more waits.
#[test]
fn monitor_cpu_stays_within_its_container_limit() {
    let monitor = Monitor::limited(100);
    let (pid, begun) = (monitor.pid(), std::time::Instant::now());
    let before = taken_ms(pid);
    let busy = monitor.spawn(&["bench", "100000000", "executed"]);
    until("it has taken what it may at once, and more", || taken_ms(pid) >= before + 500);
    // The rest of it took three seconds at least; ticks of 10 ms, and calls that were begun.
    let took = begun.elapsed();
    assert!(took.as_millis() >= 2500, "half a second of a processor in {took:?}");
    end(busy);
}
