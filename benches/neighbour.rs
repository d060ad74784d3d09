//! What a container's calls cost while another one attacks: `make bench`.
//!
//! The promise: no more than a tenth at the 99th percentile. The attackers, their monitors
//! and the driver that they call are on one processor, the neighbour and its monitor on
//! another: whoever shares a processor with somebody shares its time. Turns of nobody and
//! of each attack follow each other in each round, and a figure is the median of a round's
//! ratios to the same round's first turn of nobody. The second turn of nobody is what the
//! machine's mood makes of one. `no gate` is the same ratio where the same attack is a bare
//! container's: the machine's part, its caches, clocks and interrupts, and the driver's.
//! `by gate` is the ratio of the two attacks in the same round: what is left is the gate's.
//!
//! Root, runc, busybox-static and two processors.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use cgpu_sim::{Program, SimOptions};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::{Value, json};

const ROUNDS: usize = 7;

/// How often to try to pause an attacker: who is in the driver's hands can't be frozen.
const PAUSES: usize = 100;

/// How long an attack goes on before anything is measured.
const WARM: Duration = Duration::from_millis(60);

/// So that who else uses the machine matters less: the most that containers can have, and
/// the most that those beside them can.
const SHARES: u64 = 262_144;
const PRIORITY: i32 = -20;

/// The processors.
const THEIRS: usize = 0;
const OURS: usize = 1;

/// Attacks, with what is run again and again. The first is none: it keeps its processor busy,
/// and whoever else would run there is pushed to ours.
const ATTACKS: &[(&str, &str)] = &[
    ("a busy loop", ":"),
    ("clients", "/rmtool attack clients 5000"),
    ("signal-storm", "/rmtool attack signal-storm 5000"),
    ("barrier16", "/rmtool attack barrier16"),
    ("refused calls", "/rmtool bench 200000 refused"),
];

/// The neighbour's calls: of which container, how many, of which kind.
const CALLS: &[(&str, &str, &str, &str)] = &[
    ("refused", "alone", "20000", "refused"),
    ("executed, by a driver of its own", "alone", "4000", "executed"),
    ("executed, by the simulator that all share", "shared", "4000", "executed"),
];

/// Median and 99th percentile of a turn.
#[derive(Clone, Copy)]
struct Turn {
    p50_ns: f64,
    p99_ns: f64,
}

fn main() {
    let programs = match std::env::var_os("CGPU_BIN_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_BIN_EXE_cgpu-runtime")).with_file_name(""),
    };
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        println!("skipped: a neighbour needs a processor of its own");
        return;
    }
    // Children have it, too. Where a host forbids it, others matter.
    let _ = rustix::process::setpriority_process(None, PRIORITY);
    // A tmpfs, as /run is on a host.
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory can be made");
    let work = dir.path().to_owned();
    let mut bench = Bench { programs, work, containers: Vec::new(), drivers: Vec::new() };
    bench.rootfs();
    let shared = bench.driver("shared", THEIRS);
    bench.driver("alone", OURS);
    bench.create("alone", Some("alone"), OURS, "sleep 1000000");
    bench.create("shared", Some("shared"), OURS, "sleep 1000000");
    for (attack, words) in ATTACKS {
        let forever = format!("while :; do {words}; done >/dev/null 2>&1");
        for gate in [true, false] {
            let name = attacker(attack, gate);
            bench.create(&name, gate.then_some("shared"), THEIRS, &forever);
            bench.pause(&name);
        }
    }
    println!(
        "\n{:<42} {:<14} {:>9} {:>7} {:>9} {:>7} {:>13} {:>8}",
        "a neighbour's calls",
        "attacked by",
        "p50",
        "ratio",
        "p99",
        "ratio",
        "of rounds",
        "no gate"
    );
    for (what, container, count, kind) in CALLS {
        // What is shared is served where there is room.
        let cpus: &[usize] = if *container == "shared" { &[THEIRS, OURS] } else { &[THEIRS] };
        pin(shared, cpus);
        bench.compare(what, container, &[count, kind]);
    }
}

fn attacker(attack: &str, gate: bool) -> String {
    format!("{}-{}", attack.replace(' ', "-"), if gate { "gate" } else { "bare" })
}

/// The middle one.
fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// Puts all threads of a process, and what they start, on these processors.
fn pin(pid: u32, cpus: &[usize]) {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu).expect("it is a processor's number"));
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it lives");
    for thread in threads.flatten() {
        let number = thread.file_name().to_str().and_then(|name| name.parse().ok());
        let thread = Pid::from_raw(number.expect("a thread is a number"));
        sched_setaffinity(thread, &set).expect("the machine has these processors");
    }
}

