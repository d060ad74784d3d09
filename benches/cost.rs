//! What cgpu costs beside the bare runtime: `make bench`.
//!
//! Every figure is a median of runs taken in turn with the peer's, in one go, because
//! the machine's mood changes by the minute; so differences and ratios count, and no
//! test asserts them. Root, runc and busybox-static.

mod listener;
mod measure;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cgpu::admission::Admission;
use cgpu::host::Host;
use cgpu_core::plan::{Candidate, Kind, Plan, PlannedGpu, Proposal, WeightAsked};
use cgpu_host::config::{Backend, Config};
use cgpu_host::process::ProcessId;
use cgpu_host::registry::{Holder, Key};
use cgpu_sim::{Program, SimOptions};
use listener::{Check, least, was_the_caller};
use measure::{header, in_turn, median, ms, row, timed};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Pairs of runs for commands that only print.
const PASS_RUNS: usize = 200;
/// Pairs of runs for whole containers.
const CREATE_RUNS: usize = 100;
/// The time before each of these: a host is idle when a container comes. One right after the other, a container costs less
/// than users see, since programs and caches are warm.
const REST: Duration = Duration::from_millis(150);
/// What is created: bare, with a filter but without us, without a request, with one.
const BUNDLES: &[&str] = &["bare", "bare-docker", "plain", "quota", "gate", "gate-docker"];
/// Runs of the application that calls the driver, in each kind of container.
const CALL_RUNS: usize = 9;
/// Calls of each kind in a run.
const CALLS: u32 = 2000;
/// Execs in a container after which a further one has no thread of its own that waits for its calls.
const QUEUED: usize = 16;
/// Containers that are registered while one more is admitted.
const REGISTERED: usize = 1000;
/// Admissions that are measured.
const ADMIT_RUNS: usize = 200;

fn main() {
    if was_the_caller() {
        return;
    }
    let programs = match std::env::var_os("CGPU_BIN_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_BIN_EXE_cgpu-runtime")).with_file_name(""),
    };
    // A tmpfs, as /run is on a host.
    let work = tempfile::tempdir_in("/dev/shm").expect("a directory can be made");
    let bench = Bench { runtime: programs.join("cgpu-runtime"), work: work.path().to_owned() };
    bench.prepare();
    header("bare", "cgpu");
    bench.pass_through();
    bench.create("create without a request", "bare", "plain", "none", "");
    bench.create("create with a quota, backend none", "bare", "quota", "none", "≤ 3 ms more");
    bench.create("create with the gate", "bare", "gate", "gate", "≤ 3 ms more");
    let (bare, gate) = ("bare-docker", "gate-docker");
    bench.create("the same with docker's profile", bare, gate, "gate", "≤ 3 ms more");
    bench.create_with_shares();
    bench.admission();
    bench.prepare_calls(&programs);
    bench.untrapped(&programs);
    bench.calls(&programs, "calls");
    bench.calls_beside_execs(&programs);
    bench.calls_with_shares(&programs);
    // As if the driver were no process of its own: no call waits for another processor to wake up.
    let all = sched_getaffinity(Pid::this()).expect("it can be asked");
    let mut one = CpuSet::new();
    let first = (0..CpuSet::count()).find(|cpu| all.is_set(*cpu) == Ok(true));
    one.set(first.expect("there is a processor")).expect("it is one of the set");
    sched_setaffinity(Pid::this(), &one).expect("it may run there");
    bench.calls(&programs, "calls, all on one processor");
}

/// What the application prints.
type Report = serde_json::Value;

struct Bench {
    runtime: PathBuf,
    work: PathBuf,
}

fn call_header(title: &str) {
    println!();
    println!("{title:<44} {:>9} {:>9} {:>9} {:>7}  budget", "bare", "gate", "more", "ratio");
}

fn call_row(what: &str, bare: Duration, gate: Duration, budget: &str) {
    let us = |time: Duration| match time {
        time if time < Duration::from_millis(1) => format!("{:.2} µs", time.as_secs_f64() * 1e6),
        time => ms(time),
    };
    let ratio = gate.as_secs_f64() / bare.as_secs_f64();
    let more = gate.saturating_sub(bare);
    println!("{what:<44} {:>9} {:>9} {:>9} {ratio:>6.2}×  {budget}", us(bare), us(gate), us(more));
}

