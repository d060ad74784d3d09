//! `cgpu-steer` where it isn't let to its end: what it changed is put back, and nothing hangs with a
//! call of the driver's.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cgpu_sim::{ClientState, Sim, SimOptions, State};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::support::{Scratch, run_with_timeout};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A simulated driver, two programs on it, and the program that schedules them.
struct Steered {
    child: Child,
    sim: Sim,
    // The driver's files are unmounted before the scratch goes.
    _scratch: Scratch,
}

impl Steered {
    fn start(phase_ms: u64, fault: Option<&str>) -> Self {
        let scratch = Scratch::new();
        let sim = Sim::start(SimOptions {
            dir: scratch.directory("sim"),
            gpus: vec!["1024MiB".parse().expect("a size")],
            driver: "535.161.08".parse().expect("a version"),
        });
        let sim = sim.expect("the simulated driver starts: root and /dev/fuse");
        if let Some(fault) = fault {
            sim.fault(fault.parse().expect("a fault"));
        }
        let spin = compile(&scratch, "spin", &["programs/spin.c", "-ldl"]);
        compile(&scratch, "libcuda.so.1", &["-shared", "-fPIC", "standin/cuda.c"]);
        let programs = Path::new(env!("CARGO_BIN_EXE_cgpu-runtime")).parent();
        let steer = programs.expect("it lies somewhere").join("cgpu-steer");
        let dev = sim.dir().join("dev");
        let mut command = scratch.command(steer);
        command.args(["--driver", "535.161.08", "--phase-ms", &phase_ms.to_string(), "--dev"]);
        command.arg(&dev).arg("--a").arg(scratch.path().join("a"));
        command.arg("--b").arg(scratch.path().join("b")).arg("--").arg(spin);
        command.args(["--seconds", "50", "--ahead", "8"]);
        command.env("LD_LIBRARY_PATH", scratch.path()).env("STANDIN_DEV", dev);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let child = child.expect("cgpu-steer is built: cargo build --workspace --bins");
        Steered { child, sim, _scratch: scratch }
    }

    #[track_caller]
    fn until(&self, what: &str, holds: impl Fn(&State) -> bool) {
        let deadline = Instant::now() + TIMEOUT;
        while !holds(&self.sim.state()) {
            assert!(Instant::now() < deadline, "{what}: {:#?}", self.sim.state());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What it said, which it says before it ends.
    fn said(&mut self) -> Value {
        let output = self.child.stdout.take().expect("a pipe");
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).expect("it says something");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// Its end, and that of all that the programs held.
    fn ends(mut self) {
        assert!(self.child.wait().expect("it ends").success());
        self.until("the programs have ended", |state| state.clients.is_empty());
    }
}

fn compile(scratch: &Scratch, name: &str, words: &[&str]) -> PathBuf {
    let target = scratch.path().join(name);
    let mut command = Command::new("cc");
    command.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu"));
    run_with_timeout(command.args(["-O2", "-o"]).arg(&target).args(words), TIMEOUT).ok();
    target
}

/// The controls of one kind that were asked in a phase.
fn asked<'a>(said: &'a Value, phase: &str, name: &str) -> Vec<&'a Value> {
    let all = said["controls"].as_array().expect("a list");
    all.iter().filter(|control| control["phase"] == phase && control["name"] == name).collect()
}

/// If cgpu-steer is stopped in the middle, it puts slices back first.
#[test]
fn stopped_steer_restores_slices_first() {
    let mut steered = Steered::start(1000, None);
    steered.until("a slice is changed", |state| {
        let mut objects = state.clients.iter().flat_map(|client| &client.objects);
        objects.any(|object| object.timeslice_us == 4000)
    });
    let pid = Pid::from_raw(i32::try_from(steered.child.id()).expect("a pid"));
    kill(pid, Signal::SIGTERM).expect("it runs");
    let said = steered.said();
    assert_eq!((&said["put_back"], &said["ended_early"]), (&true.into(), &true.into()), "{said}");
    let back = asked(&said, "put back", "SET_TIMESLICE");
    assert_eq!(back.len(), 2, "{said}");
    assert!(back.iter().all(|set| set["asked"] == "2048 us" && set["status"] == "0x0"), "{said}");
    assert!(said["exits"].as_array().expect("a list").iter().all(|exit| exit == "exit status 0"));
    steered.ends();
}

/// If cgpu-steer is stopped while a program is off the GPU, it brings the program back.
#[test]
fn stopped_steer_brings_disabled_program_back() {
    let mut steered = Steered::start(1000, None);
    // A channel starts off the GPU: if kernels of its group have ended, it was on.
    steered.until("one that has run is off the GPU", |state| {
        let has_run = |client: &ClientState, group: u32| {
            client.objects.iter().any(|object| object.handle == group && object.kernels > 0)
        };
        state.clients.iter().any(|client| {
            let mut objects = client.objects.iter();
            objects.any(|object| object.disabled && has_run(client, object.parent))
        })
    });
    let pid = Pid::from_raw(i32::try_from(steered.child.id()).expect("a pid"));
    kill(pid, Signal::SIGTERM).expect("it runs");
    let said = steered.said();
    assert_eq!((&said["put_back"], &said["ended_early"]), (&true.into(), &true.into()), "{said}");
    let back = asked(&said, "put back", "FIFO_DISABLE_CHANNELS");
    assert_eq!((back.len(), &back[0]["tenant"]), (1, &"b".into()), "{said}");
    assert_eq!(back[0]["asked"], "enable 1 channels");
    steered.ends();
}

#[test]
fn hanging_call_is_reported_and_abandoned() {
    let mut steered = Steered::start(50, Some("control:0xa06f0111 hang times 1"));
    let said = steered.said();
    let restarts = asked(&said, "2:1", "RESTART_RUNLIST");
    assert_eq!((&restarts[0]["hung"], &restarts[1]["status"]), (&true.into(), &"0x0".into()));
    assert_eq!((&said["put_back"], &said["ended_early"]), (&true.into(), &false.into()), "{said}");
    // No process ends while a call of its hangs.
    steered.sim.fault("clear".parse().expect("a fault"));
    steered.ends();
}

#[test]
fn program_that_never_computes_is_reported() {
    let mut command =
        Command::new(Path::new(env!("CARGO_BIN_EXE_cgpu-runtime")).with_file_name("cgpu-steer"));
    command.args(["--driver", "535.161.08", "--a", "/dev/null", "--b", "/dev/null", "--", "true"]);
    let outcome = run_with_timeout(&mut command, TIMEOUT).exits(1);
    assert_eq!(outcome.json()["failed"], "a ended before it computed");
}
