//! What a container's calls cost while another one attacks: `make bench`.
//!
//! The promise: no more than a tenth at the 99th percentile. Each attack of the tests' table is
//! played again and again, with its monitor and the driver that it calls on one processor, and the
//! neighbour and its monitor are on another: processes that share a processor share its time. In
//! each round follow each other a turn without an attack, one of the attack behind the gate, and one
//! of the same attack in a container that the driver is given bare; a figure is the median of the
//! rounds' ratios. What the bare one costs is the machine's part, its caches, clocks and
//! interrupts; what the gate's costs in addition is the gate's. An attack exceeds if it's more
//! than a tenth over the turn without an attack and over the bare one's. The row "no attack" is how
//! much the machine itself varies.
//!
//! The neighbour has a simulated driver of its own: one that all share is a process whose threads
//! run on the neighbour's processor for the attacker, where a real one runs on the caller's. What
//! that makes of it is shown beside, and proves nothing: an attack that is refused begins anew at
//! once, and one that succeeds stays for seconds. Where both do the same, as in the first rows, it
//! says what the gate makes of it.
//!
//! Exits with 1 where an attack exceeds, or none of its plays came to an end of its own. Arguments
//! are attacks to play alone, as they stand in the rows, or command lines in their place
//! (`/rmtool fill`). Root, runc, busybox-static and two processors.

mod pinned;
#[path = "../tests/quota/table.rs"]
#[allow(dead_code, reason = "what else is promised of each is the tests'")]
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use cgpu_sim::{Program, SimOptions};
use pinned::pin;
use serde_json::{Value, json};

/// At the 99th percentile.
const BUDGET: f64 = 1.10;

/// Rounds of each attack; and of one that exceeds after them, since the machine has moods.
const ROUNDS: usize = 5;
const MOST_ROUNDS: usize = 21;

/// How often to try to pause an attacker: a process inside the driver can't be frozen.
const PAUSES: usize = 100;

/// How long an attack goes on before anything is measured.
const WARM: Duration = Duration::from_millis(60);

/// So that other users of the machine matter less: the most that containers can have, and
/// the most that the processes next to them can.
const SHARES: u64 = 262_144;
const PRIORITY: i32 = -20;

/// The processors.
const THEIRS: usize = 0;
const OURS: usize = 1;

/// How a bare container calls the GPU that it has for itself.
const BARE: &str = "/rmtool --gpu 1";

/// What is played in addition to the table, again and again. The first keeps its processor busy, and
/// other processes that would run there are pushed to ours.
const OTHERS: &[(&str, &str)] = &[
    ("a busy loop", ":"),
    ("refused calls", "/rmtool bench 200000 refused"),
    ("executed calls", "/rmtool bench 200000 executed"),
    ("programs that fill", "/rmtool fill"),
];

/// The one that takes two containers: a descriptor that is handed to one without a GPU.
const HANDED: &str = "send-fd, recv-fd";
const GIVES: &str = "/rmtool --quota 500MiB attack send-fd /shared/s";
const TAKES: &str = "/rmtool --quota 500MiB attack recv-fd /shared/s 5";

/// How a play may end: done, or killed.
const ENDS: &[&str] = &["0", "137"];

/// A kind of the neighbour's calls.
struct Calls {
    title: &'static str,
    container: &'static str,
    count: &'static str,
    kind: &'static str,
    /// Whether attacks are judged by them.
    judges: bool,
}

const CALLS: &[Calls] = &[
    Calls { title: "refused", container: "alone", count: "10000", kind: "refused", judges: true },
    Calls { title: "executed", container: "alone", count: "3000", kind: "executed", judges: true },
    Calls {
        title: "executed, one driver for all",
        container: "shared",
        count: "3000",
        kind: "executed",
        judges: false,
    },
];

/// What a container has of a driver.
#[derive(Clone, Copy)]
enum Gpu<'a> {
    /// A quota of that one's, which the gate holds.
    Gate(&'a str),
    /// Nodes of the one that is shared, without a gate in between.
    Bare,
    Nothing,
}

/// 99th percentiles of a round's turns, in ns.
struct Round {
    alone: f64,
    gate: f64,
    bare: f64,
}

/// Medians of rounds' ratios.
struct Ratios {
    /// The attack behind the gate over the turn without an attack.
    gate: f64,
    /// The bare one over the turn without an attack.
    bare: f64,
    /// The one over the other.
    part: f64,
}

impl Ratios {
    fn of(rounds: &[Round]) -> Self {
        let middle = |ratio: fn(&Round) -> f64| median(rounds.iter().map(ratio).collect());
        Ratios {
            gate: middle(|round| round.gate / round.alone),
            bare: middle(|round| round.bare / round.alone),
            part: middle(|round| round.gate / round.bare),
        }
    }

    /// Whether an attack exceeds by these calls.
    fn exceed(&self, calls: &Calls) -> bool {
        calls.judges && self.gate > BUDGET && self.part > BUDGET
    }
}