/// What runs say by that name, in nanoseconds.
fn times(runs: &[Report], name: &str) -> Vec<Duration> {
    runs.iter().map(|run| Duration::from_nanos(run[name].as_u64().unwrap_or(0))).collect()
}

impl Bench {
    /// Writes the configuration and the bundles.
    fn prepare(&self) {
        let path = |name: &str| self.work.join(name);
        let gpus = r#"[{"index": 0, "uuid": "GPU-c09d11f5-a565-1f83-903c-a65a7ba138af", "minor": 0, "memory_mib": 16130}]"#;
        fs::write(path("gpus.json"), gpus).expect("a file can be written");
        for (name, backend, policy) in
            [("none", "none", 1), ("gate", "gate", 1), ("gate-5", "gate", 5)]
        {
            let config = format!(
                "state_dir = {:?}\nlog = {:?}\n[inventory]\nsource = \"file\"\npath = {:?}\n\
                 [isolation]\nbackend = \"{backend}\"\n[compute]\npolicy = {policy}\n\
                 [driver]\nroot = {:?}\nproc_root = {:?}\n",
                path("state"),
                path("cgpu.log"),
                path("gpus.json"),
                path("driver"),
                path("driver/proc"),
            );
            fs::write(path(&format!("{name}.toml")), config).expect("a file can be written");
        }
        // A driver that no process calls: files are as good as devices.
        for dir in ["driver/dev", "driver/proc/driver/nvidia"] {
            fs::create_dir_all(path(dir)).expect("a directory can be made");
        }
        for node in ["nvidiactl", "nvidia-uvm", "nvidia0"] {
            fs::write(path("driver/dev").join(node), "").expect("a file can be written");
        }
        let version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Feb\n";
        fs::write(path("driver/proc/driver/nvidia/version"), version).expect("it can be written");
        for dir in ["rootfs/bin", "rootfs/dev", "rootfs/proc", "rootfs/sys"].iter().chain(BUNDLES) {
            fs::create_dir_all(path(dir)).expect("a directory can be made");
        }
        fs::copy("/bin/busybox", path("rootfs/bin/sleep")).expect("busybox-static is installed");
        let spec = |dir: &str| {
            timed(Command::new("runc").arg("spec").current_dir(path(dir)));
            let file = path(dir).join("config.json");
            let text = fs::read_to_string(&file).expect("runc wrote it");
            let mut value: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
            value["root"]["path"] = path("rootfs").to_str().expect("a plain path").into();
            value["process"]["terminal"] = false.into();
            value["process"]["args"] = serde_json::json!(["sleep", "1000"]);
            if dir.ends_with("-docker") {
                let profile = include_str!("../tests/fixtures/seccomp/docker.json");
                value["linux"]["seccomp"] = serde_json::from_str(profile).expect("it is JSON");
            }
            if dir.starts_with("quota") || dir.starts_with("gate") {
                let env = value["process"]["env"].as_array_mut().expect("it has variables");
                env.push("ALIYUN_COM_GPU_MEM_CONTAINER=1".into());
                env.push("ALIYUN_COM_GPU_MEM_DEV=15".into());
            }
            fs::write(file, value.to_string()).expect("a file can be written");
        };
        BUNDLES.iter().copied().for_each(spec);
    }

    fn ours(&self, backend: &str) -> Command {
        let mut command = Command::new(&self.runtime);
        command.arg("--cgpu-config").arg(self.work.join(format!("{backend}.toml")));
        command
    }

    fn pass_through(&self) {
        let (bare, ours) = in_turn(
            PASS_RUNS,
            |_| timed(Command::new("runc").arg("--version")),
            |_| timed(self.ours("none").arg("--version")),
        );
        row("pass-through (--version)", bare, ours, "≤ 1 ms more");
    }

    /// Creates from `bundle` with `backend`, in turn with bare creates of `peer`.
    fn create(&self, what: &str, peer: &str, bundle: &str, backend: &str, budget: &str) {
        // The engine writes a new config.json for each container.
        let config = self.work.join(bundle).join("config.json");
        let text = fs::read(&config).expect("it was prepared");
        let (bare, with) = in_turn(
            CREATE_RUNS,
            |turn| self.create_one(Command::new("runc"), peer, turn),
            |turn| {
                fs::write(&config, &text).expect("a file can be written");
                self.create_one(self.ours(backend), bundle, turn)
            },
        );
        row(what, bare, with, budget);
    }

