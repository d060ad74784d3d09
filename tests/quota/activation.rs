//! Container creations whose monitor doesn't serve, and what enforces a quota in the first place.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::gated::{FIRST_MIB, Gated, RMTOOL, got_bytes, monitors, stop};
use crate::host::ask;
use crate::km_standin::StandIn;
use crate::support::{Bundle, Runtime, eventually};

/// What the wrapper says of one that has its listener, or doesn't take it.
const SILENT_AHEAD: [&str; 3] = ["the monitor at ", " doesn't answer: ", "make the container anew"];

/// What the wrapper says of a monitor that exited before it was assigned its container.
const ENDED: [&str; 3] = ["the monitor ", " has ended as soon as it was started", "see that it is"];

fn send(pid: i32, signal: Signal) {
    let _ = kill(Pid::from_raw(pid), signal); // gone already, then
}

/// Ends the monitor of the only container.
#[track_caller]
pub(crate) fn end_monitor(gated: &Gated) {
    let all = monitors(&gated.host);
    assert!(!all.is_empty(), "there is a monitor");
    all.iter().for_each(|pid| send(*pid, Signal::SIGKILL));
    assert!(eventually(|| monitors(&gated.host).is_empty()));
}

/// That nothing is registered, nor left in the gate's directory.
#[track_caller]
fn nothing_is_left(gated: &Gated) {
    gated.soon_is_empty();
    let left = crate::host::names(&gated.host.state_dir().join("gate"));
    assert_eq!(left, [].into(), "directories of monitors");
    gated.host.check_registry();
}

/// The wrapper, with that program in the place of the monitor.
fn with_monitor<'a>(gated: &'a Gated, monitor: &str) -> Runtime<'a> {
    let programs = gated.programs(&["cgpu-runtime", "cgpu-hook"]);
    gated.host.scratch.copy_program(monitor.as_ref(), &programs.join("cgpu-monitor"));
    let config = gated.host.config().display().to_string();
    gated.host.scratch.runtime(programs.join("cgpu-runtime")).env("CGPU_CONFIG", config)
}

/// A file with that text which may be executed.
fn executable(gated: &Gated, text: &str) -> String {
    let file = gated.host.scratch.path().join("executable");
    fs::write(&file, text).expect("it is ours");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("it is ours");
    file.display().to_string()
}

/// That `runtime` creates no container because of its monitor, which the error reports by `parts`.
#[track_caller]
fn is_not_created(gated: &Gated, runtime: &Runtime<'_>, bundle: &Bundle, parts: &[&str]) {
    let failed = runtime.create(bundle);
    gated.host.was_reported(failed, bundle, parts);
    let there = runtime.call(&["state", &bundle.id]);
    assert!(!there.status.success(), "the runtime has it: {there}");
}

/// Whenever the monitor exits: before it is assigned its container, or between the connection and its end.
#[test]
fn monitor_exiting_at_once_fails_container_creation() {
    let gated = Gated::new();
    let runtime = with_monitor(&gated, "/bin/false");
    let was_reported = |filler: usize| {
        let bundle = gated.bundle_with("lost", |config| {
            ask(config, 1000);
            config["process"]["args"] = json!([RMTOOL, "fill"]);
            config["annotations"]["filler"] = json!("x".repeat(filler));
        });
        is_not_created(&gated, &runtime, &bundle, &["the monitor "]);
        let log = fs::read_to_string(bundle.directory.join("log.json")).expect("it was written");
        fs::remove_dir_all(&bundle.directory).expect("it is ours");
        nothing_is_left(&gated);
        ENDED.iter().all(|part| log.contains(part))
    };
    for _ in 0..30 {
        was_reported(0);
    }
    // A bundle of this length takes longer to read than the program to end, on a machine with time for both.
    assert!(eventually(|| was_reported(16 << 20)), "the monitor never exits before its assignment");
}