/// Does something whose children stay on that processor.
fn on<T>(cpu: usize, act: impl FnOnce() -> T) -> T {
    let own = std::process::id();
    pin(own, &[cpu]);
    let done = act();
    pin(own, &[THEIRS, OURS]);
    done
}

fn ran(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().expect("the program can be started");
    assert!(output.status.success(), "{command:?}: {output:?}");
    output
}

struct Bench {
    programs: PathBuf,
    work: PathBuf,
    containers: Vec<String>,
    /// They end after the containers.
    drivers: Vec<Program>,
}

impl Bench {
    fn path(&self, name: &str) -> PathBuf {
        self.work.join(name)
    }

    fn rootfs(&self) {
        for dir in ["bin", "dev", "proc", "sys"] {
            let dir = self.path("rootfs").join(dir);
            fs::create_dir_all(dir).expect("a directory can be made");
        }
        for program in ["sh", "sleep"] {
            let to = self.path("rootfs/bin").join(program);
            fs::copy("/bin/busybox", to).expect("busybox-static is installed");
        }
    }

    /// A simulated driver, and the configuration that containers on it are made with; its
    /// pid.
    fn driver(&mut self, name: &str, cpu: usize) -> u32 {
        let dir = self.path(&format!("driver-{name}"));
        fs::create_dir(&dir).expect("a directory can be made");
        let config = format!(
            "state_dir = {:?}\nlog = \"\"\n[inventory]\nsource = \"file\"\npath = {:?}\n\
             [isolation]\nbackend = \"gate\"\n[driver]\nroot = {dir:?}\nproc_root = {:?}\n",
            self.path(&format!("state-{name}")),
            dir.join("inventory.json"),
            dir.join("proc"),
        );
        fs::write(self.path(&format!("{name}.toml")), config).expect("a file can be written");
        let options = SimOptions {
            dir,
            gpus: vec!["16130MiB".parse().expect("a size")],
            driver: "535.161.08".parse().expect("a version"),
        };
        let program = self.programs.join("cgpu-sim");
        let driver = on(cpu, || Program::start(&program, &options)).expect("it serves");
        let pid = driver.pid();
        self.drivers.push(driver);
        pid
    }

    fn runc(&self, words: &[&str]) -> Output {
        ran(Command::new("runc").arg("--root").arg(self.path("runc")).args(words))
    }

    fn ours(&self, driver: &str) -> Command {
        let mut command = Command::new(self.programs.join("cgpu-runtime"));
        command.arg("--cgpu-config").arg(self.path(&format!("{driver}.toml")));
        command
    }

    /// Starts a container on that processor, its monitor too: by the gate on the driver of
    /// `gate`, or bare on the one that is shared.
    fn create(&mut self, name: &str, gate: Option<&str>, cpu: usize, words: &str) {
        let bundle = self.path(name);
        fs::create_dir(&bundle).expect("a directory can be made");
        ran(Command::new("runc").arg("spec").current_dir(&bundle));
        let file = bundle.join("config.json");
        let text = fs::read(&file).expect("runc wrote it");
        let mut config: Value = serde_json::from_slice(&text).expect("it is JSON");
        config["root"]["path"] = self.path("rootfs").to_str().expect("a plain path").into();
        config["process"]["terminal"] = false.into();
        config["process"]["args"] = json!(["sh", "-c", words]);
        config["linux"]["resources"]["cpu"] = json!({"cpus": cpu.to_string(), "shares": SHARES});
        let mounts = config["mounts"].as_array_mut().expect("it has mounts");
        let bind = |from: PathBuf, to: &str| json!({"source": from, "destination": to, "type": "bind", "options": ["bind"]});
        mounts.push(bind(self.programs.join("rmtool"), "/rmtool"));
        let mut command = match gate {
            None => {
                for node in ["nvidiactl", "nvidia0", "nvidia-uvm"] {
                    let from = self.path("driver-shared/dev").join(node);
                    mounts.push(bind(from, &format!("/dev/{node}")));
                }
                Command::new("runc")
            }
            Some(driver) => {
                let env = config["process"]["env"].as_array_mut().expect("it has variables");
                env.push("ALIYUN_COM_GPU_MEM_CONTAINER=2".into());
                self.ours(driver)
            }
        };
        fs::write(file, config.to_string()).expect("a file can be written");
        command.arg("--root").arg(self.path("runc")).args(["run", "--detach", "--bundle"]);
        // Its output would be held as long as it lives.
        command.arg(&bundle).arg(name).stdin(Stdio::null()).stdout(Stdio::null());
        self.containers.push(name.to_owned());
        let status = on(cpu, || command.status()).expect("the runtime can be started");
        assert!(status.success(), "{command:?}: {status}");
    }

