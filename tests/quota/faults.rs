//! Monitors, engines and drivers that fail.

use std::time::{Duration, Instant};

use cgpu_sim::{Action, CallFault, Fault, Kind};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::gated::{Gated, MIB, RMTOOL, got_bytes, monitors};
use crate::support::{Bundle, wait_until};

fn parent(pid: i32) -> i32 {
    let stat = procfs::process::Process::new(pid).and_then(|process| process.stat());
    stat.map_or(0, |stat| stat.ppid)
}

/// The keeper and the worker of the only container.
#[track_caller]
fn keeper_and_worker(gated: &Gated) -> (Pid, Pid) {
    let both = || {
        let all = monitors(&gated.host);
        let worker = all.iter().find(|pid| all.contains(&parent(**pid)))?;
        Some((Pid::from_raw(parent(*worker)), Pid::from_raw(*worker)))
    };
    // One that was seen may be dying: what was found once counts.
    let mut found = None;
    wait_until(Duration::from_secs(5), || {
        found = both();
        found.is_some()
    });
    found.unwrap_or_else(|| panic!("no monitor: {:?}\n{}", monitors(&gated.host), gated.host.log()))
}

/// That the container can do with its GPU what it could.
#[track_caller]
fn fills(gated: &Gated, bundle: &Bundle, mib: u64) {
    let filled = gated.exec(bundle, &["fill"]);
    assert_eq!(got_bytes(&filled), mib * MIB, "{filled}\n{}", gated.host.log());
}

#[test]
fn a_worker_that_is_killed_at_any_moment_loses_and_doubles_nothing() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let mut holder = gated.start(&bundle, &["hold", "300MiB"]);
    assert!(wait_until(Duration::from_secs(5), || gated.used_bytes(0) == 300 * MIB));
    for round in 0..8 {
        let mut load = gated.start(&bundle, &["bench", "3000"]);
        let end = Instant::now() + Duration::from_millis(400);
        while Instant::now() < end {
            let (_, worker) = keeper_and_worker(&gated);
            let _ = kill(worker, Signal::SIGKILL);
            std::thread::sleep(Duration::from_millis(17 + round));
        }
        assert!(load.wait().unwrap().success(), "round {round}: {}", gated.host.log());
        assert!(
            wait_until(Duration::from_secs(3), || gated.accounted_bytes("app") == 300 * MIB),
            "round {round}: {} by the monitor, {} by the driver",
            gated.accounted_bytes("app"),
            gated.used_bytes(0),
        );
        assert_eq!(gated.used_bytes(0), 300 * MIB, "round {round}");
    }
    fills(&gated, &bundle, 700);
    gated.host.runtime().delete(&bundle).ok();
    holder.wait().unwrap();
    gated.soon_is_empty();
}

#[test]
fn without_keeper_and_worker_the_gpu_is_closed_and_the_container_can_be_removed() {
    for first in [0, 1] {
        let gated = Gated::new();
        let bundle = gated.sleeping("app", 1000);
        let (keeper, worker) = keeper_and_worker(&gated);
        let both = [keeper, worker];
        kill(both[first], Signal::SIGSTOP).unwrap();
        kill(both[1 - first], Signal::SIGKILL).unwrap();
        kill(both[first], Signal::SIGKILL).unwrap();
        assert!(wait_until(Duration::from_secs(5), || monitors(&gated.host).is_empty()));
        let refused = gated.exec(&bundle, &["fill"]);
        assert!(!refused.status.success(), "{refused}");
        assert_eq!(gated.used_bytes(0), 0);
        gated.host.runtime().delete(&bundle).ok();
        gated.soon_is_empty();
    }
}

#[test]
fn a_worker_that_is_stopped_and_continued_goes_on() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let (_, worker) = keeper_and_worker(&gated);
    kill(worker, Signal::SIGSTOP).unwrap();
    let mut waiting = gated.start(&bundle, &["fill"]);
    std::thread::sleep(Duration::from_millis(300));
    assert!(waiting.try_wait().unwrap().is_none(), "it waits");
    kill(worker, Signal::SIGCONT).unwrap();
    assert!(waiting.wait().unwrap().success());
    fills(&gated, &bundle, 1000);
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

#[test]
fn a_driver_call_that_hangs_holds_up_its_caller_alone() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    fills(&gated, &bundle, 1000);
    gated.sim.fault(Fault::Call(CallFault {
        kind: Some(Kind::Alloc),
        what: Some(0x40),
        action: Action::Hang,
        times: Some(1),
    }));
    let mut hung = gated.start(&bundle, &["hold", "100MiB"]);
    assert!(wait_until(Duration::from_secs(5), || gated.sim.state().hanging == 1));
    // What hangs may yet be given, so that it counts; what others had is given back.
    for _ in 0..3 {
        fills(&gated, &bundle, 900);
    }
    assert!(hung.try_wait().unwrap().is_none());
    gated.sim.fault(Fault::Clear);
    assert!(wait_until(Duration::from_secs(5), || gated.used_bytes(0) == 100 * MIB));
    gated.host.runtime().delete(&bundle).ok();
    hung.wait().unwrap();
    gated.soon_is_empty();
}

