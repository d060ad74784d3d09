//! `cgpu-tree`: see `cgpu-tree --help`.

use std::process::ExitCode;

use cgpu_cli::commands::Exit;
use cgpu_tree::{Args, run};
use clap::Parser;

fn main() -> ExitCode {
    Exit::of(run(&Args::parse()))
}
