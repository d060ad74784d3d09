//! `kubectl inspect gpushare`: see `kubectl inspect gpushare --help`.

use std::process::ExitCode;

use cgpu_cli::commands::Exit;
use cgpu_k8s::{InspectArgs, inspect_cluster};
use clap::Parser;

fn main() -> ExitCode {
    Exit::of(inspect_cluster(&InspectArgs::parse()))
}
