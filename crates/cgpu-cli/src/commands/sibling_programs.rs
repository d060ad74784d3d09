//! `cgpu metrics` and `cgpu mount`: become programs of their own, which lie next to `cgpu`.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};

use cgpu::host::{Host, own_program};

/// Becomes `program` with these arguments, and our configuration.
///
/// # Errors
///
/// If it isn't installed next to this program.
pub(super) fn run(host: &Host, program: &'static str, arguments: &[OsString]) -> Result<()> {
    let program = own_program(program)?;
    let mut command = Command::new(&program);
    if let Some(config) = &host.config_path {
        command.arg("--config").arg(config);
    }
    let error = command.args(arguments).exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}
