//! `cgpu-steer --driver VERSION --a FILE --b FILE -- PROGRAM…`: runs a program twice, and divides a GPU
//! between the two from outside, by the driver's own controls.
//!
//! It stands where a monitor would: it sees what the programs ask the driver (ptrace, until they say
//! that they compute), and makes its calls on duplicates of their descriptors. Their throughput shows the
//! effect; we only report when what was asked, and what the driver answered.

mod control;
mod desk;
mod learn;
mod samples;
mod schedule;
mod turns;

use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use caps::{CapSet, Capability};
use cgpu_record::follow;
use clap::Parser;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use nvrm::Release;

use desk::{A, B, Desk};
use learn::Learner;
use schedule::Plan;

/// How long a program may take to end when it's asked to.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Runs a program twice, as `a` and `b`, which says a line with "computing" when it computes and ends
/// at SIGTERM. Prints as JSON when what was asked of the driver, and what it answered.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The driver's version, by which its structs are read.
    #[arg(long)]
    driver: String,
    /// Where the driver's nodes are.
    #[arg(long, default_value = "/dev")]
    dev: PathBuf,
    /// Where the first writes what it says.
    #[arg(long)]
    a: PathBuf,
    /// Where the second does; given several times, so many programs are the second together.
    #[arg(long, required = true)]
    b: Vec<PathBuf>,
    /// Words that the second gets in addition to the first's, with spaces between.
    #[arg(long, default_value = "", allow_hyphen_values = true)]
    b_words: String,
    /// What is to be learnt.
    #[arg(long, value_enum, default_value_t = Plan::Divide)]
    plan: Plan,
    /// Sets this slice, in microseconds, on each group just before its program schedules it.
    #[arg(long)]
    before_schedule_us: Option<u64>,
    /// How long a phase takes.
    #[arg(long, default_value_t = 2000)]
    phase_ms: u64,
    /// When to come to an end, whatever is left to do.
    #[arg(long, default_value_t = 60)]
    limit_s: u64,
    /// What to run.
    #[arg(last = true, required = true)]
    program: Vec<String>,
}

/// Whether to stop: the time has run out, or a signal came.
#[derive(Debug, Default)]
struct Over(AtomicBool);

impl Over {
    fn is(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }

    /// Watches from now on; while `following`, no other thread checks.
    fn watch(limit: Duration, following: &Arc<Following>) -> anyhow::Result<Arc<Self>> {
        let over = Arc::new(Over::default());
        let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
        // All threads inherit it.
        signals.thread_block().context("can't block signals")?;
        let ends = |wait: Box<dyn FnOnce() + Send>| {
            let (over, following) = (Arc::clone(&over), Arc::clone(following));
            std::thread::spawn(move || {
                wait();
                over.0.store(true, Ordering::Release);
                following.give_up();
            });
        };
        ends(Box::new(move || {
            let _ = signals.wait();
        }));
        ends(Box::new(move || std::thread::sleep(limit)));
        Ok(over)
    }
}

/// The programs while they are followed, which nothing but their end ends early.
#[derive(Debug, Default)]
struct Following(std::sync::Mutex<Vec<Pid>>);

impl Following {
    fn set(&self, programs: Vec<Pid>) {
        *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = programs;
    }

    fn give_up(&self) {
        for program in self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).iter() {
            let _ = kill(*program, Signal::SIGKILL);
        }
    }
}

fn main() -> ExitCode {
    match steer(&Arguments::parse()) {
        Ok(said) => {
            println!("{said}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{}", serde_json::json!({ "failed": format!("{error:#}") }));
            ExitCode::FAILURE
        }
    }
}

fn steer(arguments: &Arguments) -> anyhow::Result<serde_json::Value> {
    let release = Release::of(arguments.driver.parse()?)?;
    let dev = arguments.dev.canonicalize().context("--dev")?;
    let following = Arc::new(Following::default());
    let over = Over::watch(Duration::from_secs(arguments.limit_s), &following)?;
    let mut named = vec![(A, start(arguments, &arguments.a, "")?)];
    for output in &arguments.b {
        named.push((B, start(arguments, output, &arguments.b_words)?));
    }
    let programs: Vec<Pid> = named.iter().map(|(_, program)| *program).collect();
    following.set(programs.clone());
    let mut learner = Learner::new(release, dev, &named);
    learner.before_schedule(arguments.before_schedule_us);
    follow::follow(&programs, &mut learner)?;
    following.set(Vec::new());
    anyhow::ensure!(!over.is(), "the time was over before all computed");
    let (learnt, before_schedule) = learner.learnt()?;
    let mut desk = Desk::of(learnt)?;
    let phases =
        schedule::run(arguments.plan, &mut desk, Duration::from_millis(arguments.phase_ms), &over);
    let put_back = desk.put_back();
    let ended_early = over.is();
    let reported = desk.close();
    let exits = end(&programs);
    let has =
        |wanted: &Capability| caps::has_cap(None, CapSet::Effective, *wanted).unwrap_or(false);
    let asked = [Capability::CAP_SYS_ADMIN, Capability::CAP_SYS_NICE];
    let rights: Vec<String> =
        asked.iter().filter(|wanted| has(wanted)).map(ToString::to_string).collect();
    Ok(serde_json::json!({
        "tenants": reported.tenants,
        "root_has": rights,
        "phases": phases,
        "controls": reported.tried,
        "before_schedule": before_schedule,
        "turns": reported.turns,
        "samples": reported.samples,
        "put_back": put_back,
        "ended_early": ended_early,
        "exits": exits,
    }))
}

fn start(arguments: &Arguments, output: &PathBuf, more: &str) -> anyhow::Result<Pid> {
    let (name, words) = arguments.program.split_first().context("no program")?;
    let file = File::create(output).with_context(|| format!("can't write {}", output.display()))?;
    let mut program = Command::new(name);
    program.args(words).args(more.split_whitespace()).stdin(Stdio::null()).stdout(file);
    follow::start(program)
}

/// Ends the programs, and says how each did.
fn end(programs: &[Pid]) -> Vec<String> {
    for program in programs {
        let _ = kill(*program, Signal::SIGTERM);
    }
    let deadline = Instant::now() + TIMEOUT;
    let how = |program: &Pid| {
        loop {
            match waitpid(*program, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Ok(WaitStatus::StillAlive) => {
                    let _ = kill(*program, Signal::SIGKILL);
                    return "killed, since it didn't end".to_owned();
                }
                Ok(WaitStatus::Exited(_, status)) => return format!("exit status {status}"),
                Ok(WaitStatus::Signaled(_, signal, _)) => return format!("ended by {signal}"),
                Ok(_) => {}
                Err(_) => return "ended before its time".to_owned(),
            }
        }
    };
    programs.iter().map(how).collect()
}
