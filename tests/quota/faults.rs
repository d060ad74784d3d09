//! Monitors, engines and drivers that fail.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use cgpu_sim::Fault;
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::activation::end_monitor;
use crate::attacks::MOST_TIME_OVER;
use crate::gated::{Gated, MIB, RMTOOL, got_bytes, monitors, stop};
use crate::support::{Bundle, Outcome, eventually, run_with_timeout, timeout, wait_until};

/// The monitor of the only container.
#[track_caller]
fn only_monitor(gated: &Gated) -> Pid {
    gated.monitor("app_________")
}

/// That the container can do with its GPU what it could.
#[track_caller]
fn fills(gated: &Gated, bundle: &Bundle, mib: u64) {
    let filled = gated.exec(bundle, &["fill"]);
    assert_eq!(got_bytes(&filled), mib * MIB, "{filled}\n{}", gated.host.log());
}

/// How often a process's first thread has waited for something (`voluntary_ctxt_switches`, proc_pid_status(5)).
fn waits(process: Pid) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("it is there");
    let waits = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    waits.expect("the kernel says it").trim().parse().expect("a number")
}

/// No call but the first wakes the monitor's first thread.
#[test]
fn only_the_first_call_wakes_the_first_thread() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let monitor = only_monitor(&gated);
    let calls = || gated.calls("app_________");
    gated.exec(&bundle, &["bench", "10"]).ok();
    let (called, waited) = (calls(), waits(monitor));
    gated.exec(&bundle, &["bench", "500"]).ok();
    let (called, waited) = (calls() - called, waits(monitor) - waited);
    assert!(called > 2000 && waited < called / 10, "{waited} waits in {called} calls");
    gated.host.runtime().delete(&bundle).ok();
}

/// Without its monitor, a container's GPU is closed, and the container can be removed.
#[test]
fn gpu_is_closed_without_monitor_and_container_removable() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    end_monitor(&gated);
    let refused = gated.exec(&bundle, &["fill"]);
    assert!(!refused.status.success(), "{refused}");
    assert_eq!(gated.used_bytes(0), 0);
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// Closed, not open, also to who has the GPU's files and memory of it already.
#[test]
fn memory_is_retained_but_not_extended_without_monitor() {
    let words = [
        "run",
        "start",
        "alloc 300MiB as a",
        "touch /tmp/ready",
        "wait /tmp/go",
        "alloc 100MiB as b",
        "heap 100MiB as c",
        "info",
        "controls",
        "free a",
        "touch /tmp/done",
        "sleep 1000",
    ];
    let gated = Gated::new();
    let runtime = gated.host.runtime();
    let bundle = gated.sleeping("app", 1000);
    // No process can enter a container whose monitor has exited; its files can be had from outside.
    let state = runtime.call(&["state", &bundle.id]).ok().json();
    let tmp = PathBuf::from(format!("/proc/{}/root/tmp", state["pid"]));
    let holder = gated.start(&bundle, &words);
    assert!(eventually(|| tmp.join("ready").exists()));
    assert_eq!(gated.used_bytes(0), 300 * MIB);
    end_monitor(&gated);
    std::fs::write(tmp.join("go"), "").unwrap();
    assert!(eventually(|| tmp.join("done").exists()));
    assert_eq!(gated.used_bytes(0), 300 * MIB, "it keeps what it had");
    assert_eq!(gated.host.records().len(), 1, "it is there still, with its quota");
    runtime.kill(&bundle, "KILL").ok();
    assert!(wait_until(timeout(), || runtime.status(&bundle) == "stopped"));
    runtime.call(&["delete", &bundle.id]).ok();
    gated.soon_is_empty();
    let said = holder.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let calls: Vec<&str> =
        said.lines().skip_while(|line| *line != "alloc a ok bytes=314572800").collect();
    let [_, closed @ ..] = calls.as_slice() else { panic!("{said}") };
    assert!(closed.len() >= 12, "{said}");
    for line in closed {
        assert!(line.ends_with(&format!(" errno={}", libc::ENOSYS)), "{line:?} in {said}");
    }
}

#[test]
fn stopped_monitor_serves_again_once_continued() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let monitor = only_monitor(&gated);
    stop(monitor);
    let mut waiting = gated.start(&bundle, &["fill"]);
    std::thread::sleep(Duration::from_millis(300));
    assert!(waiting.try_wait().unwrap().is_none(), "it waits");
    kill(monitor, Signal::SIGCONT).unwrap();
    assert!(waiting.wait().unwrap().success());
    fills(&gated, &bundle, 1000);
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

#[test]
fn a_container_whose_call_hangs_can_be_killed() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    gated.sim.fault("alloc:0x40 hang".parse().unwrap());
    let mut hung = gated.start(&bundle, &["hold", "100MiB"]);
    assert!(eventually(|| gated.sim.state().hanging == 1));
    gated.host.runtime().delete(&bundle).ok();
    hung.wait().unwrap();
    gated.sim.fault(Fault::Clear);
    gated.soon_is_empty();
}

