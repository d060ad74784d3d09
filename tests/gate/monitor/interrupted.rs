//! The driver answers one call of a thread after the other, whatever signals come meanwhile.
//! Behind a listener that can't make interrupted callers wait (before Linux 5.19, and behind
//! podman's filter) the kernel has the call made again while the first is still in the driver.

use std::path::Path;
use std::time::Duration;

use cgpu_monitor::gate::settings::Managed;

use crate::monitor::host::{MIB, Monitor, ProgramOutput, path, script, until, wait};

/// How a program is interrupted: first signal, interval, and how long its handler takes, in
/// milliseconds; the driver takes 300.
const SIGNALS: [(&str, &str); 3] = [
    ("once, and the call comes back while the driver is at it", "alarm 100 0 0"),
    ("once, and the call comes back when the driver is done", "alarm 100 0 500"),
    ("again and again", "alarm 20 20 0"),
];

/// Runs `calls` with a signal in the middle of the first that asks for memory, to where it waits.
fn interrupted(signals: &str, calls: &str) -> (Monitor, std::process::Child, tempfile::TempDir) {
    let monitor = Monitor::with(Managed::Refuse, false);
    monitor.sim.fault("alloc:0x40 delay 300 times 1");
    let dir = tempfile::tempdir().unwrap();
    let (ready, go) = (dir.path().join("ready"), dir.path().join("go"));
    let script = format!(
        "start\n{signals}\n{calls}\nsignals\ntouch {}\nwait {}\nfree a",
        ready.display(),
        go.display()
    );
    let lines: Vec<&str> = std::iter::once("run").chain(script.lines()).collect();
    let child = monitor.spawn(&lines);
    until(&format!("it comes back, {signals}"), || ready.exists());
    (monitor, child, dir)
}

/// Lets it free what it has.
#[track_caller]
fn frees(monitor: &Monitor, child: std::process::Child, dir: &tempfile::TempDir, case: &str) {
    std::fs::write(dir.path().join("go"), "").unwrap();
    let said = ProgramOutput::of(&wait(child));
    assert!(said.number("signals") > 0, "{case}: {}", said.text);
    assert!(said.success, "{case}: {}", said.text);
    monitor.wait_for(0);
    assert_eq!(monitor.sim.used(0), 0, "{case}");
    assert_eq!(monitor.status().calls.killed, 0, "{case}");
}

/// Made twice it would need more than there is, or find its own handle taken.
#[test]
fn interrupted_call_is_made_once_and_answered() {
    for (case, signals) in SIGNALS {
        for how in ["alloc", "alloc-any"] {
            let case = format!("{how}, {case}");
            let (monitor, child, dir) = interrupted(signals, &format!("{how} 700MiB as a"));
            assert_eq!(monitor.sim.used(0), 700 * MIB, "{case}");
            assert_eq!(monitor.used(), 700 * MIB, "{case}");
            frees(&monitor, child, &dir, &case);
        }
    }
}

#[test]
fn allocation_of_interrupted_program_survives_an_update() {
    for (case, signals) in SIGNALS {
        let (monitor, child, dir) = interrupted(signals, "alloc-any 700MiB as a");
        monitor.update();
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(monitor.sim.used(0), 700 * MIB, "{case}");
        assert_eq!(monitor.used(), 700 * MIB, "{case}");
        assert_eq!(monitor.run(&["fill"]).number("got_bytes"), 324 * MIB, "{case}");
        frees(&monitor, child, &dir, case);
    }
}

/// A caller that doesn't ask again gets nothing, and nothing of it is left.
#[test]
fn allocation_of_an_abandoned_call_is_freed() {
    let monitor = Monitor::with(Managed::Refuse, false);
    monitor.sim.fault("alloc:0x40 hang times 1");
    let dir = tempfile::tempdir().unwrap();
    let [interrupt, gone, go] = ["interrupt", "gone", "go"].map(|name| path(&dir, name));
    let lines = format!("start\ninterrupt-a-thread 700MiB {interrupt}\ntouch {gone}\nwait {go}");
    let child = monitor.spawn(&script(&lines));
    until("the driver is at it", || monitor.sim.state()["hanging"] == 1);
    std::fs::write(&interrupt, "").unwrap();
    until("no thread waits for it", || Path::new(&gone).exists());
    assert_eq!(monitor.used(), 700 * MIB);
    monitor.sim.fault("clear");
    monitor.wait_for(0);
    assert_eq!(monitor.sim.used(0), 0);
    std::fs::write(&go, "").unwrap();
    assert!(wait(child).status.success());
}

