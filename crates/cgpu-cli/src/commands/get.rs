//! `cgpu get`: what a container, a GPU or the host has, as `cgpu set` takes it.

use std::io::Write;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};

use super::table::printable;
use crate::view::{ContainerView, GpuView, Processes, collect, collect_records};
use cgpu::admission::Admission;
use cgpu::container_names;
use cgpu::host::Host;
use cgpu_core::units::bytes_to_mib;

/// What to print of which container or GPU, or of the host.
#[derive(Debug, Args)]
pub struct Get {
    /// A container, a GPU or the host.
    pub kind: Thing,
    /// The container's name, its id or the beginning of that; or the GPU's index, UUID or PCI
    /// address.
    #[arg(value_name = "WHICH")]
    pub word: Option<String>,
    /// One of its figures alone, as `memory` or `policy`.
    pub key: Option<String>,
}

/// What `cgpu get` reports on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Thing {
    /// A container.
    Container,
    /// A GPU.
    Gpu,
    /// The host; the next word is one of its figures.
    Host,
}

/// A figure's name, and its value where it is known.
type NamedValue = (String, Option<String>);

/// Prints a line for each figure, or the value of one.
///
/// # Errors
///
/// Where there is no such container, GPU or figure.
pub fn run(host: &Host, get: &Get, out: &mut dyn Write) -> Result<()> {
    let word =
        || get.word.as_deref().context("say which: `cgpu get gpu 0`, `cgpu get container NAME`");
    let mut key = get.key.as_ref();
    let values = match get.kind {
        Thing::Host => {
            key = get.word.as_ref();
            let mib = host.default_memory_mib()?;
            Some(vec![("default_memory".to_owned(), Some(format!("{mib}MiB")))])
        }
        Thing::Container => {
            let (records, _) = host.check_registry()?.check_each()?;
            let record = container_names::chosen(word()?, records)?;
            let snapshot = collect_records(host, vec![record], &[], Processes::Numbered, None)?;
            snapshot.containers.first().map(of_container)
        }
        Thing::Gpu => {
            let uuid = Admission::of(host).gpu_named(word()?)?.uuid;
            collect(host, Processes::Numbered, None)?
                .gpus
                .iter()
                .find(|gpu| gpu.uuid == uuid)
                .map(of_gpu)
        }
    };
    let values = values.unwrap_or_default();
    let known = |value: &Option<String>| value.clone().unwrap_or_else(|| "unknown".to_owned());
    match key {
        None => {
            for (name, value) in &values {
                writeln!(out, "{name}={}", known(value))?;
            }
        }
        Some(key) => match values.iter().find(|(name, _)| name == key) {
            Some((_, value)) => writeln!(out, "{}", known(value))?,
            None => {
                let names: Vec<_> = values.iter().map(|(name, _)| name.as_str()).collect();
                bail!("there is no figure {}; there are {}", printable(key), names.join(", "));
            }
        },
    }
    Ok(out.flush()?)
}

fn mib(bytes: Option<u64>) -> Option<String> {
    bytes.map(|bytes| format!("{}MiB", bytes_to_mib(bytes)))
}

fn of_gpu(gpu: &GpuView) -> Vec<NamedValue> {
    let number = |number: Option<u32>| number.map(|number| number.to_string());
    [
        ("policy", number(gpu.policy)),
        ("max_inst", number(gpu.max_inst)),
        ("prio_ratio", number(gpu.prio_ratio)),
        ("free_weight", number(gpu.free_weight)),
        ("containers", number(Some(gpu.shared_containers))),
        ("memory_total", mib(Some(gpu.memory_total_bytes))),
        ("memory_reserved", mib(Some(gpu.memory_reserved_bytes))),
        ("memory_promised", mib(Some(gpu.memory_promised_bytes))),
        ("memory_used", mib(gpu.memory_used_bytes)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

/// Figures of a GPU have `@` and its index after their name where the container has several.
fn of_container(container: &ContainerView) -> Vec<NamedValue> {
    let is_one = container.shares.len() == 1;
    let mut values: Vec<NamedValue> = Vec::new();
    for share in &container.shares {
        let name = |name: &str| match is_one {
            true => name.to_owned(),
            false => format!("{name}@{}", share.gpu.given_index()),
        };
        let quota = mib(share.gpu.memory_limit_bytes);
        values.push((name("memory"), Some(quota.unwrap_or_else(|| "whole".to_owned()))));
        values.push((name("memory_used"), mib(share.memory_used_bytes)));
    }
    let high = u8::from(container.high_priority).to_string();
    values.push(("weight".to_owned(), Some(container.weight.to_string())));
    values.push(("high-priority".to_owned(), Some(high)));
    values.push(("state".to_owned(), Some(container.state.name().to_owned())));
    values.push(("enforced".to_owned(), Some(u8::from(container.enforced).to_string())));
    values
}
