//! `cgpu upgrade-monitors`: running containers get the monitor that is installed now.

use std::io::Write;

use anyhow::{Result, bail};

use super::table::printable;
use cgpu::admission::Admission;
use cgpu::backend::gate::MONITOR;
use cgpu::host::{Host, own_program};
use cgpu_monitor::gate::upgrade::upgrade;

/// Has the installed monitor go on in each running one, and says so.
///
/// # Errors
///
/// Where one of them was not updated; the others are.
pub fn run(host: &Host, out: &mut dyn Write) -> Result<()> {
    Admission::of(host).share_out_all()?;
    let mut failed = Vec::new();
    for upgraded in upgrade(&host.config.state_dir, &own_program(MONITOR)?)? {
        let id = printable(&upgraded.short_id);
        match upgraded.versions {
            Ok(Some((before, after))) => writeln!(out, "{id} {before} -> {after}")?,
            Ok(None) => {
                writeln!(out, "{id} skipped: it has no monitor any more; see `cgpu doctor`")?
            }
            Err(error) => failed.push(format!("{id}: {error}")),
        }
    }
    out.flush()?;
    if !failed.is_empty() {
        bail!("not every monitor was upgraded: {}", failed.join("; "));
    }
    Ok(())
}
