//! `cgpu set`: changes a running container, or a GPU.

use std::io::Write;

use anyhow::{Context, Result, bail};
use clap::Args;

use super::table::printable;
use cgpu::admission::Admission;
use cgpu::host::Host;
use cgpu_core::plan::{Change, GpuChange, Plan};
use cgpu_core::request::amount::size_mib;
use cgpu_core::units::mib_said;

/// What to change of which container or GPU.
#[derive(Debug, Args)]
pub struct Set {
    /// `gpu` and its index, UUID or PCI address, or `container` and its name, its id or the beginning
    /// of that, or `host`; then what to change. A container alone where flags say what to change.
    #[arg(required = true, value_name = "WHAT")]
    pub words: Vec<String>,
    /// The GPU whose quota changes; not needed where the container has one GPU.
    #[arg(long, value_name = "INDEX", requires = "memory")]
    pub gpu: Option<u32>,
    /// The quota in MiB; as `memory=MIB`.
    #[arg(long, value_name = "MIB")]
    pub memory: Option<u64>,
    /// The compute weight on all its GPUs; as `weight=1`.
    #[arg(long, value_name = "1..25")]
    pub weight: Option<u32>,
    /// Whether it has high priority on all its GPUs; as `high-priority=1`.
    #[arg(long, value_name = "true|false")]
    pub high_priority: Option<bool>,
}

/// A change to a container, before it is known which GPUs that has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChangeRequest {
    /// A quota of so many MiB on the GPU of that index, or on the only one.
    Memory(Option<u32>, u64),
    Weight(u32),
    HighPriority(bool),
}

impl ChangeRequest {
    /// The change that `key=value` asks for.
    fn read(key: &str, value: &str) -> Result<Self> {
        let (name, gpu) = match key.split_once('@') {
            Some((name, gpu)) => (name, Some(gpu)),
            None => (key, None),
        };
        match (name, gpu) {
            ("memory", gpu) => {
                let gpu = gpu.map(str::parse).transpose();
                let gpu = gpu
                    .with_context(|| format!("{}: after @ comes a GPU's index", printable(key)))?;
                let mib = mib_said(value).with_context(|| {
                    format!(
                        "memory={}: write MiB or GiB, as memory=4096MiB or memory=4GiB",
                        printable(value)
                    )
                })?;
                Ok(ChangeRequest::Memory(gpu, mib))
            }
            ("weight", None) => {
                let weight = value.parse();
                Ok(ChangeRequest::Weight(weight.with_context(|| {
                    format!("weight={}: write a number from 1 to 25", printable(value))
                })?))
            }
            ("high-priority", None) => match value {
                "1" | "true" => Ok(ChangeRequest::HighPriority(true)),
                "0" | "false" => Ok(ChangeRequest::HighPriority(false)),
                _ => bail!("high-priority={}: write 0 or 1", printable(value)),
            },
            _ => bail!(
                "a container has no setting {}; it has memory, memory@GPU, weight and high-priority",
                printable(key)
            ),
        }
    }

    fn change(self, plan: &Plan) -> Result<Change, cgpu_core::plan::ChangeError> {
        match self {
            ChangeRequest::Memory(gpu, mib) => Change::memory(plan, gpu, mib),
            ChangeRequest::Weight(weight) => Ok(Change::Weight(weight)),
            ChangeRequest::HighPriority(high) => Ok(Change::HighPriority(high)),
        }
    }
}

/// Makes the changes one after the other, and prints what the container or the GPU has now.
///
/// # Errors
///
/// Where there is no such container or GPU, the change can't be meant, others hold too much, or the
/// backend has no such thing; changes before that one are made.
pub fn run(host: &Host, set: &Set, out: &mut dyn Write) -> Result<()> {
    cgpu_host::log::init(&host.config.log);
    let flags = set.change_requests();
    match set.words.as_slice() {
        [container] => change_container(host, container, &flags, out),
        [_, _, ..] if !flags.is_empty() => {
            bail!("write what to change as flags or as key=value, not as both")
        }
        [kind, container, changes @ ..] if kind == "container" => {
            let change_requests =
                pairs(changes)?.map(|(key, value)| ChangeRequest::read(key, value));
            change_container(host, container, &change_requests.collect::<Result<Vec<_>>>()?, out)
        }
        [kind, gpu, changes @ ..] if kind == "gpu" => {
            let changes = pairs(changes)?.map(|(key, value)| GpuChange::read(key, value));
            // All are read before the first is made.
            change_gpu(host, gpu, &changes.collect::<Result<Vec<_>, _>>()?, out)
        }
        [kind, changes @ ..] if kind == "host" => change_host(host, changes, out),
        _ => {
            bail!(
                "write `cgpu set gpu GPU key=value`, `cgpu set container CONTAINER key=value` or `cgpu set \
                 host key=value`"
            )
        }
    }
}

