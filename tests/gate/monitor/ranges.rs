//! Ranges that UVM's files have, and what counts as managed memory.

use std::time::Duration;

use cgpu_monitor::gate::settings::Managed;

use crate::monitor::host::{MIB, Monitor, end, path, script, until};

const POOL: &str = "start\nuvm-init\nuvm-register\nuvm-pool 0x10000000000 512KiB";
const MAP: &str = "managed 512KiB at 0x10000000000";

fn charging() -> Monitor {
    Monitor::with(Managed::Charge, true)
}

#[test]
fn a_files_range_is_mapped_and_costs_nothing() {
    for monitor in [Monitor::new(), charging()] {
        let (before, after) = (format!("{POOL}\n{MAP}"), "alloc 1023MiB as a\ninfo");
        let program = monitor.halfway(&before, after);
        // It is checked a few times.
        std::thread::sleep(Duration::from_millis(1500));
        assert_eq!((monitor.used(), monitor.sim.used(0)), (0, 0));
        let said = program.go_on();
        assert!(said.success, "{}", said.text);
        monitor.wait_for(0);
        assert_eq!(monitor.status().calls.killed, 0);
    }
}

/// Each is a way to have no range where there was one, or never was for this file.
#[test]
fn mapping_outside_uvm_ranges_counts_as_managed() {
    for without in [
        "close-uvm\nuvm-init",
        "swap-uvm\nuvm-init",
        "swap-uvm\nuvm-init\nuvm-pool 0x20000000000 512KiB",
        "swap-uvm\nuvm-init\nuvm-register\nswap-uvm\nuvm-free 0x10000000000 512KiB\nswap-uvm",
        "uvm-free 0x10000000000 512KiB",
    ] {
        let said = Monitor::new().run(&script(&format!("{POOL}\n{without}\n{MAP}")));
        said.must("uvm-pool ok").must("managed errno=1\n");

        let monitor = charging();
        let program = monitor.halfway(&format!("{POOL}\n{without}\n{MAP}"), "");
        assert!(monitor.used() >= MIB / 2, "{without}");
        let said = program.go_on();
        said.must("managed ok");
        monitor.wait_for(0);
    }
}

/// A mapping of a part of a range, or of more than the range, is not mapped as one.
#[test]
fn partial_range_is_not_mapped_as_a_range() {
    for part in ["256KiB at 0x10000000000", "4KiB at 0x10000001000", "1MiB at 0x10000000000"] {
        let said = Monitor::new().run(&script(&format!("{POOL}\nmanaged {part}")));
        said.must("uvm-pool ok").must("managed errno=1\n");
    }
}

#[test]
fn files_and_ranges_survive_a_monitor_update() {
    let monitor = Monitor::new();
    let lines = format!("{POOL}\nswap-uvm\nuvm-init\nuvm-register");
    let program = monitor.halfway(&lines, &format!("{MAP}\nswap-uvm\n{MAP}\nsleep 2"));
    monitor.update();
    let said = program.go_on();
    said.must("managed errno=1\n").must("managed ok");
    assert_eq!(monitor.status().calls.killed, 0, "{}", said.text);
}

/// Its first thread has exited, and with it what the kernel reports of the process by its id.
#[test]
fn process_without_first_thread_retains_its_charge() {
    let monitor = charging();
    let lines = "start\nuvm-init\nuvm-register\nmanaged 8MiB\nalloc 4MiB as a\nexport a\nfree a\n\
                 sleep 3\nimport as b\nsleep 60";
    let words = [vec!["--headless"], script(lines)].concat();
    let program = monitor.spawn(&words);
    until("it has all", || monitor.used() == 12 * MIB);
    for _ in 0..25 {
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(monitor.used(), 12 * MIB);
    }
    let clients = || monitor.sim.state()["clients"].to_string();
    until("it is imported", || clients().contains(&(4 * MIB).to_string()));
    assert_eq!(monitor.used(), 12 * MIB);
    end(program);
    monitor.wait_for(0);
}

/// Of a file that no process has open any more, nothing is retained: neither descriptors nor ranges.
#[test]
fn files_that_are_closed_are_let_go() {
    let monitor = Monitor::new();
    let more = "close-uvm\nuvm-init\nuvm-register\nuvm-pool 0x10000000000 512KiB\n".repeat(200);
    let program = monitor.halfway(&format!("{POOL}\n{more}"), "");
    let files = || {
        let open = std::fs::read_dir(format!("/proc/{}/fd", monitor.pid())).unwrap();
        open.count()
    };
    until("they are let go", || files() < 50);
    assert!(program.go_on().success);
    monitor.wait_for(0);
}

