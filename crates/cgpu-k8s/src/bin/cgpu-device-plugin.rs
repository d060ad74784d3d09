//! `cgpu-device-plugin`: see `cgpu-device-plugin --help`.

use std::process::ExitCode;

use cgpu_cli::commands::Exit;
use cgpu_k8s::{Args, run};
use clap::Parser;

fn main() -> ExitCode {
    Exit::of(run(&Args::parse()))
}
