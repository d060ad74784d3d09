//! `cgpu-smi`: see `cgpu-smi --help`.

use std::process::ExitCode;

use cgpu::cli::Exit;
use cgpu::report::{ErrorLog, report};
use cgpu_smi::{Args, is_broken_pipe, run};
use clap::Parser;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => Exit::Success.into(),
        // Whoever reads our output has seen enough.
        Err(error) if is_broken_pipe(&error) => Exit::Success.into(),
        Err(error) => {
            report(error.as_ref(), &ErrorLog::default());
            Exit::Failed.into()
        }
    }
}