/// Which other process did it meanwhile could not be determined, also not by the next monitor.
#[test]
fn one_file_is_initialized_at_a_time() {
    let monitor = Monitor::new();
    let lines = script("start\nuvm-init\nuvm-init\nuvm-init 2\nuvm-register");
    let whole = "uvm-init ok\nuvm-init ok\nuvm-init status=0x1f\n";
    monitor.run(&lines).must(whole).must("uvm-register ok\n");
    monitor.sim.fault("uvm:0x30000001 hang times 1");
    let hanging = monitor.spawn(&script("start\nuvm-init"));
    until("it hangs", || monitor.sim.state()["hanging"] == 1);
    monitor.run(&lines).must("uvm-init status=0x3\n").must("uvm-register status=0x16\n");
    monitor.update();
    monitor.run(&lines).must("uvm-init status=0x3\n");
    monitor.sim.fault("clear");
    end(hanging);
    monitor.run(&lines).must(whole).must("uvm-register ok\n");
    // One that failed keeps no caller waiting, whatever its own does since.
    monitor.sim.fault("uvm:0x30000001 status 0x51 times 1");
    let waiting = monitor.halfway("start\nuvm-init", "");
    monitor.run(&lines).must(whole);
    waiting.go_on().must("uvm-init status=0x51\n");
}

/// The driver keeps such memory when the process ends, until the file is closed.
#[test]
fn managed_memory_outliving_its_process_gets_no_gpu() {
    let lines = script("start\nuvm-init 2\nuvm-register\nalloc 8MiB as a");
    let said = Monitor::new().run(&lines);
    said.must("uvm-register ok");
    charging().run(&lines).must("uvm-register status=0x1f").must("alloc a ok");
}

/// Whichever thread asked for it, and whatever else the process has mapped.
#[test]
fn managed_memory_of_an_exited_thread_stays_charged() {
    let monitor = charging();
    let before = "start\nuvm-init\nuvm-register\nmap-odd-name\n\
                  thread-managed 8MiB at 0x10000000000";
    let program = monitor.halfway(before, "managed 1MiB at 0x20000000000");
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(monitor.used(), 8 * MIB);
    }
    let said = program.go_on();
    assert!(said.success, "{}", said.text);
    assert_eq!(monitor.status().calls.killed, 0);
    monitor.wait_for(0);
}

/// Though the process has others.
#[test]
fn unmapped_managed_memory_is_no_longer_charged() {
    let monitor = charging();
    let program = monitor.halfway(
        "start\nuvm-init\nuvm-register\nmanaged 8MiB at 0x10000000000\n\
         managed 4KiB at 0x30000000000",
        "unmap 0x10000000000 8MiB\nsleep 30",
    );
    assert_eq!(monitor.used(), 8 * MIB + 4096);
    program.go();
    until("it is charged no more", || monitor.used() == 4096);
    program.kill();
    monitor.wait_for(0);
}

/// Each with its own, at one address: as programs have that are alike.
#[test]
fn range_and_managed_memory_may_share_an_address() {
    let monitor = charging();
    let managed = monitor.halfway(&format!("start\nuvm-init\nuvm-register\n{MAP}"), "");
    let pool = monitor.halfway(&format!("{POOL}\n{MAP}"), "alloc 1MiB as a");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!((monitor.used(), monitor.status().calls.killed), (MIB / 2, 0));
    assert!(pool.go_on().success && managed.go_on().success);
    monitor.wait_for(0);
}

/// Ranges are compared with what is mapped while files come and go.
#[test]
fn mapping_checks_tolerate_files_opening_and_closing() {
    let monitor = Monitor::new();
    let at = |number: u64| 0x100_0000_0000 + number * 0x10_0000;
    let one = |number| format!("uvm-pool {0:#x} 64KiB\nmanaged 64KiB at {0:#x}\n", at(number));
    let pools: String = (0..100).map(one).collect();
    let program = monitor.halfway(&format!("start\nuvm-init\nuvm-register\n{pools}"), "");
    let more = "close-uvm\nuvm-init\nuvm-register\n".repeat(300);
    let said = monitor.run(&script(&format!("start\n{more}")));
    assert!(said.success, "{}", said.text);
    let said = program.go_on();
    assert!(said.success, "{}", said.text);
    assert_eq!(monitor.status().calls.killed, 0);
}