/// Puts another program in the place of one, as a package's installation does.
fn replace(program: &Path) {
    let new = program.with_extension("new");
    // By a process of its own, as `Scratch::copy_program` does. What follows the parts that an ELF file's headers
    // name is never read.
    let mut copy = std::process::Command::new("sh");
    copy.args(["-c", "cp \"$0\" \"$1\" && echo a new version >> \"$1\""]).arg(program).arg(&new);
    run_with_timeout(&mut copy, timeout()).ok();
    std::fs::rename(&new, program).expect("it is ours");
}

/// Device, inode and size of the file that a process executes.
fn executed(pid: Pid) -> (u64, u64, u64) {
    identity(Path::new(&format!("/proc/{pid}/exe")))
}

fn identity(path: &Path) -> (u64, u64, u64) {
    let of = std::fs::metadata(path).expect("it is there");
    (of.dev(), of.ino(), of.len())
}

/// A container of 1000 MiB by programs of its own, which may be replaced, and 300 MiB that it holds.
struct Installed {
    programs: PathBuf,
    bundle: Bundle,
    holder: Child,
}

impl Installed {
    fn of(gated: &Gated) -> Self {
        let programs = gated.programs(&["cgpu", "cgpu-runtime", "cgpu-hook", "cgpu-monitor"]);
        let runtime = gated.host.scratch.runtime(programs.join("cgpu-runtime"));
        let runtime = runtime.env("CGPU_CONFIG", gated.host.config().display().to_string());
        let bundle = gated.bundle("app", 1000, &["sleep", "1000"]);
        runtime.create(&bundle).ok();
        runtime.start(&bundle).ok();
        let holder = gated.start(&bundle, &["hold", "300MiB"]);
        assert!(eventually(|| gated.used_bytes(0) == 300 * MIB));
        Installed { programs, bundle, holder }
    }

    fn monitor(&self) -> PathBuf {
        self.programs.join("cgpu-monitor")
    }

    /// What `cgpu upgrade-monitors` says.
    fn run_upgrade(&self, gated: &Gated) -> Outcome {
        let mut upgrade = gated.host.scratch.command(self.programs.join("cgpu"));
        upgrade.arg("--config").arg(gated.host.config()).arg("upgrade-monitors");
        run_with_timeout(&mut upgrade, timeout())
    }

    /// The same, where each monitor is upgraded.
    #[track_caller]
    fn upgrade(&self, gated: &Gated) -> Outcome {
        self.run_upgrade(gated).ok()
    }

    fn end(mut self, gated: &Gated) {
        // The monitor may have a file of a program that has ended for a moment longer.
        assert!(eventually(|| gated.used_bytes(0) == 300 * MIB), "{}", gated.used_bytes(0));
        gated.host.runtime().delete(&self.bundle).ok();
        self.holder.wait().expect("it ends");
        gated.soon_is_empty();
    }
}

#[test]
fn new_monitor_takes_over_under_load_without_loss() {
    let gated = Gated::new();
    let installed = Installed::of(&gated);
    let (monitor, bundle) = (installed.monitor(), &installed.bundle);
    let line = "while [ ! -e /tmp/enough ]; do /rmtool bench 2000 || exit 1; done";
    let mut load = gated.host.runtime().command();
    load.args(["exec", &bundle.id, "sh", "-c", line]).stdout(Stdio::null());
    let mut load = load.spawn().expect("the runtime can be started");
    let pid = only_monitor(&gated);
    for turn in 0..5 {
        assert_eq!(executed(pid), identity(&monitor), "in turn {turn}");
        replace(&monitor);
        assert_ne!(executed(pid), identity(&monitor), "in turn {turn}");
        let reported = installed.upgrade(&gated);
        let version = env!("CARGO_PKG_VERSION");
        assert!(
            reported.stdout.contains(&format!("app_________ {version} -> {version}")),
            "{reported}"
        );
        assert_eq!(only_monitor(&gated), pid, "in turn {turn}");
    }
    assert_eq!(executed(pid), identity(&monitor));
    assert!(load.try_wait().unwrap().is_none(), "a call failed: {}", gated.host.log());
    gated.host.runtime().exec(bundle, &["touch", "/tmp/enough"]).ok();
    assert!(load.wait().unwrap().success(), "{}", gated.host.log());
    gated.soon_accounts("app", 300);
    fills(&gated, bundle, 700);
    installed.end(&gated);
}