fn main() -> ExitCode {
    let programs = match std::env::var_os("CGPU_BIN_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => Path::new(env!("CARGO_BIN_EXE_cgpu-runtime")).with_file_name(""),
    };
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        println!("skipped: a neighbour needs a processor of its own");
        return ExitCode::SUCCESS;
    }
    // Children have it, too. Where a host forbids it, others matter.
    let _ = rustix::process::setpriority_process(None, PRIORITY);
    // A tmpfs, as /run is on a host.
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory can be made");
    let work = dir.path().to_owned();
    let mut bench = Bench { programs, work, containers: Vec::new(), drivers: Vec::new() };
    bench.rootfs();
    bench.driver("alone", OURS);
    bench.driver("shared", THEIRS);
    for name in ["alone", "shared"] {
        bench.create(name, Gpu::Gate(name), OURS, "sleep 1000000");
    }
    let begun = Instant::now();
    let titles = CALLS.iter().map(|calls| format!("{:>33}   ", calls.title));
    println!("\n{:<34}{}rounds", "a neighbour's p99 beside", titles.collect::<String>());
    let columns = ["by the gate", "bare", "its part"].map(|name| format!("{name:>11}")).concat();
    println!("{:<34}{}", "", format!("{columns}   ").repeat(CALLS.len()));
    let chosen: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let plays = |attack: &str| chosen.is_empty() || chosen.iter().any(|word| word == attack);
    let own = chosen.iter().filter(|word| word.starts_with('/'));
    let own: Vec<_> = own.map(|line| (line.clone(), line.clone())).collect();
    let others = OTHERS.iter().map(|(name, words)| ((*name).to_owned(), (*words).to_owned()));
    let table = table::ATTACKS.iter().map(|(words, ..)| {
        let line = table::words_of(words).join(" ");
        (words.join(" "), format!("/rmtool {line}"))
    });
    let handed = (HANDED.to_owned(), GIVES.to_owned());
    let mut failed = Vec::new();
    if chosen.is_empty() {
        bench.beside("no attack", None);
    }
    for (attack, words) in
        others.chain(table).chain([handed]).chain(own).filter(|(name, _)| plays(name))
    {
        if !bench.beside(&attack, Some(&words)) {
            failed.push(attack);
        }
    }
    println!("budget: {BUDGET:.2} by the gate, or its part; {} s", begun.elapsed().as_secs());
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("NOT held beside: {}", failed.join("; "));
    ExitCode::FAILURE
}

