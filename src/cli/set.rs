//! `cgpu set`: changes a running container.

use std::io::Write;

use anyhow::{Result, bail};
use clap::Args;

use super::table::printable;
use crate::admission::Host;
use crate::plan::{Change, Plan};

/// What to change of which container.
#[derive(Debug, Args)]
pub struct Set {
    /// The container's name, its id, or the beginning of that.
    pub container: String,
    /// The GPU whose quota changes; not needed where it has one GPU.
    #[arg(long, value_name = "INDEX", requires = "memory")]
    pub gpu: Option<u32>,
    /// The quota in MiB.
    #[arg(long, value_name = "MIB")]
    pub memory: Option<u64>,
    /// The compute weight on all its GPUs.
    #[arg(long, value_name = "1..25")]
    pub weight: Option<u32>,
    /// Whether it has high priority on all its GPUs.
    #[arg(long, value_name = "true|false")]
    pub high_priority: Option<bool>,
}

/// Makes the changes one after the other, and prints what the container has now.
///
/// # Errors
///
/// Where there is no such container, the change can't be meant, others hold too much, or the
/// backend has no such thing; changes before that one are made.
pub fn run(host: &Host, set: &Set, out: &mut dyn Write) -> Result<()> {
    crate::log::init(&host.config.log);
    let mut plan = None;
    if let Some(mib) = set.memory {
        let change = |plan: &Plan| Change::memory(plan, set.gpu, mib);
        plan = Some(host.set(&set.container, change)?);
    }
    if let Some(weight) = set.weight {
        plan = Some(host.set(&set.container, |_| Ok(Change::Weight(weight)))?);
    }
    if let Some(high) = set.high_priority {
        plan = Some(host.set(&set.container, |_| Ok(Change::HighPriority(high)))?);
    }
    let Some(plan) = plan else {
        bail!("nothing to change; give --memory, --weight or --high-priority");
    };
    let priority = if plan.high_priority { "high" } else { "normal" };
    let container = printable(&set.container);
    writeln!(out, "{container}: {plan}, weight {}, priority {priority}", plan.weight)?;
    Ok(out.flush()?)
}