/// A program that can't go on with the snapshot, or that can't run: the container keeps the one that it has.
#[test]
fn upgrade_to_an_unusable_monitor_loses_nothing() {
    let gated = Gated::new();
    let installed = Installed::of(&gated);
    let monitor = installed.monitor();
    let pid = only_monitor(&gated);
    let first = identity(&monitor);
    let no_program = gated.host.scratch.file("no-program", "no program");
    std::fs::set_permissions(&no_program, std::fs::Permissions::from_mode(0o755)).unwrap();
    // One that ends, one that says why not, one that takes too long, and none.
    let programs = [
        (Path::new("/bin/false"), "exit status: 1"),
        (Path::new("/bin/ls"), "cannot access 'check'"),
        (Path::new("/usr/bin/yes"), "it takes too long"),
        (&no_program, "Exec format error"),
    ];
    for (program, said) in programs {
        let new = monitor.with_extension("new");
        gated.host.scratch.copy_program(program, &new);
        std::fs::rename(&new, &monitor).expect("it is ours");
        let reported = installed.run_upgrade(&gated);
        let why = "app_________: the installed monitor can't go on with this container";
        assert!(reported.status.code() == Some(1) && reported.stderr.contains(why), "{reported}");
        assert!(reported.stderr.contains(said), "{reported}");
        fills(&gated, &installed.bundle, 700);
        assert_eq!((only_monitor(&gated), executed(pid)), (pid, first));
    }
    installed.end(&gated);
}

/// What a monitor hands to the next program is in memory alone.
#[test]
fn upgrade_needs_no_space_in_state_directory() {
    let gated = Gated::new();
    let state_dir = gated.host.state_dir();
    std::fs::create_dir(&state_dir).expect("it is not there yet");
    let mut mount = gated.host.scratch.command("mount");
    mount.args(["-t", "tmpfs", "-o", "size=4m,mode=700", "tmpfs"]).arg(&state_dir);
    run_with_timeout(&mut mount, timeout()).ok();
    let installed = Installed::of(&gated);
    let (monitor, pid) = (installed.monitor(), only_monitor(&gated));
    // It ends by ENOSPC, after having taken all there was.
    std::fs::write(state_dir.join("filler"), vec![0; 5 << 20]).unwrap_err();
    replace(&monitor);
    let reported = installed.upgrade(&gated);
    assert!(reported.stdout.starts_with("app_________ "), "{reported}");
    assert_eq!((only_monitor(&gated), executed(pid)), (pid, identity(&monitor)));
    std::fs::remove_file(state_dir.join("filler")).expect("it is ours");
    fills(&gated, &installed.bundle, 700);
    installed.end(&gated);
}

/// Else a program that waits for an upgrade would have as much again as it has exported.
#[test]
fn memory_hidden_behind_export_is_found_after_upgrade() {
    let gated = Gated::new();
    let words = ["--held", "attack", "hide-slack", "anew", "/tmp/ready", "/tmp/go"];
    // It is a race, which the attacker may lose: then it has no more than its quota, and is not killed.
    let is_killed = || {
        let bundle = gated.sleeping("app", 1000);
        let mut attack = gated.start(&bundle, &words);
        let runtime = gated.host.runtime();
        let ready = || runtime.exec(&bundle, &["test", "-e", "/tmp/ready"]).status.success();
        assert!(eventually(ready));
        gated.update();
        runtime.exec(&bundle, &["touch", "/tmp/go"]).ok();
        let mut since: Option<Instant> = None;
        let status = loop {
            if let Some(status) = attack.try_wait().unwrap() {
                break status;
            }
            let exceeds = gated.used_bytes(0) > 1000 * MIB;
            since = exceeds.then(|| since.unwrap_or_else(Instant::now));
            let over = since.map_or(Duration::ZERO, |since| since.elapsed());
            assert!(over <= MOST_TIME_OVER, "{over:?}: {}", gated.host.log());
            std::thread::sleep(Duration::from_millis(3));
        };
        runtime.exec(&bundle, &["rm", "/tmp/ready", "/tmp/go"]).ok();
        runtime.delete(&bundle).ok();
        gated.soon_is_empty();
        status.code() == Some(128 + Signal::SIGKILL as i32)
    };
    assert!(eventually(is_killed), "{}", gated.host.log());
    let log = gated.host.log();
    assert!(log.contains("killed: it used memory"), "{log}");
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
    assert!(eventually(|| monitors(&gated.host).is_empty()));
    gated.host.gc();
    gated.soon_is_empty();
}

#[test]
fn unstartable_monitor_fails_the_container_creation() {
    let gated = Gated::new();
    let programs = gated.programs(&["cgpu", "cgpu-runtime", "cgpu-hook"]);
    let bundle = gated.bundle("alone", 1000, &["true"]);
    let config = gated.host.config().display().to_string();
    let runtime =
        gated.host.scratch.runtime(programs.join("cgpu-runtime")).env("CGPU_CONFIG", config);
    gated.host.was_reported(
        runtime.create(&bundle),
        &bundle,
        &["the gate's program ", "cgpu-monitor is missing"],
    );
    assert_eq!(gated.host.records(), [].into());
}
