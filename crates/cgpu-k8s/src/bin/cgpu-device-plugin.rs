//! `cgpu-device-plugin`: see `cgpu-device-plugin --help`.

use std::process::ExitCode;

use cgpu::cli::Exit;
use cgpu::report::{ErrorLog, report};
use cgpu_k8s::{Args, run};
use clap::Parser;

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => Exit::Success.into(),
        Err(error) => {
            report(error.as_ref(), &ErrorLog::default());
            Exit::Failed.into()
        }
    }
}
