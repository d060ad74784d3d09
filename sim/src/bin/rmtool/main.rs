//! An application for the driver, honest or hostile, that needs no NVIDIA library.
//!
//! Prints short lines of `key=value`; the exit code is 0 where all went as asked. Runs in
//! any container when linked statically:
//! `cargo rustc -p cgpu-sim --bin rmtool -- -C target-feature=+crt-static`.

// It makes system calls that a library would make, and some that none would.
#![allow(unsafe_code)]

mod alarm;
mod ask;
mod attack;
mod passing;
mod processes;
mod rm;
mod script;
mod threads;
mod untrapped;
mod uvm;
mod work;

use std::io::Read as _;
use std::path::PathBuf;
use std::process::ExitCode;

use cgpu_sim::abi::Version;
use cgpu_sim::{SizeError, size_bytes};
use clap::{Parser, Subcommand};

use rm::Place;

/// An application that speaks to the NVIDIA driver by its ioctls.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// Where the device nodes are.
    #[arg(long, default_value = "/dev")]
    dev: PathBuf,
    /// The GPU's index, and the number of its node.
    #[arg(long, default_value_t = 0)]
    gpu: u32,
    /// The driver's version; it is asked otherwise.
    #[arg(long)]
    driver: Option<Version>,
    /// What a hostile program takes honestly before it cheats; all that there is otherwise.
    #[arg(long, value_parser = size)]
    quota: Option<u64>,
    /// A container that has more is killed: attacks wait for that.
    #[arg(long)]
    held: bool,
    /// Run in a second thread, and end the first.
    #[arg(long)]
    headless: bool,
    #[command(subcommand)]
    task: Task,
}

fn size(text: &str) -> Result<u64, SizeError> {
    size_bytes(text)
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Run a script: one command an argument, or a line of standard input.
    Run {
        /// The commands.
        lines: Vec<String>,
    },
    /// Show the GPU's memory and allocate in chunks until refused.
    Demo {
        /// How much to ask for at most.
        #[arg(value_parser = size)]
        size: u64,
        /// Hold it until SIGTERM.
        #[arg(long)]
        hold: bool,
    },
    /// Allocate until refused.
    Fill,
    /// Keep the GPU busy for so many seconds, and report how many kernels it did.
    Spin {
        /// How long.
        seconds: f64,
    },
    /// Allocate so much and hold it until SIGTERM.
    Hold {
        /// How much.
        #[arg(value_parser = size)]
        size: u64,
    },
    /// Let so many processes allocate until refused at once.
    Storm {
        /// How many.
        processes: u32,
    },
    /// Median times of calls in nanoseconds, as JSON; of one kind of call its 99th
    /// percentile, too.
    Bench {
        /// How many calls of each.
        rounds: u32,
        /// The kind: all in turn, where none is given.
        only: Option<work::Call>,
    },
    /// Times of calls that no monitor decides on in nanoseconds, as JSON.
    Untrapped,
    /// Ask the driver what a monitor builds on; the answer is JSON.
    Ask {
        /// What.
        #[command(subcommand)]
        question: ask::Question,
    },
    /// Play a hostile program; without a name, list them.
    Attack {
        /// Which.
        name: Option<String>,
        /// Its arguments.
        arguments: Vec<String>,
    },
}

fn run(arguments: Arguments) -> anyhow::Result<bool> {
    let Arguments { dev, gpu, driver, quota, held: is_held, .. } = arguments;
    let place = Place { dev, gpu, driver, quota, is_held };
    match arguments.task {
        Task::Run { lines } if lines.is_empty() => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text)?;
            let lines: Vec<String> = text.lines().map(str::to_owned).collect();
            script::run(&place, &lines)
        }
        Task::Run { lines } => script::run(&place, &lines),
        Task::Demo { size, hold } => work::demo(&place, size, hold),
        Task::Spin { seconds } => work::spin(&place, seconds),
        Task::Fill => work::fill_and_print(&place),
        Task::Hold { size } => work::hold(&place, size),
        Task::Storm { processes } => work::storm(&place, processes),
        Task::Bench { rounds, only: None } => work::bench(&place, rounds),
        Task::Bench { rounds, only: Some(call) } => work::bench_one(&place, rounds, call),
        Task::Untrapped => untrapped::bench(),
        Task::Ask { question } => ask::run(&place, &question),
        Task::Attack { name, arguments } => attack::run(&place, name.as_deref(), &arguments),
    }
}

/// Runs it; 0 where all went as asked.
fn code(arguments: Arguments) -> u8 {
    match run(arguments) {
        Ok(done) => u8::from(!done),
        Err(error) => {
            eprintln!("rmtool: {error:#}");
            1
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if !arguments.headless {
        return ExitCode::from(code(arguments));
    }
    std::thread::spawn(|| std::process::exit(code(arguments).into()));
    // SAFETY: ends this thread, of which the other uses nothing.
    unsafe { libc::syscall(libc::SYS_exit, 0) };
    ExitCode::FAILURE
}
