//! `cgpu`: set up, inspect and steer. See `cgpu --help`.

use std::io;
use std::process::ExitCode;

use cgpu_cli::commands::{self, Cli, Exit};
use cgpu_host::report::{ErrorLog, report};
use clap::Parser;

fn main() -> ExitCode {
    match commands::run(Cli::parse(), &mut io::stdout().lock()) {
        Ok(exit) => exit.into(),
        Err(error) => {
            report(error.as_ref(), &ErrorLog::default());
            Exit::Failed.into()
        }
    }
}