/// The monitor is assigned its container, and then exits.
#[test]
fn monitor_exiting_after_its_assignment_fails_creation() {
    let gated = Gated::new();
    let ends = executable(&gated, "#!/bin/sh\n/usr/bin/head -c1 <&5\n");
    let runtime = with_monitor(&gated, &ends);
    for round in 0..10 {
        let bundle = gated.bundle(&format!("lost-{round}"), 1000, &[RMTOOL, "fill"]);
        is_not_created(&gated, &runtime, &bundle, &SILENT_AHEAD);
        nothing_is_left(&gated);
    }
}

/// It's started before that is known.
#[test]
fn a_container_that_is_refused_leaves_no_monitor() {
    let gated = Gated::new();
    let programs = gated.programs(&["cgpu-runtime", "cgpu-hook", "cgpu-monitor"]);
    let config = gated.host.config().display().to_string();
    let runtime = || {
        let runtime = gated.host.scratch.runtime(programs.join("cgpu-runtime"));
        runtime.env("CGPU_CONFIG", config.clone())
    };
    let started = || {
        let all = procfs::process::all_processes().expect("/proc can be read");
        let exe = |process: procfs::process::Process| process.exe().ok();
        all.flatten().filter_map(exe).filter(|exe| exe.starts_with(&programs)).count()
    };
    let (one, other) = (gated.sleeping("one", FIRST_MIB / 2 + 1), FIRST_MIB / 2);
    let bundle = gated.bundle("other", other, &[RMTOOL, "fill"]);
    gated.host.was_reported(runtime().create(&bundle), &bundle, &["GPU 0", "MiB"]);
    gated.host.runtime().delete(&one).ok();
    assert!(eventually(|| started() == 0));
    let bundle = gated.bundle("killed", 1000, &[RMTOOL, "fill"]);
    let killed = runtime().env(cgpu_host::failpoint::VARIABLE, "recruited").create(&bundle);
    assert_eq!(killed.status.signal(), Some(9), "{killed}");
    assert!(eventually(|| started() == 0));
    nothing_is_left(&gated);
    // There is one to be found.
    let bundle = gated.bundle("app", 1000, &["sleep", "100"]);
    runtime().create(&bundle).ok();
    assert!(started() > 0);
    runtime().delete(&bundle).ok();
    nothing_is_left(&gated);
}

#[test]
fn monitor_not_taking_its_listener_fails_creation() {
    let gated = Gated::new();
    let bundle = gated.bundle("waits", 1000, &[RMTOOL, "fill"]);
    let runtime = with_monitor(&gated, &executable(&gated, "#!/bin/sh\nexec sleep 600\n"));
    let parts = [&SILENT_AHEAD[..], &["timed out"]].concat();
    is_not_created(&gated, &runtime, &bundle, &parts);
    nothing_is_left(&gated);
}

#[test]
fn unexecutable_monitor_fails_container_creation() {
    let gated = Gated::new();
    let runtime = with_monitor(&gated, &executable(&gated, "no program"));
    let bundle = gated.bundle("app", 1000, &[RMTOOL, "fill"]);
    let failed = runtime.create(&bundle);
    let parts = ["cannot start the monitor ", "Exec format error", "see that it can be executed"];
    gated.host.was_reported(failed, &bundle, &parts);
    let there = runtime.call(&["state", &bundle.id]);
    assert!(!there.status.success(), "the runtime has it: {there}");
    nothing_is_left(&gated);
}

#[test]
fn an_exec_fails_whose_monitor_takes_no_listener() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    let monitor = gated.monitor("app_________");
    stop(monitor);
    let failed = gated.exec(&bundle, &["fill"]);
    send(monitor.as_raw(), Signal::SIGCONT);
    assert!(!failed.status.success() && !failed.stdout.contains("got_bytes"), "{failed}");
    assert!(failed.stderr.contains(" doesn't answer: timed out"), "{failed}");
    gated.fills(&bundle, 1000);
    gated.host.runtime().delete(&bundle).ok();
    nothing_is_left(&gated);
}

