//! `cgpu-smi`: see `cgpu-smi --help`.

use std::process::ExitCode;

use cgpu_cli::commands::Exit;
use cgpu_smi::{Args, is_broken_pipe, run};
use clap::Parser;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        // The reader of our output has closed it.
        Err(error) if is_broken_pipe(&error) => Exit::Success.into(),
        done => Exit::of(done),
    }
}
