//! What is gone, and no call said so: learnt before anything is refused for it, and soon.

use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use crate::monitor::host::{MIB, Monitor, ProgramOutput, end, path, script, until, wait};
use crate::support::timeout;

/// Closes what it had, twice, and has it again.
const CLOSE: &str = "start\nalloc 900MiB as a\nclose\nstart\nalloc 900MiB as b\nclose\n\
                     start\nalloc 900MiB as c";

/// Never stops calling.
fn busy() -> String {
    format!("start\n{}", "alloc 1MiB as a\nfree a\n".repeat(20_000))
}

/// A refusal waits a second for the driver's answers, which a loaded machine can use up: it may come
/// again, and what is gone is learnt all the same.
#[track_caller]
fn run_until_it_fits(monitor: &Monitor, words: &[&str]) {
    let begun = Instant::now();
    loop {
        let said = monitor.run(words);
        if said.success {
            return;
        }
        assert!(begun.elapsed() < timeout(), "{words:?}: {}", said.text);
    }
}

/// Though others' calls never stop, and though it takes a while to ask the driver
/// (`NV2080_CTRL_CMD_GPU_GET_PID_INFO`).
#[test]
fn memory_closed_during_endless_calls_refuses_nothing() {
    let monitor = Monitor::new();
    let busy = busy();
    let slow = "control:0x2080018e delay";
    for fault in ["clear", &format!("{slow} 30"), &format!("{slow} 300")] {
        monitor.sim.fault(fault);
        let mut siblings = vec![monitor.spawn(&["hold", "10MiB"])];
        siblings.extend((0..3).map(|_| monitor.sibling(&busy)));
        let calls = || monitor.sim.state()["calls"]["free"].as_u64().unwrap_or(0);
        let (before, begun) = (calls(), Instant::now());
        let mut times = 0;
        // And so often that the siblings have called meanwhile.
        while times < 4 || calls() <= before + 20 {
            assert!(begun.elapsed() < timeout(), "{fault}: the siblings stood still");
            run_until_it_fits(&monitor, &script(CLOSE));
            times += 1;
        }
        // And without a refusal, too.
        monitor.wait_within(0..=100 * MIB);
        monitor.sim.fault("clear");
        siblings.into_iter().for_each(end);
        assert_eq!(monitor.status().calls.killed, 0);
        monitor.wait_for(0);
    }
}

/// The driver usage has it twice.
#[test]
fn memory_with_two_handles_hides_no_freed_memory() {
    let monitor = Monitor::new();
    let holder = monitor.halfway("start\nalloc 400MiB as a\ndup a as b", "");
    let said = monitor.run(&script("start\nalloc 400MiB as x\nclose\nstart\nalloc 500MiB as y"));
    assert!(said.success, "400 MiB are in use of 1024: {}", said.text);
    let second = monitor.spawn(&["hold", "400MiB"]);
    monitor.wait_for(800 * MIB);
    end(second);
    monitor.wait_for(400 * MIB);
    holder.kill();
    monitor.wait_for(0);
}

/// As `cuMemExportToShareableHandle` between two processes, and a third dies.
#[test]
fn memory_shared_by_processes_hides_no_freed_memory() {
    let monitor = Monitor::new();
    let dir = tempfile::tempdir().unwrap();
    let socket = path(&dir, "socket");
    let first = format!("start\nalloc 400MiB as a\nexport a\noffer-export {socket}\nsleep 60");
    let first = monitor.spawn(&script(&first));
    until("it offers it", || Path::new(&socket).exists());
    std::thread::sleep(Duration::from_millis(100));
    let second = monitor.halfway(&format!("start\nfetch-export {socket}\nimport as b"), "");
    let third = monitor.spawn(&["hold", "400MiB"]);
    monitor.wait_for(800 * MIB);
    end(third);
    monitor.wait_for(400 * MIB);
    end(first);
    second.kill();
}

/// A call that would be refused for it waits until it is found that no process has the file.
#[test]
fn closed_export_file_refuses_nothing() {
    let monitor = Monitor::new();
    let lines = "start\nalloc 700MiB as a\nexport a\nfree a\nclose-export\nalloc 700MiB as b";
    let said = monitor.run(&script(lines));
    assert!(said.success, "{}", said.text);
    // Nor is it taken from a process that has it open.
    let said = monitor.run(&script(
        "start\nalloc 700MiB as a\nexport a\nfree a\nalloc 700MiB as b\nimport as c\nfree c",
    ));
    said.must("alloc b status=0x51");
    said.must("import c ok");
    monitor.wait_for(0);
}

