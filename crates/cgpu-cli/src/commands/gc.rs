//! `cgpu gc`: takes back what containers held that are gone, and names what it can't take back.

use std::io::Write;

use anyhow::Result;

use super::table::printable;
use cgpu::admission::Admission;
use cgpu::host::Host;

/// Collects stale records, and says which.
///
/// # Errors
///
/// Where the registry can't be used.
pub fn run(host: &Host, out: &mut dyn Write) -> Result<()> {
    cgpu_host::log::init(&host.config.log);
    let collected = Admission::of(host).collect()?;
    for record in collected.records {
        writeln!(out, "{} of {}", printable(&record.key.id), printable(&record.key.root))?;
    }
    for orphan in collected.orphans {
        let id = printable(&orphan.short_id);
        match orphan.monitor {
            None => writeln!(out, "{id}: what was left of a monitor without a record")?,
            Some(monitor) => writeln!(
                out,
                "{id}: not taken back: its monitor (process {}) lives, and it has no record, so that \
                 its memory isn't counted; remove that container and create it again",
                monitor.pid
            )?,
        }
    }
    Ok(out.flush()?)
}