    fn pause(&self, name: &str) {
        let mut command = Command::new("runc");
        command.arg("--root").arg(self.path("runc")).args(["pause", name]).stderr(Stdio::null());
        let paused = || command.status().is_ok_and(|status| status.success());
        assert!(std::iter::repeat_with(paused).take(PAUSES).any(|paused| paused), "{name} runs");
    }

    /// A turn of the neighbour's calls, while `attacker` goes on.
    fn turn(&self, container: &str, bench: &[&str], attacker: Option<&str>) -> Turn {
        if let Some(attacker) = attacker {
            self.runc(&["resume", attacker]);
            std::thread::sleep(WARM);
        }
        let words = [&["exec", container, "/rmtool", "bench"], bench].concat();
        // Of the driver that it has the name of.
        let mut command = self.ours(container);
        command.arg("--root").arg(self.path("runc")).args(words);
        let output = on(OURS, || ran(&mut command));
        if let Some(attacker) = attacker {
            self.pause(attacker);
        }
        let told: Value = serde_json::from_slice(&output.stdout).expect("rmtool prints JSON");
        let ns = |name: &str| told[name].as_f64().expect("a percentile is a number");
        Turn { p50_ns: ns("p50_ns"), p99_ns: ns("p99_ns") }
    }

    /// Rows for a kind of call: of nobody, and of each attack.
    fn compare(&self, what: &str, container: &str, bench: &[&str]) {
        let mut quiet = Vec::new();
        let mut again = Vec::new();
        let mut attacked = vec![Vec::new(); ATTACKS.len()];
        let mut bare = vec![Vec::new(); ATTACKS.len()];
        let begun = Instant::now();
        for _ in 0..ROUNDS {
            quiet.push(self.turn(container, bench, None));
            for (at, (attack, _)) in ATTACKS.iter().enumerate() {
                let by = |gate| self.turn(container, bench, Some(&attacker(attack, gate)));
                attacked[at].push(by(true));
                bare[at].push(by(false));
            }
            again.push(self.turn(container, bench, None));
        }
        let ratios = |of: &[Turn], to: &[Turn], which: fn(&Turn) -> f64| -> Vec<f64> {
            let pairs = of.iter().zip(to);
            let mut all: Vec<f64> = pairs.map(|(turn, to)| which(turn) / which(to)).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let row = |by: &str, of: &[Turn], bare: Option<&[Turn]>| {
            let us = |which: fn(&Turn) -> f64| median(of.iter().map(which).collect()) / 1e3;
            let p99 = ratios(of, &quiet, |turn| turn.p99_ns);
            let (without, ours) = bare.map_or_else(Default::default, |bare| {
                let p99 = |of, to| format!("{:.2}×", median(ratios(of, to, |turn| turn.p99_ns)));
                (p99(bare, &quiet), p99(of, bare))
            });
            println!(
                "{what:<42} {by:<14} {:>6.1} µs {:>6.2}× {:>6.1} µs {:>6.2}× {:>13} {without:>8} \
                 {ours:>8}",
                us(|turn| turn.p50_ns),
                median(ratios(of, &quiet, |turn| turn.p50_ns)),
                us(|turn| turn.p99_ns),
                median(p99.clone()),
                format!("{:.2} to {:.2}", p99[0], p99[p99.len() - 1]),
            );
        };
        row("nobody", &again, None);
        for (at, (attack, _)) in ATTACKS.iter().enumerate() {
            row(attack, &attacked[at], Some(&bare[at]));
        }
        println!("{:<42} budget ≤ 1.10× at p99; {} s", "", begun.elapsed().as_secs());
    }
}

impl Drop for Bench {
    /// Whatever happened: attackers would go on for ever.
    fn drop(&mut self) {
        let runc = |words: &[&str]| {
            let root = self.path("runc");
            let mut command = Command::new("runc");
            command.arg("--root").arg(root).args(words).stderr(Stdio::null());
            let _ = command.status(); // not there, or not paused
        };
        for name in &self.containers {
            runc(&["resume", name]);
            runc(&["delete", "--force", name]);
        }
    }
}
