//! Serves a simulated driver until it is stopped.

use std::path::PathBuf;

use anyhow::Context;
use cgpu_sim::{Fault, GpuSpec, Sim, SimOptions, abi::Version};
use clap::Parser;
use nix::sys::signal::{SigSet, Signal};

/// A simulated NVIDIA driver: prints "ready" when it serves, ends at SIGTERM or SIGINT.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The directory to mount over.
    #[arg(long)]
    dir: PathBuf,
    /// A GPU's memory, as 16130MiB; repeat for more GPUs.
    #[arg(long = "gpu", required = true)]
    gpus: Vec<GpuSpec>,
    /// The driver's version.
    #[arg(long, default_value = "535.161.08")]
    driver: Version,
    /// A fault to begin with, as lines of sim/faults; repeat for more.
    #[arg(long = "fault")]
    faults: Vec<Fault>,
    /// Stay in the foreground, which it always does.
    #[arg(long)]
    foreground: bool,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
    // Before there are threads, which inherit it.
    signals.thread_block().context("can't block signals")?;
    let dir = arguments.dir.clone();
    let options = SimOptions { dir: arguments.dir, gpus: arguments.gpus, driver: arguments.driver };
    let sim = Sim::start(options).with_context(|| format!("can't mount over {}", dir.display()))?;
    arguments.faults.into_iter().for_each(|fault| sim.fault(fault));
    println!("ready");
    signals.wait().context("can't wait for a signal")?;
    Ok(())
}
