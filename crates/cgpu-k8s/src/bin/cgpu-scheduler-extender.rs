//! `cgpu-scheduler-extender`: see `cgpu-scheduler-extender --help`.

use std::process::ExitCode;

use cgpu_cli::commands::Exit;
use cgpu_k8s::extender::{ExtenderArgs, run};
use clap::Parser;

fn main() -> ExitCode {
    Exit::of(run(&ExtenderArgs::parse()))
}
