//! `cgpu metrics`: becomes `cgpu-metrics`, a program of its own.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};

use crate::admission::{Host, own_program};

/// Becomes `cgpu-metrics` with these arguments, and our configuration.
///
/// # Errors
///
/// Where it isn't installed beside this program.
pub(super) fn run(host: &Host, arguments: &[OsString]) -> Result<()> {
    let program = own_program("cgpu-metrics")?;
    let mut command = Command::new(&program);
    if let Some(config) = &host.config_path {
        command.arg("--config").arg(config);
    }
    let error = command.args(arguments).exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}