impl Set {
    /// What its flags say.
    fn change_requests(&self) -> Vec<ChangeRequest> {
        let memory = self.memory.map(|mib| ChangeRequest::Memory(self.gpu, mib));
        let weight = self.weight.map(ChangeRequest::Weight);
        let priority = self.high_priority.map(ChangeRequest::HighPriority);
        memory.into_iter().chain(weight).chain(priority).collect()
    }
}

/// The words as keys and values.
fn pairs(words: &[String]) -> Result<impl Iterator<Item = (&str, &str)>> {
    if let Some(word) = words.iter().find(|word| !word.contains('=')) {
        bail!("{}: write it as key=value", printable(word));
    }
    Ok(words.iter().filter_map(|word| word.split_once('=')))
}

fn change_container(
    host: &Host,
    word: &str,
    change_requests: &[ChangeRequest],
    out: &mut dyn Write,
) -> Result<()> {
    let mut plan = None;
    for change_request in change_requests {
        plan = Some(Admission::of(host).set(word, |plan| change_request.change(plan))?);
    }
    let Some(plan) = plan else {
        bail!(
            "nothing to change; write `cgpu set container {} memory=4GiB`, weight=2 or \
             high-priority=1",
            printable(word)
        );
    };
    let priority = if plan.high_priority { "high" } else { "normal" };
    let container = printable(word);
    writeln!(out, "{container}: {plan}, weight {}, priority {priority}", plan.weight)?;
    Ok(out.flush()?)
}

fn change_gpu(host: &Host, word: &str, changes: &[GpuChange], out: &mut dyn Write) -> Result<()> {
    let mut rules = None;
    for change in changes {
        rules = Some(Admission::of(host).set_gpu(word, *change)?);
    }
    let Some(rules) = rules else {
        bail!(
            "nothing to change; write `cgpu set gpu {} max_inst=10`, policy=5 or prio_ratio=80",
            printable(word)
        );
    };
    writeln!(
        out,
        "GPU {}: policy={} max_inst={} prio_ratio={}",
        printable(word),
        rules.policy,
        rules.max_inst,
        rules.prio_ratio
    )?;
    Ok(out.flush()?)
}

fn change_host(host: &Host, words: &[String], out: &mut dyn Write) -> Result<()> {
    let mut mib = None;
    for (key, value) in pairs(words)? {
        if key != "default_memory" {
            bail!("the host has no setting {}; it has default_memory", printable(key));
        }
        let size = size_mib(value);
        mib = Some(size.with_context(|| {
            format!(
                "default_memory={}: write a size as 4GiB, or 0 for whole GPUs",
                printable(value)
            )
        })?);
    }
    let Some(mib) = mib else {
        bail!("nothing to change; write `cgpu set host default_memory=4GiB`, or 0 for whole GPUs");
    };
    Admission::of(host).set_default_memory(mib)?;
    writeln!(out, "host: default_memory={mib}MiB")?;
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A change request is a key and a value; an invalid one is refused with the settings and forms
    /// that are valid.
    #[test]
    fn set_parses_key_value_and_lists_valid_settings() {
        let read = |pair: &str| {
            let (key, value) = pair.split_once('=').unwrap();
            ChangeRequest::read(key, value).map_err(|error| error.to_string())
        };
        assert_eq!(read("memory=4GiB"), Ok(ChangeRequest::Memory(None, 4096)));
        assert_eq!(read("memory@1=300"), Ok(ChangeRequest::Memory(Some(1), 300)));
        assert_eq!(read("weight=2"), Ok(ChangeRequest::Weight(2)));
        assert_eq!(read("high-priority=1"), Ok(ChangeRequest::HighPriority(true)));
        for (pair, part) in [
            ("memory=4GB", "write MiB or GiB"),
            ("memory@x=1", "after @ comes a GPU's index"),
            ("weight=x", "write a number from 1 to 25"),
            ("weight@0=1", "a container has no setting weight@0"),
            ("high-priority=yes", "write 0 or 1"),
            ("colour\n=1", "a container has no setting colour\\n; it has memory"),
        ] {
            let error = read(pair).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