/// The middle one.
fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
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
    /// They end after the containers. The last one is shared.
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

    /// A simulated driver, and the configuration that containers on it are made with.
    fn driver(&mut self, name: &str, cpu: usize) {
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
            gpus: vec!["16130MiB".parse().expect("a size"); 2],
            driver: "535.161.08".parse().expect("a version"),
        };
        let program = self.programs.join("cgpu-sim");
        let driver = on(cpu, || Program::start(&program, &options)).expect("it serves");
        self.drivers.push(driver);
    }

    fn runc(&self, words: &[&str]) -> Output {
        ran(Command::new("runc").arg("--root").arg(self.path("runc")).args(words))
    }

    fn ours(&self, driver: &str) -> Command {
        let mut command = Command::new(self.programs.join("cgpu-runtime"));
        command.arg("--cgpu-config").arg(self.path(&format!("{driver}.toml")));
        command
    }

    /// Starts a container on that processor, its monitor too.
    fn create(&mut self, name: &str, gpu: Gpu<'_>, cpu: usize, words: &str) {
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
        let plays = bundle.join("plays");
        fs::create_dir(&plays).expect("a directory can be made");
        mounts.push(bind(plays, "/plays"));
        // What giver and taker have in common.
        let shared = bundle.with_file_name(name.trim_end_matches("-taker")).join("plays");
        mounts.push(bind(shared, "/shared"));
        let mut command = match gpu {
            Gpu::Nothing => Command::new("runc"),
            Gpu::Bare => {
                for node in ["nvidiactl", "nvidia1", "nvidia-uvm"] {
                    let from = self.path("driver-shared/dev").join(node);
                    mounts.push(bind(from, &format!("/dev/{node}")));
                }
                Command::new("runc")
            }
            Gpu::Gate(driver) => {
                let env = config["process"]["env"].as_array_mut().expect("it has variables");
                let quota = format!("ALIYUN_COM_GPU_MEM_CONTAINER={}", table::QUOTA_MIB);
                let unit = "ALIYUN_COM_GPU_MEM_UNIT=MiB";
                env.extend([quota.into(), unit.into(), "NVIDIA_VISIBLE_DEVICES=0".into()]);
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

    /// The 99th percentile of each kind of the neighbour's calls, in ns, while `attackers` go on.
    fn turn(&self, attackers: &[String]) -> Vec<f64> {
        attackers.iter().for_each(|attacker| drop(self.runc(&["resume", attacker])));
        if !attackers.is_empty() {
            std::thread::sleep(WARM);
        }
        let all = CALLS.iter().map(|Calls { container, count, kind, .. }| {
            // The shared driver may run on either processor.
            let both: &[usize] = if *container == "shared" { &[THEIRS, OURS] } else { &[THEIRS] };
            pin(self.drivers.last().expect("it was started").pid(), both);
            // By the driver that it has the name of.
            let mut command = self.ours(container);
            command.arg("--root").arg(self.path("runc"));
            command.args(["exec", container, "/rmtool", "bench", count, kind]);
            let output = on(OURS, || ran(&mut command));
            let reported: Value =
                serde_json::from_slice(&output.stdout).expect("rmtool prints JSON");
            reported["p99_ns"].as_f64().expect("a percentile is a number")
        });
        let all = all.collect();
        attackers.iter().for_each(|attacker| self.pause(attacker));
        all
    }

    /// Makes the containers that play `words`, paused.
    fn attackers(&mut self, words: &str, gate: bool) -> Vec<String> {
        let (name, gpu) = if gate { ("gate", Gpu::Gate("shared")) } else { ("bare", Gpu::Bare) };
        let mut all = vec![(name.to_owned(), gpu, words)];
        if words == GIVES {
            all.push((format!("{name}-taker"), Gpu::Nothing, TAKES));
        }
        let create = |(name, gpu, words): (String, Gpu<'_>, &str)| {
            // One that the other doesn't have memory of, while it's paused.
            let words = if gate { words.to_owned() } else { words.replace("/rmtool", BARE) };
            let plays = format!("{words} >/plays/said 2>&1; echo $? >>/plays/ends");
            self.create(&name, gpu, THEIRS, &format!("while :; do {plays}; done"));
            self.pause(&name);
            name
        };
        all.into_iter().map(create).collect()
    }

    /// A row: what the neighbour's calls cost next to that attack, and whether that is within the budget.
    fn beside(&mut self, attack: &str, words: Option<&str>) -> bool {
        let of = |gate| words.map(|words| (words, gate));
        let mut attackers = |of: Option<(&str, bool)>| {
            of.map_or(Vec::new(), |(words, gate)| self.attackers(words, gate))
        };
        let (gate, bare) = (attackers(of(true)), attackers(of(false)));
        let mut rounds: Vec<Vec<Round>> = CALLS.iter().map(|_| Vec::new()).collect();
        let mut ratios: Vec<Ratios> = Vec::new();
        let exceeds =
            |ratios: &[Ratios]| ratios.iter().zip(CALLS).any(|(of, calls)| of.exceed(calls));
        while rounds[0].len() < ROUNDS || rounds[0].len() < MOST_ROUNDS && exceeds(&ratios) {
            // Each comes first in every third round.
            let mut turns = [(0, &[][..]), (1, &gate[..]), (2, &bare[..])];
            turns.rotate_left(rounds[0].len() % 3);
            let mut reported = [const { Vec::new() }; 3];
            for (which, attackers) in turns {
                reported[which] = self.turn(attackers);
            }
            for (at, rounds) in rounds.iter_mut().enumerate() {
                let [alone, gate, bare] = [0, 1, 2].map(|which: usize| reported[which][at]);
                rounds.push(Round { alone, gate, bare });
            }
            ratios = rounds.iter().map(|rounds| Ratios::of(rounds)).collect();
        }
        let cells = ratios.iter().zip(CALLS).map(|(of, calls)| {
            let mark = if of.exceed(calls) { " ! " } else { "   " };
            format!("{:>11.2}{:>11.2}{:>11.2}{mark}", of.gate, of.bare, of.part)
        });
        println!("{attack:<34}{} {:>4}", cells.collect::<String>(), rounds[0].len());
        let mut held = !exceeds(&ratios);
        for name in gate.iter().chain(&bare) {
            let plays = self.path(name).join("plays");
            let ends = fs::read_to_string(plays.join("ends")).unwrap_or_default();
            let said = fs::read_to_string(plays.join("said")).unwrap_or_default();
            // One that takes longer than all turns together has none.
            if !ends.is_empty() && !ends.lines().any(|end| ENDS.contains(&end)) {
                println!("    {name} couldn't be played: {}", said.trim());
                held = false;
            }
            self.delete(name);
        }
        held
    }

    fn delete(&mut self, name: &str) {
        let runc = |words: &[&str]| {
            let root = self.path("runc");
            let mut command = Command::new("runc");
            command.arg("--root").arg(root).args(words).stderr(Stdio::null());
            let _ = command.status(); // not there, or not paused
        };
        runc(&["resume", name]);
        runc(&["delete", "--force", name]);
        let _ = fs::remove_dir_all(self.path(name)); // recreated, then
        self.containers.retain(|known| known != name);
    }
}

impl Drop for Bench {
    /// Whatever happened: attackers would go on for ever.
    fn drop(&mut self) {
        self.containers.clone().iter().for_each(|name| self.delete(name));
    }
}