#[test]
fn auto_logs_the_chosen_backend_and_reason() {
    let mut gated = Gated::new();
    gated.host.set("isolation.backend", "auto");
    let filled = gated.run("first", 1000, &[RMTOOL, "fill"]).ok();
    assert_eq!(got_bytes(&filled), 1000 << 20, "{filled}");
    let log = gated.host.log();
    let says = |log: &str, why: &str, backend: &str| {
        log.lines().any(|line| line.contains(why) && line.contains(&format!("backend={backend}")))
    };
    assert!(says(&log, "auto: the vendor's module isn't loaded", "gate"), "{log}");
    nothing_is_left(&gated);
    // Somebody has installed it on purpose.
    let standin = StandIn::mount(&[0]);
    gated.host.set("isolation.km_root", standin.path().display().to_string());
    gated.host.forget_log();
    let bundle = gated.sleeping("second", 1000);
    let log = gated.host.log();
    assert!(says(&log, "auto: the vendor's module is loaded", "km"), "{log}");
    assert_eq!(gated.host.container("second")["backend"], "km");
    assert_eq!(standin.instances(0).len(), 1);
    gated.host.runtime().delete(&bundle).ok();
    nothing_is_left(&gated);
}

/// What the kernel gives out of a GPU no call of the driver's is asked for.
#[test]
fn gate_is_refused_for_kernel_managed_gpu_memory() {
    let mut gated = Gated::new();
    let proc = gated.host.scratch.directory("proc");
    let driver = proc.join("driver/nvidia");
    let gpu = driver.join("gpus/0009:01:00.0");
    fs::create_dir_all(&gpu).expect("it is ours");
    let version = gated.sim.dir().join("proc/driver/nvidia/version");
    fs::write(driver.join("version"), fs::read(version).unwrap()).expect("it is ours");
    gated.host.set("driver.proc_root", proc.display().to_string());
    let bundle = gated.bundle("app", 1000, &[RMTOOL, "fill"]);
    gated.host.runtime().run(&bundle).ok();
    fs::write(gpu.join("numa_status"), "Status: online\n").expect("it is ours");
    let bundle = gated.bundle("coherent", 1000, &[RMTOOL, "fill"]);
    let refused = gated.host.runtime().create(&bundle);
    let sentence = "the gate can't hold memory of a GPU that the kernel gives out as its own (";
    gated.host.was_reported(refused, &bundle, &[sentence, "numa_status)"]);
    nothing_is_left(&gated);
}

/// A health check a second must not fill the disk.
#[test]
fn container_logs_two_lines_despite_many_execs() {
    let mut gated = Gated::new();
    for backend in ["gate", "none"] {
        gated.host.set("isolation.backend", backend);
        let bundle = gated.sleeping("app", 1000);
        let created = gated.host.log();
        let line = format!("gpus=GPU 0 1000 MiB backend={backend} chosen=\"configured");
        assert!(created.contains(" INFO registered id=\"app\" root="), "{created}");
        assert!(created.contains(&line) && created.contains("driver_files=\"off\""), "{created}");
        assert!(created.contains("quota_by=\"ALIYUN_COM_GPU_MEM_CONTAINER=1000\""), "{created}");
        assert_eq!(created.lines().count(), 1, "{created}");
        for _ in 0..3 {
            gated.soon_uses(0);
            let words = ["run", "open", "client", "device 0", "alloc 900MiB as a"];
            assert!(gated.exec(&bundle, &words).ok().stdout.contains("alloc a ok"));
        }
        assert_eq!(gated.host.log(), created, "an exec is no event");
        gated.host.runtime().delete(&bundle).ok();
        nothing_is_left(&gated);
        let log = gated.host.log();
        let ended = log.strip_prefix(&created).unwrap();
        assert!(ended.contains(" INFO released id=\"app\"") && ended.lines().count() == 1, "{log}");
        gated.host.forget_log();
    }
}
