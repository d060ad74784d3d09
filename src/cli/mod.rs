//! The verbs of `cgpu`, a file each: parse and print only.

pub mod cdi;
pub mod gc;
pub mod gpus;
pub mod inspect;
pub mod ps;
pub mod set;
mod table;
pub mod upgrade_monitors;

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::admission::Host;

/// Set up, inspect and steer containers that share GPUs.
#[derive(Debug, Parser)]
#[command(name = "cgpu", version, about)]
pub struct Cli {
    /// The configuration [default: $CGPU_CONFIG, else /etc/cgpu/config.toml].
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// What `cgpu` can do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List the GPUs of this host.
    Gpus {
        /// Ask the driver, and keep the answer for the runtime.
        #[arg(long)]
        refresh: bool,
        /// How to print.
        #[command(flatten)]
        output: Output,
    },
    /// List the registered containers.
    Ps {
        /// How to print.
        #[command(flatten)]
        output: Output,
    },
    /// Show what a create of a bundle would do; changes nothing.
    Inspect {
        /// The bundle's directory.
        #[arg(long, short, value_name = "DIR", default_value = ".")]
        bundle: PathBuf,
        /// How to print.
        #[command(flatten)]
        output: Output,
    },
    /// Write or list CDI specifications.
    #[command(subcommand)]
    Cdi(cdi::Verb),
    /// Change what a running container has.
    Set(set::Set),
    /// Take back what containers held that are gone.
    Gc,
    /// Put the monitor that is installed now in the place of each running one.
    UpgradeMonitors,
}

/// How to print.
#[derive(Debug, Clone, Copy, Args)]
pub struct Output {
    /// For people or for programs.
    #[arg(long, value_enum, default_value_t)]
    pub format: Format,
}

/// For people or for programs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

/// Does what the command line says, printing to `out`.
///
/// # Errors
///
/// Where the verb failed; the text says what happened, to what, and what to do.
pub fn run(cli: Cli, out: &mut dyn Write) -> Result<()> {
    let host = Host::load(cli.config.as_deref().map(AsRef::as_ref))?;
    match cli.verb {
        Verb::Gpus { refresh, output } => {
            gpus::run(&host.inventory_settings(), output.format, refresh, out)
        }
        Verb::Ps { output } => ps::run(&host, output.format, out),
        Verb::Inspect { bundle, output } => inspect::run(&host, &bundle, output.format, out),
        Verb::Cdi(verb) => cdi::run(&host, &verb, out),
        Verb::Set(set) => set::run(&host, &set, out),
        Verb::Gc => gc::run(&host, out),
        Verb::UpgradeMonitors => upgrade_monitors::run(&host, out),
    }
}
