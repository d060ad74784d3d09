use std::process::{Command, Stdio};

use crate::monitor::host::{MIB, Monitor, ProgramOutput, program, wait};

#[test]
fn controls_are_answered_as_without_us() {
    let monitor = Monitor::new();
    let said = monitor.run(&["run", "start", "controls"]);
    for line in [
        "version ok [\"535.161.08\", \"sim\", \"cgpu-sim\"]",
        "classes ok [2080, a06c, c56f, c6c0]",
        "gr ok [6, 8, 10]",
        "bus ok [14]",
        "firmware ok 4294905615",
        // NV503C_CTRL_CMD_REGISTER_VIDMEM, of an object that there isn't: the driver was not asked.
        "peers ok ()",
    ] {
        said.must(line);
    }
    assert_eq!(monitor.status().calls.refused, 0);
}

/// A program that no monitor watches, and that has memory.
fn stranger(monitor: &Monitor) -> std::process::Child {
    let mut command = Command::new(program("rmtool"));
    command.arg("--dev").arg(monitor.sim.dev()).args(["hold", "10MiB"]);
    let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    while monitor.sim.used(0) < 10 * MIB {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child
}

/// Processes of others are not reported to the container, nor is their memory.
#[test]
fn foreign_processes_are_not_reported() {
    let monitor = Monitor::new();
    let mut stranger = stranger(&monitor);
    let about = format!("pid-bytes {}", stranger.id());
    let said = monitor.run(&["run", "start", "alloc 20MiB as a", "pids", "pid-bytes self", &about]);
    said.must("pid-bytes ok private=20971520 owned=0 duped=0");
    said.must("pid-bytes ok private=0 owned=0 duped=0");
    let pids = said.text.lines().find(|line| line.starts_with("pids ok")).unwrap();
    assert!(!pids.contains(','), "{pids}");
    assert!(!pids.contains(&stranger.id().to_string()), "{pids}");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

/// A process has the id that its own pid namespace gives it.
#[test]
fn reported_pid_is_that_of_own_namespace() {
    let monitor = Monitor::new();
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child"]).arg(program("rmtool"));
    command.arg("--dev").arg(monitor.sim.dev());
    command.args(["run", "start", "alloc 20MiB as a", "pids", "pid-bytes self"]);
    let said = ProgramOutput::of(&wait(monitor.spawn_as(&mut command)));
    said.must("pids ok pids=[1]");
    said.must("pid-bytes ok private=20971520 owned=0 duped=0");
}

/// The driver doesn't check whose channels it takes off the GPU, nor whether there are any; and a group that
/// is off for its share must not come back by itself.
#[test]
fn programs_cannot_take_channels_off_the_gpu() {
    let monitor = Monitor::new();
    let said = monitor.run(&["run", "start", "stop-channels own", "stop-channels 0xc1d0ffff"]);
    let lines: Vec<&str> =
        said.text.lines().filter(|line| line.starts_with("stop-channels")).collect();
    assert!(lines.iter().all(|line| line.contains("status=0x56")), "{lines:?}");
    assert_eq!((lines.len(), monitor.status().calls.refused), (2, 2));
}

/// Of a driver that is newer than all that is known: its own libraries' calls don't pass unseen.
#[test]
fn a_struct_that_has_grown_is_refused() {
    let monitor = Monitor::new();
    monitor.run(&["run", "start", "grown"]).must("grown Some(Errno(22)) Some(Errno(25))");
    let calls = monitor.status().calls;
    assert_eq!((calls.refused, calls.continued > 0), (1, true));
    // By a field or two, and to twice as much.
    let grown = [
        ("0x2b", "NV_ESC_RM_ALLOC", &[64, 72, 96][..]),
        ("0x27", "NV_ESC_RM_ALLOC_MEMORY", &[64, 72, 112]),
        ("0x4a", "NV_ESC_RM_VID_HEAP_CONTROL", &[192, 200, 368]),
        ("0x2a", "NV_ESC_RM_CONTROL", &[40, 48, 64]),
        ("217", "NV_ESC_EXPORT_TO_DMABUF_FD", &[2616, 2624, 4096]),
    ];
    for (number, name, sizes) in grown {
        for size in sizes {
            let monitor = Monitor::new();
            let line = format!("grown {number} {size}");
            let said = monitor.run(&["run", "start", &line]);
            assert!(said.text.contains("Some(Errno(22))"), "{name}: {}", said.text);
            let log = monitor.log();
            let reported = |line: &&str| line.contains(name) && line.contains(&size.to_string());
            assert!(log.lines().any(|line| reported(&line)), "{name} of {size}: {log}");
            assert_eq!(monitor.status().calls.refused, 1, "{name} of {size}");
        }
    }
}

/// A debugger reads and writes as much at once as the monitor copies, and no more.
#[test]
fn a_debugger_has_a_bound() {
    let monitor = Monitor::new();
    let lines = [
        "start",
        "alloc 24MiB as a",
        "debug a 0 4096",
        "debug a 12345 131072",
        "debug a 0 131073",
        "debug a 0 24MiB",
    ];
    let said = monitor.run(&[&["run"], &lines[..]].concat());
    said.must("debug a ok same=4096\ndebug a ok same=131072\n");
    // `NV_ERR_INVALID_ARGUMENT`.
    said.must("debug a status=0x1f\ndebug a status=0x1f\n");
}

/// Vulkan has its semaphores in memory of the host. In memory of a GPU they would retain it in no process's
/// driver usage; the driver has no such surface, and isn't asked for one.
#[test]
fn semaphore_surfaces_lie_in_host_memory() {
    let monitor = Monitor::new();
    let lines =
        ["start", "system 1MiB as a", "semaphores a", "alloc 1MiB as b", "semaphores b", "free a"];
    let said = monitor.run(&[&["run"], &lines[..]].concat());
    said.must("semaphores a ok").must("semaphores b status=0x3b");
    assert_eq!(monitor.sim.state()["calls"]["alloc:0xda"], 1);
    monitor.wait_for(0);
}