/// What programs do again and again, and each time as if it were the first.
const LOADS: [&str; 5] = [
    "alloc 1MiB as a\nfree a",
    "alloc-any 1MiB as a\nheap 1MiB as b\nfree a\nfree b",
    "alloc 1MiB as a\ndup a as b\nfree a\nfree b",
    "alloc 1MiB as a\nexport a\nfree a\nimport as b\nfree b\nclose-export",
    "alloc 1MiB as a\nuvm-range 0x1000000000 1MiB\nuvm-map a at 0x1000000000\nfree a\n\
     uvm-free 0x1000000000 1MiB",
];

/// Runs each load in several programs that a signal comes to every millisecond, which makes them
/// wait for their answers or not, while `meanwhile` is done again and again. No call may fail, but for
/// those that `may_fail`: their programs have what they said.
fn storm(
    wait_killable: bool,
    rounds: usize,
    may_fail: impl Fn(&str) -> bool,
    meanwhile: impl Fn(&Monitor),
) {
    for load in LOADS {
        let monitor = Monitor::with(Managed::Refuse, wait_killable);
        let lines =
            format!("start\nuvm-init\nalarm 1 1 0\n{}signals", format!("{load}\n").repeat(rounds));
        let programs: Vec<_> = (0..4)
            .map(|_| {
                let child = monitor.spawn(&script(&lines));
                std::thread::spawn(move || ProgramOutput::of(&child.wait_with_output().unwrap()))
            })
            .collect();
        while !programs.iter().all(std::thread::JoinHandle::is_finished) {
            meanwhile(&monitor);
        }
        for program in programs {
            let said = program.join().unwrap();
            let is_ok = |line: &&str| line.ends_with(" ok") || line.contains(" ok ");
            let rest: Vec<&str> = said.text.lines().filter(|line| !is_ok(line)).collect();
            if rest.iter().any(|line| may_fail(line)) {
                continue;
            }
            let [signals] = rest[..] else { panic!("{load:?}: {rest:?}") };
            assert!(said.number("signals") > 0 && said.success, "{load:?}: {signals}");
        }
        monitor.wait_for(0);
        assert_eq!((monitor.sim.used(0), monitor.status().calls.killed), (0, 0), "{load:?}");
    }
}

/// A signal that comes between a reply and the check for it takes the caller away from what was
/// sent, too: rarely, and so often.
#[test]
fn interrupted_program_sees_no_failed_call() {
    storm(false, 400, |_| false, |_| std::thread::sleep(Duration::from_millis(10)));
}

/// What the driver says of a call that it has done already, by the beginning of what a program says:
/// the program gets that status if a monitor dies after it has written an answer, and a signal takes the
/// caller away before the next monitor is there.
const DONE_ALREADY: [(&str, &str); 9] = [
    ("alloc", "status=0x19"),
    ("heap", "status=0x19"),
    ("dup", "status=0x19"),
    ("import", "status=0x19"),
    ("free", "status=0x57"),
    ("export", "status=0x63"),
    ("uvm-range", "status="),
    ("uvm-map", "status="),
    ("uvm-free", "status="),
];

#[test]
fn interrupted_program_sees_no_failed_call_during_updates() {
    let was_done = |line: &str| {
        let is_of = |(call, status): &(&str, &str)| line.starts_with(call) && line.contains(status);
        DONE_ALREADY.iter().any(is_of)
    };
    for wait_killable in [false, true] {
        storm(
            wait_killable,
            50,
            |line| !wait_killable && was_done(line),
            |monitor| {
                std::thread::sleep(Duration::from_millis(15));
                monitor.update();
            },
        );
    }
}
