//! What looking costs on a crowded host: 8 GPUs, 200 running containers under the gate.
//!
//! Figures are medians of runs in turn with their peer's, as in `cost`. Root, runc,
//! busybox-static and procps.

mod measure;
mod pinned;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use cgpu_sim::{Program, SimOptions};
use measure::{header, in_turn, median, row, timed};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use pinned::pin;

/// How long a container is polled often that has just begun or called, and how long all are left alone then.
const MOVED_IN: Duration = Duration::from_secs(70);
const REST: Duration = Duration::from_secs(60);

const GPUS: usize = 8;
const EACH: usize = 25;
/// Pairs of runs of a program that polls.
const CHECKS: usize = 40;
/// Pairs of runs of an application, and its calls in each.
const CALL_RUNS: usize = 9;
const CALLS: &str = "20000";
/// The processors of the calling container, and of the reader that polls meanwhile.
const CALLER: usize = 0;
const LOOKER: usize = 1;
/// The pause between two polls.
const POLL_PAUSE: Duration = Duration::from_millis(100);

struct Crowd {
    programs: PathBuf,
    work: PathBuf,
}

fn main() {
    let programs = match std::env::var_os("CGPU_BIN_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_BIN_EXE_cgpu-runtime")).with_file_name(""),
    };
    let work = tempfile::tempdir_in("/dev/shm").expect("a directory can be made");
    let crowd = Crowd { programs, work: work.path().to_owned() };
    let driver = crowd.prepare();
    crowd.create(&["run", "sleep 100000"]);
    at_rest("never called the driver", "0.5 %");
    crowd.update();
    crowd.delete();
    crowd.create_beside_busy(&["run", "sleep 100000"]);
    crowd.beside_busy();
    crowd.delete();
    crowd.create(&["hold", "100MiB"]);
    at_rest("hold memory", "none yet");
    header("peer", "measured");
    crowd.checks();
    crowd.calls(driver.pid());
    crowd.delete();
}

fn id(number: usize) -> String {
    format!("{number:064x}")
}

/// How often containers that work allocate and free, and how long they wait in between, in seconds.
const ROUNDS: usize = 2000;
const HOLD_S: &str = "0.05";

/// What all monitors take while their containers are idle and no reader polls them.
fn at_rest(who: &str, budget: &str) {
    thread::sleep(MOVED_IN);
    let (start, before) = (Instant::now(), monitors_time());
    thread::sleep(REST);
    let took = monitors_time().saturating_sub(before).as_secs_f64();
    let percent = took / start.elapsed().as_secs_f64() * 100.0;
    let all = GPUS * EACH;
    println!(
        "{all} containers at rest that {who}: {percent:.1} % of a processor (budget {budget})"
    );
    let Held { threads, descriptors, memory_kib } = held();
    println!(
        "their monitors have {threads} threads (budget 600), {descriptors} descriptors (2,000), {} MiB of memory, \
         a part of what they share (45)",
        memory_kib / 1024
    );
}

/// The number of a process, by its directory.
fn number(process: &Path) -> u32 {
    let name = process.file_name().and_then(|name| name.to_str());
    name.and_then(|name| name.parse().ok()).expect("a process is a number")
}

/// Fields of a process's `stat` behind its name, by proc(5)'s numbers.
fn stat(process: &Path, field: usize) -> u64 {
    let text = fs::read_to_string(process.join("stat")).unwrap_or_default();
    let behind = text.rsplit(')').next().unwrap_or_default();
    behind.split_whitespace().nth(field - 3).and_then(|text| text.parse().ok()).unwrap_or(u64::MAX)
}

fn started(process: &Path) -> u64 {
    stat(process, 22)
}

/// The monitors' processes.
fn monitors() -> impl Iterator<Item = PathBuf> {
    let processes = entries("/proc".into()).map(|entry| entry.path());
    processes.filter(|process| {
        fs::read_to_string(process.join("comm")).is_ok_and(|name| name.trim() == "cgpu-monitor")
    })
}

fn entries(dir: PathBuf) -> impl Iterator<Item = fs::DirEntry> {
    fs::read_dir(dir).into_iter().flatten().flatten()
}

