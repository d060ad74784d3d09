//! Hours of containers under random load and random kills: `make soak MINUTES=60 SEED=7`.
//!
//! Workers make containers with random quotas on some of four simulated GPUs, by `cgpu-runtime`
//! alone and by docker, and let their first processes, execs and forked children allocate up to
//! the quota and beyond. Meanwhile SIGKILL hits runtimes, `runc init`, shims, monitors, clients of
//! execs, and dockerd (with live restore), monitors are updated, and `cgpu gc` and `cgpu ps` run
//! all the time. Three things are promised of it, and each is counted:
//!
//! - **over quota**: what a container's processes have allocated, by the driver usage, is
//!   at no time more than its quota ([`judge`]); nor are quotas reserved twice;
//! - **lost**: a container that lives has its record;
//! - **leaked**: when all containers are gone, so is everything of them ([`ending`]).
//!
//! Ends with 1 unless all three are 0. A fourth count is of what the soak itself couldn't do or
//! explain (`broken`): that, too, is no success. Each finding names seed, worker and what happened
//! to its container. The seed decides what is tried, by worker; when things happen is the
//! machine's. It lives in scratches as tests do, so whatever ends it, everything goes with it; an
//! interrupt ends it early, judged. Root, and what `make test` needs.

// `signal` has one unsafe call.
#![allow(unsafe_code)]

#[path = "../host/mod.rs"]
mod host;

#[path = "../support/mod.rs"]
mod support;

#[path = "../quota/gated.rs"]
#[allow(dead_code, reason = "what tests ask of it is theirs")]
mod gated;

mod daemon;
mod ending;
mod engine;
mod fleet;
mod judge;
mod kill;
mod life;
mod tally;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use engine::Engines;
use fleet::Fleet;
use gated::Gated;
use support::warden;
use tally::{Kind, Tally};

/// The GPUs in MiB, of different sizes so that what is taken for another's shows.
const GPUS_MIB: [u64; 4] = [16_130, 23_028, 8_000, 4_096];

/// The simulated driver.
const DRIVER: &str = "535.161.08";

/// How many loops of `cgpu gc` run concurrently, with the least priority: one that is held up between
/// checking and collecting is the one that collects what lives.
const COLLECTORS: u64 = 2;

/// Soaks cgpu in containers; see `make soak`.
#[derive(Debug, Parser)]
struct Arguments {
    /// For how long.
    #[arg(long)]
    minutes: f64,
    /// What decides the choices; chosen and printed where none is given.
    #[arg(long)]
    seed: Option<u64>,
    /// How many make containers at once.
    #[arg(long, default_value_t = 8)]
    workers: u64,
}

/// What all threads share.
#[derive(Debug)]
struct Soak {
    // Its daemons end before the driver does.
    engines: Engines,
    gated: Gated,
    fleet: Fleet,
    tally: Tally,
    seed: u64,
    end: Instant,
    /// Set when all workers have exited and the judges may exit, too.
    has_ended: AtomicBool,
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupted(_: i32) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

impl Soak {
    /// Whether to begin something new.
    fn goes_on(&self) -> bool {
        Instant::now() < self.end && !INTERRUPTED.load(Ordering::Relaxed)
    }

    /// The choices of one thread, which no other's disturb.
    fn choices(&self, thread: u64) -> fastrand::Rng {
        // Odd numbers differ in more than their lowest bits.
        fastrand::Rng::with_seed(self.seed ^ (thread + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    /// Naps for so long, less where the soak ends.
    fn nap(&self, length: Duration) {
        let until = Instant::now() + length;
        while self.goes_on() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20).min(length));
        }
    }
}

/// Ends at once what an interrupt is to end in order.
fn heed_interrupts() {
    let action =
        SigAction::new(SigHandler::Handler(interrupted), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler stores to an atomic and does nothing else.
        unsafe { sigaction(signal, &action) }.expect("these signals can be handled");
    }
}

fn main() -> ExitCode {
    if warden::is_asked_for() {
        warden::serve();
        return ExitCode::SUCCESS;
    }
    if !std::env::args().any(|word| word.starts_with("--minutes")) {
        println!("skipped: `make soak` soaks");
        return ExitCode::SUCCESS;
    }
    let arguments = Arguments::parse();
    let seed = arguments.seed.unwrap_or_else(|| fastrand::u64(..1 << 32));
    let (minutes, workers) = (arguments.minutes, arguments.workers);
    println!("soak: MINUTES={minutes} SEED={seed} WORKERS={workers}");
    heed_interrupts();
    let gated = Gated::with_gpus(DRIVER, &GPUS_MIB);
    let begun = Instant::now();
    let soak = Soak {
        engines: Engines::start(&gated),
        fleet: Fleet::default(),
        tally: Tally::new(seed, begun),
        seed,
        end: begun + Duration::from_secs_f64(minutes * 60.0),
        has_ended: AtomicBool::new(false),
        gated,
    };
    run(&soak, workers);
    soak.tally.print()
}

/// Everything, until nothing is left.
fn run(soak: &Soak, workers: u64) {
    std::thread::scope(|scope| {
        let watch = |name: &'static str, judge: fn(&Soak)| {
            scope.spawn(move || soak.guarded(name, || judge(soak)));
        };
        watch("judge of memory", judge::memory);
        watch("judge of records", judge::records);
        std::thread::scope(|scope| {
            for worker in 0..workers {
                scope.spawn(move || life::lead_many(soak, worker));
            }
            for _ in 0..COLLECTORS {
                scope.spawn(|| soak.guarded("collector", || daemon::collect(soak)));
            }
            let killer =
                move || soak.guarded("killer of dockerd", || daemon::restart(soak, workers));
            scope.spawn(killer);
        });
        soak.guarded("end", || ending::clear(soak));
        soak.has_ended.store(true, Ordering::Release);
    });
    soak.guarded("end", || ending::check(soak));
}

impl Soak {
    /// Does something; where that panics, the soak is broken and not over.
    fn guarded(&self, who: &str, act: impl FnOnce()) {
        if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)) {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            self.tally.find(Kind::Broken, format!("{who}: {}", text.unwrap_or("it panicked")));
        }
    }
}