#[test]
fn a_container_whose_call_hangs_can_be_killed() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    gated.sim.fault("alloc:0x40 hang".parse().unwrap());
    let mut hung = gated.start(&bundle, &["hold", "100MiB"]);
    assert!(wait_until(Duration::from_secs(5), || gated.sim.state().hanging == 1));
    gated.host.runtime().delete(&bundle).ok();
    hung.wait().unwrap();
    gated.sim.fault(Fault::Clear);
    gated.soon_is_empty();
}

#[test]
fn a_free_that_the_driver_lost_refuses_nobody_for_long() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    for _ in 0..3 {
        fills(&gated, &bundle, 1000);
    }
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

#[test]
fn a_new_monitor_takes_over_under_load_and_nothing_is_lost() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let mut holder = gated.start(&bundle, &["hold", "300MiB"]);
    assert!(wait_until(Duration::from_secs(5), || gated.used_bytes(0) == 300 * MIB));
    let mut load = gated.start(&bundle, &["bench", "20000"]);
    let (keeper, before) = keeper_and_worker(&gated);
    for _ in 0..5 {
        let told = gated.host.cgpu(&["upgrade-monitors"]).ok();
        let version = env!("CARGO_PKG_VERSION");
        assert!(told.stdout.contains(&format!("app_________ {version} -> {version}")), "{told}");
    }
    let (same, after) = keeper_and_worker(&gated);
    assert_eq!(keeper, same);
    assert_ne!(before, after);
    assert!(load.wait().unwrap().success(), "{}", gated.host.log());
    assert_eq!(gated.accounted_bytes("app"), 300 * MIB);
    fills(&gated, &bundle, 700);
    gated.host.runtime().delete(&bundle).ok();
    holder.wait().unwrap();
    gated.soon_is_empty();
}

/// Else a program that waits for an upgrade would have as much again as it has exported.
#[test]
fn what_is_hidden_behind_an_export_is_found_after_an_upgrade_and_a_crash() {
    let gated = Gated::new();
    let words = ["attack", "hide-slack", "anew", "/tmp/ready", "/tmp/go"];
    for crashes in [false, true] {
        let bundle = gated.sleeping("app", 1000);
        let mut attack = gated.start(&bundle, &words);
        let runtime = gated.host.runtime();
        let ready = || runtime.exec(&bundle, &["test", "-e", "/tmp/ready"]).status.success();
        assert!(wait_until(Duration::from_secs(10), ready));
        let (_, before) = keeper_and_worker(&gated);
        match crashes {
            true => kill(before, Signal::SIGKILL).expect("it serves"),
            false => drop(gated.host.cgpu(&["upgrade-monitors"]).ok()),
        }
        assert!(wait_until(Duration::from_secs(5), || keeper_and_worker(&gated).1 != before));
        runtime.exec(&bundle, &["touch", "/tmp/go"]).ok();
        let mut since: Option<Instant> = None;
        while attack.try_wait().unwrap().is_none() {
            let is_over = gated.used_bytes(0) > 1000 * MIB;
            since = is_over.then(|| since.unwrap_or_else(Instant::now));
            let over = since.map_or(Duration::ZERO, |since| since.elapsed());
            assert!(over <= Duration::from_secs(1), "{over:?}: {}", gated.host.log());
            std::thread::sleep(Duration::from_millis(3));
        }
        runtime.exec(&bundle, &["rm", "/tmp/ready", "/tmp/go"]).ok();
        runtime.delete(&bundle).ok();
        gated.soon_is_empty();
    }
    let log = gated.host.log();
    assert_eq!(log.matches("killed: it used memory").count(), 2, "{log}");
}

#[test]
fn a_create_that_fails_leaves_no_monitor() {
    let gated = Gated::new();
    let bundle = gated.bundle("wrong", 1000, &["/no/such/program"]);
    let runtime = gated.host.runtime();
    let failed = runtime.run(&bundle);
    assert!(!failed.status.success(), "{failed}");
    gated.soon_is_empty();
    // Killed between the monitor's start and the runtime's.
    let bundle = gated.bundle("killed", 1000, &[RMTOOL, "fill"]);
    let killed = gated.host.dying_runtime("launched").create(&bundle);
    assert!(!killed.status.success(), "{killed}");
    assert!(wait_until(Duration::from_secs(5), || monitors(&gated.host).is_empty()));
    gated.host.gc();
    gated.soon_is_empty();
}

#[test]
fn a_monitor_that_can_not_be_started_fails_the_create() {
    let gated = Gated::new();
    let programs = gated.host.scratch.directory("programs");
    for name in ["cgpu", "cgpu-runtime", "cgpu-hook"] {
        let from = std::path::Path::new(env!("CARGO_BIN_EXE_cgpu")).with_file_name(name);
        std::fs::hard_link(&from, programs.join(name))
            .or_else(|_| std::fs::copy(&from, programs.join(name)).map(|_| ()))
            .unwrap();
    }
    let bundle = gated.bundle("alone", 1000, &["true"]);
    let config = gated.host.config().display().to_string();
    let runtime =
        gated.host.scratch.runtime(programs.join("cgpu-runtime")).env("CGPU_CONFIG", config);
    gated.host.was_told(
        runtime.create(&bundle),
        &bundle,
        &["the gate's program ", "cgpu-monitor is missing"],
    );
    assert_eq!(gated.host.records(), [].into());
}