/// What all monitors have.
#[derive(Default)]
struct Held {
    threads: usize,
    descriptors: usize,
    /// Memory, shared pages by how many share them (`Pss` of `/proc/PID/smaps_rollup`).
    memory_kib: u64,
}

fn held() -> Held {
    monitors().fold(Held::default(), |held, process| {
        let memory = fs::read_to_string(process.join("smaps_rollup")).unwrap_or_default();
        let pss = memory.lines().find_map(|line| line.strip_prefix("Pss:"));
        let pss = pss.and_then(|pss| pss.split_whitespace().next()?.parse::<u64>().ok());
        Held {
            threads: held.threads + entries(process.join("task")).count(),
            descriptors: held.descriptors + entries(process.join("fd")).count(),
            memory_kib: held.memory_kib + pss.unwrap_or(0),
        }
    })
}

/// How many threads of a monitor answer calls: none where its container never called.
fn calls_threads(monitor: &Path) -> usize {
    let threads = entries(monitor.join("task")).map(|thread| thread.path().join("comm"));
    threads.filter(|name| fs::read_to_string(name).is_ok_and(|name| name.trim() == "calls")).count()
}

/// Time on a processor that all threads of all monitors had (`/proc/PID/task/TID/schedstat`, in nanoseconds).
fn monitors_time() -> Duration {
    time_of(monitors())
}