/// The driver has given what was asked for, and it is set aside, too.
#[test]
fn late_call_hides_no_freed_memory() {
    let monitor = Monitor::new();
    monitor.sim.fault("alloc:0x40 late 3000 times 1");
    let first = monitor.spawn(&["hold", "400MiB"]);
    until("the driver has given it", || monitor.sim.used(0) == 400 * MIB);
    let said = monitor.run(&script("start\nalloc 400MiB as x\nclose\nstart\nalloc 500MiB as y"));
    assert!(said.success, "400 MiB are in use of 1024: {}", said.text);
    end(first);
}

/// It makes a new handle of memory, which the driver may show or not.
#[test]
fn hanging_duplicate_hides_no_freed_memory() {
    let monitor = Monitor::new();
    let first = monitor.halfway("start\nalloc 100MiB as a", "dup a as b\nsleep 60");
    let second = monitor.spawn(&["hold", "700MiB"]);
    monitor.wait_for(800 * MIB);
    // Just after an audit, which duplicates from each client, too: the next that does is two seconds off.
    let duplicates = || monitor.sim.state()["calls"]["dup"].as_u64().unwrap_or(0);
    let mut made = duplicates();
    until("it is audited", || duplicates() > made);
    while made != duplicates() {
        made = duplicates();
        std::thread::sleep(Duration::from_millis(100));
    }
    monitor.sim.fault("dup hang times 1");
    first.go();
    until("it hangs", || monitor.sim.state()["hanging"] == 1);
    end(second);
    monitor.wait_for(100 * MIB);
    let third = monitor.spawn(&script("start\nalloc 700MiB as y"));
    monitor.sim.fault("clear");
    let said = ProgramOutput::of(&wait(third));
    first.kill();
    assert!(said.success, "{}", said.text);
}

#[test]
fn of_two_gpus_neither_refuses_what_was_closed() {
    for fault in ["clear", "control:0x2080018e delay 30"] {
        let monitor = Monitor::of_two_gpus();
        let busy = busy();
        let siblings: Vec<Child> = (0..3).map(|_| monitor.sibling(&busy)).collect();
        monitor.sim.fault(fault);
        for gpu in ["0", "1", "0", "1"] {
            let lines: Vec<&str> = ["--gpu", gpu].into_iter().chain(script(CLOSE)).collect();
            run_until_it_fits(&monitor, &lines);
        }
        monitor.sim.fault("clear");
        siblings.into_iter().for_each(end);
        monitor.wait_for(0);
        until("the other GPU is empty, too", || {
            (monitor.status().gpus[1].used_bytes, monitor.sim.used(1)) == (0, 0)
        });
        assert_eq!(monitor.status().calls.killed, 0);
    }
}

/// No process's memory is allocated or freed meanwhile, as the driver does nothing else either; all of it is when it
/// answers.
#[test]
fn hanging_audit_blocks_container_until_driver_answers() {
    let monitor = Monitor::new();
    let holder = monitor.spawn(&["hold", "700MiB"]);
    monitor.wait_for(700 * MIB);
    monitor.sim.fault("control:0x2080018e hang times 1");
    let refused: Vec<Child> =
        (0..36).map(|_| monitor.spawn(&script("start\nalloc 700MiB as a"))).collect();
    until("it hangs", || monitor.sim.state()["hanging"] == 1);
    let other = monitor.spawn(&script("start\nalloc 1MiB as a\nfree a"));
    assert_eq!(monitor.used(), 700 * MIB, "the status is reported");
    // A process that waits can be killed.
    let mut refused = refused.into_iter();
    end(refused.next().unwrap());
    monitor.sim.fault("clear");
    assert!(wait(other).status.success());
    refused.for_each(|child| {
        ProgramOutput::of(&wait(child)).must("alloc a status=0x51");
    });
    end(holder);
    monitor.wait_for(0);
    assert_eq!(monitor.status().calls.killed, 0);
}
