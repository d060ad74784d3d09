//! `cgpu-dra-driver`: see `cgpu-dra-driver --help`.

use std::process::ExitCode;

use cgpu_cli::commands::Exit;
use cgpu_k8s::dra::{DraArgs, run};
use clap::Parser;

fn main() -> ExitCode {
    Exit::of(run(&DraArgs::parse()))
}
