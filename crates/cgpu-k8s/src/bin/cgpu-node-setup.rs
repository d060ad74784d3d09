//! `cgpu-node-setup`: see `cgpu-node-setup --help`.

use std::process::ExitCode;

use cgpu_cli::commands::Exit;
use cgpu_k8s::setup::{SetupArgs, set_up};
use clap::Parser;

fn main() -> ExitCode {
    Exit::of(set_up(&SetupArgs::parse()))
}
