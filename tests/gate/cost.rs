use std::io::Write;

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Instant;

use crate::host::{Monitor, Said, program, wait};

/// Resident memory of a process, in KiB.
fn resident_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_worker_stays_small_with_ten_thousand_objects() {
    let monitor = Monitor::new();
    let before = resident_kib(monitor.worker_pid());
    let mut child = monitor.spawn(&["run"]);
    let mut script = child.stdin.take().unwrap();
    writeln!(script, "start").unwrap();
    for at in 0..10_000 {
        writeln!(script, "alloc 4KiB as x{at}").unwrap();
    }
    writeln!(script, "sleep 60000").unwrap();
    drop(script);
    let output = child.stdout.take().unwrap();
    std::thread::spawn(move || std::io::copy(&mut { output }, &mut std::io::sink()));
    let begun = std::time::Instant::now();
    while monitor.used() < 10_000 * 4096 {
        assert!(begun.elapsed().as_secs() < 30, "{} are used", monitor.used());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    println!(
        "resident: {before} KiB, with 10000 objects {} KiB",
        resident_kib(monitor.worker_pid())
    );
    child.kill().unwrap();
    wait(child);
}

#[test]
fn what_calls_cost() {
    let monitor = Monitor::new();
    let untrapped = std::process::Command::new(program("rmtool"))
        .arg("--dev")
        .arg(monitor.sim.dev())
        .args(["bench", "2000"])
        .output()
        .unwrap();
    println!("without: {}", Said::of(&untrapped).text);
    println!("with:    {}", monitor.run(&["bench", "2000"]).text);
}

nix::ioctl_readwrite!(control, b'F', 0x2a, [u64; 4]);

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
    // No client, and a control that is let continue.
    let mut call = [0, 0x2080_0110, 0, 0];
    let continued = median_ns(|| {
        // SAFETY: the struct is as long as the request says.
        let _ = unsafe { control(node.as_raw_fd(), &raw mut call) };
    });
    let refused = median_ns(|| {
        // SAFETY: the struct is as long as the request says.
        let _ = unsafe { control(other.as_raw_fd(), &raw mut call) };
    });
    println!("continued_ns={continued} refused_ns={refused}");
}

#[test]
fn what_continuing_and_refusing_costs() {
    let monitor = Monitor::new();
    let program = || {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "--nocapture", "cost::probe"]);
        command.env("CGPU_PROBE_DEV", monitor.sim.dev());
        command
    };
    let without = program().output().unwrap();
    let with = wait(monitor.spawn_as(&mut program()));
    for (name, output) in [("without", without), ("with", with)] {
        let said = Said::of(&output);
        let (continued, refused) = (said.number("continued_ns"), said.number("refused_ns"));
        println!("{name}: continued {continued} ns, refused {refused} ns");
    }
}
