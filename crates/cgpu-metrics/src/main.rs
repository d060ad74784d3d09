//! `cgpu-metrics`: see `cgpu-metrics --help`.

use std::process::ExitCode;

use cgpu_cli::commands::Exit;
use cgpu_metrics::{Args, run};
use clap::Parser;

fn main() -> ExitCode {
    Exit::of(run(&Args::parse()))
}