    fn create_one(&self, mut command: Command, bundle: &str, turn: usize) -> Duration {
        let root = self.work.join("runc");
        let id = format!("{bundle}-{turn}");
        let bundle = self.work.join(bundle);
        let root: [&std::ffi::OsStr; 2] = ["--root".as_ref(), root.as_ref()];
        std::thread::sleep(REST);
        let time = timed(
            command
                .args(root)
                .args(["create".as_ref(), "--bundle".as_ref(), bundle.as_os_str()])
                .arg(&id),
        );
        timed(Command::new("runc").args(root).args(["delete", "--force", &id]));
        time
    }

    /// Creates where computing time is shared, in turn with creates where it isn't, both with the gate.
    fn create_with_shares(&self) {
        let config = self.work.join("gate/config.json");
        let text = fs::read(&config).expect("it was prepared");
        let create = |config_name: &str, turn| {
            fs::write(&config, &text).expect("a file can be written");
            self.create_one(self.ours(config_name), "gate", turn)
        };
        header("policy 5", "policy 1");
        let (without, with) =
            in_turn(CREATE_RUNS, |turn| create("gate-5", turn), |turn| create("gate", turn));
        row("create with the gate", without, with, "≤ 0.2 ms more");
    }

    /// Starts a simulated driver.
    fn driver(&self, programs: &Path) -> Program {
        let options = SimOptions {
            dir: self.work.join("sim"),
            gpus: vec!["16130MiB".parse().expect("a size")],
            driver: "535.161.08".parse().expect("a version"),
        };
        Program::start(&programs.join("cgpu-sim"), &options).expect("it serves")
    }

    /// Writes what containers that call the driver are made of.
    fn prepare_calls(&self, programs: &Path) {
        let dir = self.work.join("sim");
        fs::create_dir(&dir).expect("a directory can be made");
        for (name, policy) in [("sim", 1), ("sim-5", 5)] {
            let config = format!(
                "state_dir = {:?}\nlog = \"\"\n[inventory]\nsource = \"file\"\npath = {:?}\n\
                 [isolation]\nbackend = \"gate\"\n[compute]\npolicy = {policy}\n\
                 [driver]\nroot = {dir:?}\nproc_root = {:?}\n",
                self.work.join("state"),
                dir.join("inventory.json"),
                dir.join("proc"),
            );
            let file = self.work.join(format!("{name}.toml"));
            fs::write(file, config).expect("a file can be written");
        }
        let bundles = ["calls-bare", "calls-gate", "pass-bare", "pass-gate", "pass-bare-docker"];
        for bundle in bundles.into_iter().chain(["pass-gate-docker", "idle-gate"]) {
            let plain = if bundle.ends_with("-docker") { "bare-docker" } else { "bare" };
            let from = fs::read(self.work.join(plain).join("config.json"));
            let from = from.expect("it was prepared");
            let mut value: serde_json::Value = serde_json::from_slice(&from).expect("it is JSON");
            value["process"]["args"] = match bundle.split('-').next() {
                Some("calls") => serde_json::json!(["/rmtool", "bench", CALLS.to_string()]),
                Some("idle") => serde_json::json!(["sleep", "1000"]),
                _ => serde_json::json!(["/rmtool", "untrapped"]),
            };
            let mounts = value["mounts"].as_array_mut().expect("it has mounts");
            let bind = |from: &Path, to: &str| {
                serde_json::json!({"source": from, "destination": to, "type": "bind",
                                   "options": ["bind"]})
            };
            mounts.push(bind(&programs.join("rmtool"), "/rmtool"));
            if bundle.contains("-bare") {
                for node in ["nvidiactl", "nvidia0", "nvidia-uvm"] {
                    mounts.push(bind(&dir.join("dev").join(node), &format!("/dev/{node}")));
                }
            } else {
                let env = value["process"]["env"].as_array_mut().expect("it has variables");
                env.push("ALIYUN_COM_GPU_MEM_CONTAINER=4".into());
            }
            let bundle = self.work.join(bundle);
            fs::create_dir(&bundle).expect("a directory can be made");
            fs::write(bundle.join("config.json"), value.to_string()).expect("it can be written");
        }
    }

