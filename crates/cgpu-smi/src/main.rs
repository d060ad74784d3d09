//! `cgpu-smi`: shows the GPUs of a host and the containers that share them. See `cgpu-smi --help`.

mod args;
mod cells;
mod choose;
mod history;
mod look;
mod print;
mod query;
mod sheet;
mod watch;

use std::process::ExitCode;

use clap::Parser;

use args::Args;

/// How `cgpu-smi` ends. A wrong command line is 2, by clap.
#[derive(Debug, Clone, Copy)]
enum Exit {
    /// It showed what it was asked for.
    Success = 0,
    /// It couldn't, and said why.
    Failed = 1,
}

fn main() -> ExitCode {
    let exit = match look::run(&Args::parse()) {
        Ok(()) => Exit::Success,
        // Whoever reads our output has seen enough.
        Err(error) if print::is_broken_pipe(&error) => Exit::Success,
        Err(error) => {
            cgpu::report::report(error.as_ref(), &cgpu::report::ErrorLog::default());
            Exit::Failed
        }
    };
    ExitCode::from(exit as u8)
}