/// The same of some.
fn time_of(monitors: impl Iterator<Item = PathBuf>) -> Duration {
    let threads = monitors.flat_map(|process| entries(process.join("task")));
    let time = threads.filter_map(|thread| {
        let text = fs::read_to_string(thread.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(time.sum())
}

/// Reads the files of that name of all containers in the tree; how many there are.
fn all_of(tree: &Path, name: &str) -> usize {
    let entries = |dir: &Path| {
        fs::read_dir(dir).expect("it is there").map(|entry| entry.expect("it is listed").path())
    };
    let gpus = entries(tree).filter(|path| path.is_dir());
    let containers = gpus.flat_map(|gpu| entries(&gpu).collect::<Vec<_>>());
    containers.filter(|path| fs::read(path.join(name)).is_ok()).count()
}

impl Crowd {
    fn runtime(&self) -> Command {
        let mut command = Command::new(self.programs.join("cgpu-runtime"));
        command.arg("--cgpu-config").arg(self.work.join("config.toml"));
        command.arg("--root").arg(self.work.join("runc"));
        command
    }

    fn check(&self, program: &str, words: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command.arg("--config").arg(self.work.join("config.toml")).args(words);
        command
    }

    /// Starts the driver, and writes the configuration.
    fn prepare(&self) -> Program {
        let dir = self.work.join("sim");
        fs::create_dir(&dir).expect("a directory can be made");
        let config = format!(
            "state_dir = {:?}\nlog = \"\"\n[inventory]\nsource = \"file\"\npath = {:?}\n\
             [isolation]\nbackend = \"gate\"\n[admission]\nmax_inst = 25\n[driver]\n\
             root = {dir:?}\nproc_root = {:?}\n",
            self.work.join("state"),
            dir.join("inventory.json"),
            dir.join("proc"),
        );
        fs::write(self.work.join("config.toml"), config).expect("a file can be written");
        for dir in ["bin", "dev", "proc", "sys"] {
            fs::create_dir_all(self.work.join("rootfs").join(dir)).expect("it can be made");
        }
        let rmtool = self.work.join("rootfs/rmtool");
        fs::copy(self.programs.join("rmtool"), rmtool).expect("it was built");
        timed(Command::new("runc").arg("spec").current_dir(&self.work));
        let options = SimOptions {
            dir,
            gpus: (0..GPUS).map(|_| "40000MiB".parse().expect("a size")).collect(),
            driver: "535.161.08".parse().expect("a version"),
        };
        Program::start(&self.programs.join("cgpu-sim"), &options).expect("it serves")
    }

    /// Containers on all GPUs, in which rmtool does that.
    fn create(&self, does: &[&str]) {
        for number in 0..GPUS * EACH {
            self.create_one(number, does);
        }
    }

    /// The same, but for the first ones: these allocate and free all the time.
    fn create_beside_busy(&self, does: &[&str]) {
        let pause = format!("sleep {HOLD_S}");
        let round = ["alloc 50MiB as m", &pause, "free m", &pause];
        let works: Vec<&str> = ["run", "start"].into_iter().chain(round.repeat(ROUNDS)).collect();
        for number in 0..GPUS * EACH {
            // Those that work are spread over the GPUs.
            let is_busy = number % EACH == 0 || number % EACH == 1 && number < 2 * EACH;
            self.create_one(number, if is_busy { &works } else { does });
        }
    }

    /// What the monitors of idle containers take while ten others work on the same GPUs.
    fn beside_busy(&self) {
        thread::sleep(MOVED_IN);
        let works = |monitor: &PathBuf| calls_threads(monitor) > 0;
        let of_busy: Vec<PathBuf> = monitors().filter(works).collect();
        let resting = || monitors().filter(|monitor| !of_busy.contains(monitor));
        let (start, before) =
            (Instant::now(), [time_of(of_busy.iter().cloned()), time_of(resting())]);
        thread::sleep(REST);
        let after = [time_of(of_busy.iter().cloned()), time_of(resting())];
        let percent = |at: usize| {
            after[at].saturating_sub(before[at]).as_secs_f64() / start.elapsed().as_secs_f64()
                * 100.0
        };
        println!(
            "{} containers that never called the driver, beside {} that work: {:.1} % of a processor, and these {:.1} %",
            GPUS * EACH - of_busy.len(),
            of_busy.len(),
            percent(1),
            percent(0)
        );
    }

    /// How long it takes to update all monitors, one after the other.
    fn update(&self) {
        let took = timed(&mut self.check("cgpu", &["upgrade-monitors"]));
        println!("cgpu upgrade-monitors, {} containers: {took:.1?} (≤ 5 s)", GPUS * EACH);
    }

    fn delete(&self) {
        for number in 0..GPUS * EACH {
            timed(self.runtime().args(["delete", "--force", &id(number)]));
        }
    }

    fn create_one(&self, number: usize, does: &[&str]) {
        let text = fs::read(self.work.join("config.json")).expect("runc wrote it");
        let mut value: serde_json::Value = serde_json::from_slice(&text).expect("it is JSON");
        let gpu = number / EACH;
        value["root"]["path"] = self.work.join("rootfs").to_str().expect("a plain path").into();
        value["process"]["terminal"] = false.into();
        let gpu_number = gpu.to_string();
        value["process"]["args"] = [&["/rmtool", "--gpu", &gpu_number], does].concat().into();
        let env = value["process"]["env"].as_array_mut().expect("it has variables");
        env.push("ALIYUN_COM_GPU_MEM_CONTAINER=1000".into());
        env.push("ALIYUN_COM_GPU_MEM_UNIT=MiB".into());
        env.push(format!("NVIDIA_VISIBLE_DEVICES={gpu}").into());
        value["annotations"] = serde_json::json!({
            "io.kubernetes.cri.sandbox-namespace": "default",
            "io.kubernetes.cri.sandbox-name": format!("pod-{number}"),
            "io.kubernetes.cri.container-name": "main",
        });
        let bundle = self.work.join(format!("bundle-{number}"));
        fs::create_dir_all(&bundle).expect("a directory can be made");
        fs::write(bundle.join("config.json"), value.to_string()).expect("it can be written");
        let mut command = self.runtime();
        command.arg("run").arg("--detach").arg("--bundle").arg(&bundle).arg(id(number));
        timed(command.stderr(Stdio::null()));
    }

    fn checks(&self) {
        let version = || timed(self.check("cgpu", &["--version"]).stdin(Stdio::null()));
        let ps = || timed(&mut self.check("cgpu", &["ps"]));
        let smi =
            |words: &[&str]| timed(&mut self.check("cgpu-smi", &[&["--no-nvml"], words].concat()));
        let all = format!("{} containers", GPUS * EACH);
        let (peer, measured) = in_turn(CHECKS, |_| version(), |_| ps());
        row(&format!("cgpu ps, {all} (cgpu --version)"), peer, measured, "≤ 20 ms");
        let (peer, measured) = in_turn(CHECKS, |_| ps(), |_| smi(&[]));
        row(&format!("cgpu-smi, {all} (cgpu ps)"), peer, measured, "≤ 20 ms, ≤ 2×");
        let (peer, measured) = in_turn(CHECKS, |_| ps(), |_| smi(&["--format=json"]));
        row(&format!("cgpu-smi --format=json, {all} (cgpu ps)"), peer, measured, "≤ 20 ms, ≤ 2×");
        let once = || timed(&mut self.check("cgpu-metrics", &["--no-nvml", "--once"]));
        let (peer, measured) = in_turn(CHECKS, |_| ps(), |_| once());
        row(&format!("cgpu-metrics --once, {all} (cgpu ps)"), peer, measured, "≤ 30 ms");
        let dir = self.work.join("km");
        let dir = dir.to_str().expect("a plain path");
        timed(&mut self.check("cgpu-tree", &["--detach", dir]));
        // `id` is known without a question to a monitor: what it costs are FUSE's own steps.
        let read = |name: &str| {
            let start = Instant::now();
            let read = all_of(Path::new(dir), name);
            assert_eq!(read, GPUS * EACH, "files");
            start.elapsed()
        };
        let (peer, measured) = in_turn(CHECKS, |_| read("id"), |_| read("meminfo"));
        row(&format!("meminfo of {all} in the tree (id of them)"), peer, measured, "≤ 50 ms");
        timed(&mut self.check("cgpu-tree", &["--unmount", dir]));
    }

    /// Calls of one container, in turn while a reader polls ten times a second and while a program runs ps as
    /// long, on a processor of its own: else calls would wait for it, as for any program.
    fn calls(&self, driver: u32) {
        let ours = std::process::id();
        if thread::available_parallelism().map_or(1, usize::from) < 2 {
            println!("skipped: who looks needs a processor beside that of who calls");
            return;
        }
        pin(driver, &[CALLER]);
        // That of the first container serves the calls; the others are on the other processor.
        let first =
            monitors().min_by_key(|monitor| started(monitor)).map(|monitor| number(&monitor));
        for monitor in monitors() {
            let is_firsts = Some(number(&monitor)) == first;
            pin(number(&monitor), &[if is_firsts { CALLER } else { LOOKER }]);
        }
        pin(ours, &[CALLER]);
        let mut looker = CpuSet::new();
        looker.set(LOOKER).expect("it is a processor's number");
        let run = |key: &str| {
            let mut command = self.runtime();
            command.args(["exec", &id(0), "/rmtool", "bench", CALLS, "executed"]);
            let output = command.stdin(Stdio::null()).output().expect("it can be started");
            let said: serde_json::Value =
                serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
            Duration::from_nanos(said[key].as_u64().expect("a time"))
        };
        let check = || timed(&mut self.check("cgpu-smi", &["--no-nvml"]));
        // Any program that asks the kernel as much costs the caller something, also on another processor:
        // both may be halves of one.
        let takes = median((0..CHECKS).map(|_| check()).collect());
        let list_processes = || {
            let start = Instant::now();
            while start.elapsed() < takes {
                timed(Command::new("ps").arg("-ef"));
            }
            start.elapsed()
        };
        for (key, what) in [("p99_ns", "99th percentile"), ("p50_ns", "median")] {
            let beside = |somebody: &(dyn Fn() -> Duration + Sync)| {
                let done = AtomicBool::new(false);
                thread::scope(|scope| {
                    scope.spawn(|| {
                        sched_setaffinity(Pid::from_raw(0), &looker).expect("there is one");
                        while !done.load(Ordering::Relaxed) {
                            thread::sleep(POLL_PAUSE.saturating_sub(somebody()));
                        }
                    });
                    let time = run(key);
                    done.store(true, Ordering::Relaxed);
                    time
                })
            };
            let (peer, checked) =
                in_turn(CALL_RUNS, |_| beside(&list_processes), |_| beside(&check));
            let (peer, checked) = (median(peer), median(checked));
            let us = |time: Duration| format!("{:.2} µs", time.as_secs_f64() * 1e6);
            let ratio = checked.as_secs_f64() / peer.as_secs_f64();
            let what = format!("a call's {what} beside who looks (runs ps)");
            let more = us(checked.saturating_sub(peer));
            println!(
                "{what:<44} {:>9} {:>9} {more:>9} {ratio:>6.2}×  ≤ 1.05×",
                us(peer),
                us(checked)
            );
        }
    }
}