    /// What the application says that runs so often, in turn without the gate and with it.
    fn in_containers(&self, bare: &str, gate: &str) -> (Vec<Report>, Vec<Report>) {
        let turn = |_| (self.said(Command::new("runc"), bare), self.said(self.ours("sim"), gate));
        (0..CALL_RUNS).map(turn).unzip()
    }

    /// What the application of a bundle says, in a container by that runtime.
    fn said(&self, mut runtime: Command, bundle: &str) -> Report {
        let root = self.work.join("runc");
        // The engine writes a new config.json for each container.
        let config = self.work.join(bundle).join("config.json");
        let text = fs::read(&config).expect("it was prepared");
        let output = runtime
            .args(["--root".as_ref(), root.as_os_str(), "run".as_ref(), "--bundle".as_ref()])
            .args([self.work.join(bundle).as_os_str(), bundle.as_ref()])
            .stdin(Stdio::null())
            .output()
            .expect("the runtime can be started");
        fs::write(config, text).expect("a file can be written");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
    }

    /// Calls of a program that is alone in its container, in turn with those of one next to idle execs.
    fn calls_beside_execs(&self, programs: &Path) {
        let _driver = self.driver(programs);
        for (execs, title) in [
            (0, "calls of an exec, the first process idle"),
            (QUEUED, "the same beside so many execs that they are polled"),
        ] {
            let turn = |_| (self.said(self.ours("sim"), "calls-gate"), self.said_beside(execs));
            let (alone, beside): (Vec<_>, Vec<_>) = (0..CALL_RUNS).map(turn).unzip();
            println!();
            println!(
                "{title:<44} {:>9} {:>9} {:>9} {:>7}  budget",
                "alone", "beside", "more", "ratio"
            );
            for (what, name) in [
                ("refused (a driver's number on a pipe)", "foreign_ns"),
                ("executed (FB_GET_INFO_V2)", "control_ns"),
                ("2,000 calls of a start-up", "startup_ns"),
            ] {
                let [alone, beside] = [&alone, &beside].map(|runs| median(times(runs, name)));
                call_row(what, alone, beside, if execs == 0 { "no more" } else { "" });
            }
        }
    }

    /// What the application says that is started in a container by `exec`, after so many others that do nothing.
    fn said_beside(&self, execs: usize) -> Report {
        let root = self.work.join("runc");
        let bundle = self.work.join("idle-gate");
        let config = bundle.join("config.json");
        let text = fs::read(&config).expect("it was prepared");
        let ours = |words: &[&str]| {
            let mut command = self.ours("sim");
            command.arg("--root").arg(&root).args(words);
            command
        };
        timed(ours(&["run", "--detach", "--bundle"]).arg(&bundle).arg("idle"));
        for _ in 0..execs {
            timed(&mut ours(&["exec", "--detach", "idle", "sleep", "1000"]));
        }
        let output = ours(&["exec", "idle", "/rmtool", "bench", &CALLS.to_string()])
            .stdin(Stdio::null())
            .output()
            .expect("the runtime can be started");
        timed(&mut ours(&["delete", "--force", "idle"]));
        fs::write(config, text).expect("a file can be written");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
    }

    /// Calls of a program where computing time is shared, in turn with where it isn't, both with the gate.
    fn calls_with_shares(&self, programs: &Path) {
        let _driver = self.driver(programs);
        let turn = |_| {
            let said = |config| self.said(self.ours(config), "calls-gate");
            (said("sim-5"), said("sim"))
        };
        let (without, with): (Vec<_>, Vec<_>) = (0..CALL_RUNS).map(turn).unzip();
        println!();
        println!(
            "{:<44} {:>9} {:>9} {:>9} {:>7}  budget",
            "calls, with the gate", "policy 5", "policy 1", "more", "ratio"
        );
        for (what, name, budget) in [
            ("2,000 calls of a start-up", "startup_ns", ""),
            ("a CUDA context's groups and channels", "context_ns", "≤ 3 ms more"),
            ("a launch", "launch_ns", "no more"),
        ] {
            let [without, with] = [&without, &with].map(|runs| median(times(runs, name)));
            call_row(what, without, with, budget);
        }
    }

