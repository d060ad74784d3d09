//! `cgpu gc`: takes back what containers held that are gone.

use std::io::Write;

use anyhow::Result;

use super::table::printable;
use crate::admission::Host;

/// Collects stale records, and says which.
///
/// # Errors
///
/// Where the registry can't be used.
pub fn run(host: &Host, out: &mut dyn Write) -> Result<()> {
    crate::log::init(&host.config.log);
    for record in host.collect()? {
        writeln!(out, "{} of {}", printable(&record.key.id), printable(&record.key.root))?;
    }
    Ok(out.flush()?)
}