#[test]
fn files_that_were_never_initialized_are_let_go() {
    let monitor = Monitor::new();
    // No such flag.
    let more = "uvm-init 8\nuvm-register\nclose-uvm\n".repeat(200);
    let program = monitor.halfway(&format!("start\n{more}"), "");
    let open = || std::fs::read_dir(format!("/proc/{}/fd", monitor.pid())).unwrap().count();
    until("they are let go", || open() < 150);
    program.kill();
}

/// If the entry that a mapping would be charged by has no place, the mapping is refused.
#[test]
fn unaccountable_managed_memory_is_refused() {
    let monitor = charging();
    let piece =
        |number: u64| format!("uvm-map a at {:#x} 4KiB\n", 0x300_0000_0000 + number * 0x2000);
    let pieces: String = (0..16_384).map(piece).collect();
    let mut child = monitor.spawn(&["run"]);
    let lines = format!(
        "start\nuvm-init\nuvm-register\nalloc 1MiB as a\nuvm-range 0x30000000000 1GiB\n{pieces}\
         managed 8MiB at 0x10000000000\n"
    );
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), lines.as_bytes()).unwrap();
    // More than a pipe holds.
    let said = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout);
    assert_eq!(said.lines().last(), Some("managed errno=12"));
}

#[test]
fn mapping_refused_by_kernel_changes_no_charge() {
    let monitor = Monitor::charging_on_two_gpus();
    let used = || [0, 1].map(|gpu| monitor.status().gpus[gpu].used_bytes);
    let dir = tempfile::tempdir().unwrap();
    let over = path(&dir, "over");
    let before = "start\nuvm-init\nuvm-register\nmanaged 8MiB at 0x10000000000";
    let odd = "managed 4KiB at 0x10000000001\nmanaged 4KiB at 0x10000000000";
    let program = monitor.halfway(before, &format!("{odd}\nwait {over}"));
    program.go();
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(used(), [8 * MIB; 2]);
    }
    std::fs::write(&over, "").unwrap();
    program.end().must("managed errno=22").must("managed errno=12");
}

/// Waits until none of UVM's files has a GPU.
#[track_caller]
fn until_no_file_has_a_gpu(monitor: &Monitor) {
    until("no file has a GPU", || {
        let state = monitor.sim.state();
        let mut files = state["files"].as_array().expect("a list").iter();
        files.all(|file| file["uvm"]["gpus"].as_u64().is_none_or(|gpus| gpus == 0))
    });
}

/// The file is bound to an address space that no process has any more, unless a file retains it, which may have
/// been sent anywhere.
#[test]
fn uvm_file_of_exited_creator_has_no_gpu() {
    let monitor = Monitor::new();
    let after = "alloc 4MiB as a\nuvm-map a\nset-mm\n\
                 personality 0xffffffff\npersonality 0\npersonality 0x40000";
    let program = monitor.halfway("start\nuvm-of-a-child", after);
    until_no_file_has_a_gpu(&monitor);
    let said = program.go_on();
    said.must("uvm-of-a-child ok\n").must("uvm-map a status=0x26\n");
    // Nor can a process change what it was executed as.
    said.must("set-mm errno=22\n");
    said.must("personality ok\npersonality ok\npersonality errno=1\n");
    // Its creator lives, and has executed another program: that has another address space.
    let monitor = Monitor::new();
    let after = "alloc 4MiB as a\nuvm-map a";
    let program = monitor.halfway("start\nuvm-of-a-child executing", after);
    until_no_file_has_a_gpu(&monitor);
    let said = program.go_on();
    said.must("uvm-of-a-child ok\n").must("uvm-map a status=0x26\n");
    // Whether the monitor has seen that, or only read it in a snapshot.
    let monitor = Monitor::new();
    let before = "start\nuvm-of-a-child waiting\nalloc 4MiB as a\nuvm-map a";
    let program = monitor.halfway(before, "alloc 4MiB as b\nuvm-map b");
    monitor.update();
    until_no_file_has_a_gpu(&monitor);
    let said = program.go_on();
    said.must("uvm-map a ok\n").must("uvm-map b status=0x26\n");
    // It gets none either, whichever process initializes it again.
    for made in ["uvm-of-a-child", "uvm-of-a-child without"] {
        let lines = format!("start\n{made}\nsleep 2\nuvm-init\nuvm-register-anew");
        let said = Monitor::new().run(&script(&lines));
        said.must("uvm-of-a-child ok\n").must("uvm-init ok\n");
        said.must("uvm-register-anew status=0x1f\n");
    }
}