    /// System calls that are none of the driver's.
    fn untrapped(&self, programs: &Path) {
        let _driver = self.driver(programs);
        let plain = self.in_containers("pass-bare", "pass-gate");
        let docker = self.in_containers("pass-bare-docker", "pass-gate-docker");
        call_header("untrapped");
        for (with, (bare, gate)) in [("", &plain), (", docker's profile", &docker)] {
            for (call, name) in [("ioctl", "ioctl_ns"), ("mmap", "mmap_ns")] {
                let quickest = |runs: &[Report]| {
                    runs.iter().filter_map(|run| run[name].as_f64()).fold(f64::MAX, f64::min)
                };
                let (bare, gate) = (quickest(bare), quickest(gate));
                println!(
                    "{:<44} {bare:>6.0} ns {gate:>6.0} ns {:>6.0} ns {:>6.2}×  ≤ 50 ns more",
                    format!("untrapped {call}{with}"),
                    gate - bare,
                    gate / bare,
                );
            }
        }
    }

    /// Calls of the driver, and the least that any listener costs.
    fn calls(&self, programs: &Path, title: &str) {
        call_header(title);
        for (what, check, waiting) in [
            ("any listener: received and refused", Check::Nothing, 1),
            ("the same, the struct read", Check::Struct, 1),
            ("the same, four threads wait for the call", Check::Struct, 4),
        ] {
            let (bare, with) = least(&self.work, check, waiting);
            call_row(what, bare, with, "");
        }
        let driver = self.driver(programs);
        let (bare, gate) = self.in_containers("calls-bare", "calls-gate");
        drop(driver);
        let rows = [
            ("untrapped driver call (SYS_PARAMS)", "empty_ns", "≤ 50 ns more"),
            ("refused (a driver's number on a pipe)", "foreign_ns", "≤ 5 µs more"),
            ("executed (GPU_GET_GID_INFO)", "reported_ns", "≤ 15 µs more"),
            ("executed (FB_GET_INFO_V2)", "control_ns", "≤ 15 µs more"),
            ("two executed (allocate and free)", "alloc_free_ns", "≤ 30 µs more"),
            ("2,000 calls of a start-up", "startup_ns", "≤ 15 ms more"),
            ("a CUDA context's groups and channels", "context_ns", ""),
            ("a launch", "launch_ns", "no more"),
        ];
        for (what, name, budget) in rows {
            call_row(what, median(times(&bare, name)), median(times(&gate, name)), budget);
        }
    }

    /// The lock, the check for stale records, the decision and the record.
    fn admission(&self) {
        let mut config =
            Config { state_dir: self.work.join("crowd"), log: String::new(), ..Config::default() };
        config.isolation.backend = Backend::None;
        let host = Host::new(config, None);
        let own = ProcessId::own().expect("/proc is mounted");
        let reserve = |n: usize| {
            let gpu = PlannedGpu {
                index: 0,
                uuid: format!("GPU-{:032}", n % (REGISTERED / 20)),
                minor: 0,
                memory_total_bytes: 16 << 30,
                memory_reserved_bytes: 0,
                memory_limit_bytes: Some(256 << 20),
                mig: None,
            };
            let rest = Plan {
                backend: Kind::None,
                gpus: Vec::new(),
                weight: 1,
                high_priority: false,
                caveats: cgpu_core::plan::Caveats::default(),
            };
            let places = vec![vec![Candidate { gpu, quota_by: None, is_cut: false }]];
            let weight = WeightAsked { number: Some(1), share: None };
            let proposal = Proposal::new(rest, places, weight, Vec::new());
            let key = Key { root: "/run/runc".into(), id: format!("{n:064x}") };
            let start = Instant::now();
            let holder = Holder::Reserved { by: own };
            let record =
                Admission::of(&host).reserve(key.clone(), Path::new("/"), &proposal, holder);
            Admission::of(&host).report_creation(&record.expect("it fits"), None, None);
            (start.elapsed(), key)
        };
        // One short on each GPU's twentieth, so that one more container fits.
        (0..REGISTERED - 1).for_each(|n| {
            reserve(n);
        });
        let mut times = Vec::new();
        for _ in 0..ADMIT_RUNS {
            let (time, key) = reserve(REGISTERED - 1);
            times.push(time);
            Admission::of(&host).release(&key).expect("it was reserved");
        }
        let what = format!("admission beside {} containers", REGISTERED - 1);
        println!("{what:<44} {:>9} {:>9} {:>9} {:>7}  ≤ 1 ms", "", ms(median(times)), "", "");
    }
}
