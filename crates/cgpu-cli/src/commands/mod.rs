//! The verbs of `cgpu`, a file each: parse and print only.

pub mod cdi;
pub mod doctor;
pub mod events;
pub mod gc;
pub mod get;
pub mod gpus;
pub mod inspect;
pub mod logs;
pub mod nodes;
pub mod ps;
pub mod set;
pub mod setup;
mod sibling_programs;
pub mod table;
pub mod upgrade_monitors;

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand, ValueEnum};

use cgpu::host::Host;
use cgpu_host::config::InventorySource;
use cgpu_host::report::{ErrorLog, report};

/// Set up, inspect and steer containers that share GPUs.
#[derive(Debug, Parser)]
#[command(
    name = "cgpu",
    version,
    about = "An OCI runtime that lets containers share GPUs, with quotas that hold"
)]
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
        /// One of them alone: its name, its id, or the beginning of that.
        container: Option<String>,
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
    /// Change what a running container or a GPU has.
    Set(set::Set),
    /// Print what a container or a GPU has.
    Get(get::Get),
    /// Show what happened to containers: made, refused, out of memory, killed, removed.
    Events(events::Events),
    /// Show the lines of cgpu's log that are about one container.
    Logs {
        /// Its name, its id, or the beginning of that; it may be gone.
        container: String,
    },
    /// Serve what GPUs and containers use, for Prometheus: `cgpu-metrics`.
    Metrics {
        /// Its arguments; `cgpu-metrics --help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Show GPUs and containers as a tree of files, for scripts of the original: `cgpu-tree`.
    Mount {
        /// Its arguments; `cgpu-tree --help` lists them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Take that tree of files down.
    Unmount {
        /// Where it is mounted [default: km in the state directory].
        dir: Option<PathBuf>,
    },
    /// Take back what containers held that are gone.
    Gc,
    /// Look at this host: driver, kernel, runtimes, engines, and what to do.
    Doctor(doctor::Doctor),
    /// Tell an engine of the runtime `cgpu`, or take it out again.
    Setup(setup::Setup),
    /// Make the driver's device nodes that this host lacks, and load nvidia-uvm for them.
    Nodes,
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

/// The exit status of `cgpu`. A wrong command line is 2, by clap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It did what it was asked; `doctor` found nothing worse than a note.
    Success = 0,
    /// It couldn't, and said why; `doctor` found an error.
    Failed = 1,
    /// `doctor` found a warning and no error.
    Warned = 3,
}

impl Exit {
    /// The exit status after `done`; an error is reported on standard error.
    #[must_use]
    pub fn of(done: Result<()>) -> ExitCode {
        match done {
            Ok(()) => Exit::Success.into(),
            Err(error) => {
                report(error.as_ref(), &ErrorLog::default());
                Exit::Failed.into()
            }
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit as u8)
    }
}

/// Does what the command line says, printing to `out`.
///
/// # Errors
///
/// Where the verb failed; the text says what happened, to what, and what to do.
pub fn run(cli: Cli, out: &mut dyn Write) -> Result<Exit> {
    let flag = cli.config.as_deref().map(AsRef::as_ref);
    // `doctor` also checks a configuration that is of no use to the others.
    let host = || Host::load(flag);
    match cli.verb {
        Verb::Doctor(doctor) => {
            let terminal = std::io::stdout().is_terminal();
            return doctor::run(&doctor, cli.config, terminal, out);
        }
        Verb::Gpus { refresh, output } => {
            let host = host()?;
            if refresh && host.config.inventory.source == InventorySource::Auto {
                host.driver_nodes().make_for_nvml();
            }
            gpus::run(&host.inventory_settings(), output.format, refresh, out)?;
        }
        Verb::Ps { container, output } => {
            ps::run(&host()?, container.as_deref(), output.format, out)?;
        }
        Verb::Inspect { bundle, output } => inspect::run(host()?, &bundle, output.format, out)?,
        Verb::Cdi(verb) => cdi::run(&host()?, &verb, out)?,
        Verb::Setup(setup) => setup::run(&setup, out)?,
        Verb::Set(set) => set::run(&host()?, &set, out)?,
        Verb::Get(get) => get::run(&host()?, &get, out)?,
        Verb::Events(events) => events::run(&host()?, &events, out)?,
        Verb::Logs { container } => logs::run(&host()?, &container, out)?,
        Verb::Metrics { arguments } => sibling_programs::run(&host()?, "cgpu-metrics", &arguments)?,
        Verb::Mount { arguments } => sibling_programs::run(&host()?, "cgpu-tree", &arguments)?,
        Verb::Unmount { dir } => {
            let arguments = ["--unmount".into()].into_iter().chain(dir.map(Into::into));
            sibling_programs::run(&host()?, "cgpu-tree", &arguments.collect::<Vec<_>>())?;
        }
        Verb::Gc => gc::run(&host()?, out)?,
        Verb::Nodes => nodes::run(&host()?, out)?,
        Verb::UpgradeMonitors => upgrade_monitors::run(&host()?, out)?,
    }
    Ok(Exit::Success)
}
