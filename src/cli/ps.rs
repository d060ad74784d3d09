//! `cgpu ps`: the registered containers.

use std::collections::HashMap;
use std::io::Write;

use anyhow::Result;
use serde::Serialize;

use super::Format;
use super::table::{aligned, or_dash, printable};
use crate::admission::{Condition, Host, UNSTARTED_S, deletion};
use crate::names;
use crate::plan::{Kind, Plan, PlannedGpu};
use crate::registry::{Key, Record};
use crate::units::bytes_to_mib;

/// A container as `--format json` prints it.
#[derive(Debug, Serialize)]
struct Container<'a> {
    id: &'a str,
    name: Option<String>,
    root: &'a str,
    backend: Kind,
    mode: &'static str,
    state: &'static str,
    pid: Option<i32>,
    gpus: Vec<UsedGpu<'a>>,
}

#[derive(Debug, Serialize)]
struct UsedGpu<'a> {
    #[serde(flatten)]
    gpu: &'a PlannedGpu,
    memory_used_bytes: Option<u64>,
}

/// Memory in use by short id and GPU index.
type Usage = HashMap<(String, u32), u64>;

/// Prints the containers that are registered and not gone; the one that `word` means, if given.
///
/// # Errors
///
/// Where the registry can't be read, or no container is meant, or more than one.
pub fn run(host: &Host, word: Option<&str>, format: Format, out: &mut dyn Write) -> Result<()> {
    let registry = host.look_at_registry()?;
    let mut records = registry.living()?;
    if let Some(word) = word {
        records = vec![names::chosen(word, records)?];
    }
    let usage = usage(host, &records);
    let conditions: Vec<_> = records.iter().map(|record| host.condition(record)).collect();
    let both = || records.iter().zip(&conditions);
    let containers: Vec<Container<'_>> =
        both().map(|(record, condition)| container(record, *condition, &usage)).collect();
    match format {
        Format::Json => {
            serde_json::to_writer_pretty(&mut *out, &containers)?;
            writeln!(out)?;
        }
        Format::Text => {
            out.write_all(table(&containers).as_bytes())?;
            for note in both().filter_map(|(record, condition)| note(&record.key, *condition)) {
                writeln!(out, "{note}")?;
            }
        }
    }
    Ok(out.flush()?)
}

/// What the backends know; one that can't tell leaves its containers unknown.
fn usage(host: &Host, records: &[Record]) -> Usage {
    let held = |kind: &Kind| records.iter().any(|record| record.plan.backend == *kind);
    let kinds = [Kind::Gate, Kind::Km, Kind::None].into_iter().filter(held);
    let lists = kinds.filter_map(|kind| host.isolation(kind).list().ok());
    lists
        .flatten()
        .filter_map(|found| Some(((found.short_id, found.gpu_index), found.memory_used_bytes?)))
        .collect()
}

/// What is to be done about a container that stands so.
fn note(key: &Key, condition: Condition) -> Option<String> {
    let id = printable(&key.id);
    match condition {
        Condition::Created { age_s } if age_s >= UNSTARTED_S => Some(format!(
            "{id}: created {} min ago and never started; if its engine has forgotten it: `{}`",
            age_s / 60,
            printable(&deletion(key)),
        )),
        Condition::Closed => Some(format!(
            "{id}: its monitor has ended, so its driver calls fail; remove it and create it again",
        )),
        _ => None,
    }
}

fn container<'a>(record: &'a Record, condition: Condition, usage: &Usage) -> Container<'a> {
    let used = |gpu: &PlannedGpu| usage.get(&(record.short_id.clone(), gpu.index)).copied();
    let gpus = record.plan.gpus.iter();
    Container {
        id: &record.key.id,
        name: names::of(record),
        root: &record.key.root,
        backend: record.plan.backend,
        mode: mode(&record.plan),
        state: condition.name(),
        pid: record.holder.process().map(|process| process.pid),
        gpus: gpus.map(|gpu| UsedGpu { gpu, memory_used_bytes: used(gpu) }).collect(),
    }
}

/// How a container has its GPUs: under a quota, as a whole, or as a part that nothing holds it to.
fn mode(plan: &Plan) -> &'static str {
    match plan.backend {
        _ if plan.unenforced => "unenforced",
        _ if plan.is_whole() => "whole",
        Kind::None => "unenforced",
        Kind::Gate | Kind::Km => "shared",
    }
}

const HEADER: [&str; 10] = [
    "CONTAINER",
    "NAME",
    "GPU",
    "USED (MiB)",
    "LIMIT (MiB)",
    "MODE",
    "STATE",
    "PID",
    "BACKEND",
    "ROOT",
];

/// Most characters of a name in the table.
const LONGEST_NAME: usize = 40;

/// A name that fits into the table, with nothing in it that could move a cursor. The end of one that
/// is too long tells more than its beginning: the container in a pod.
fn shown(name: &str) -> String {
    let safe = printable(name);
    match safe.chars().count().checked_sub(LONGEST_NAME) {
        None | Some(0) => safe,
        Some(more) => std::iter::once('…').chain(safe.chars().skip(more + 1)).collect(),
    }
}

fn table(containers: &[Container<'_>]) -> String {
    let mib = |bytes: Option<u64>, unknown: &str| match bytes {
        Some(bytes) => bytes_to_mib(bytes).to_string(),
        None => unknown.to_owned(),
    };
    let mut rows = vec![HEADER.map(str::to_owned)];
    for container in containers {
        let none = [None].into_iter().filter(|_: &Option<&UsedGpu<'_>>| container.gpus.is_empty());
        for used in container.gpus.iter().map(Some).chain(none) {
            let limit = used.map(|used| mib(used.gpu.memory_limit_bytes, "whole"));
            rows.push([
                printable(container.id.get(..12).unwrap_or(container.id)),
                or_dash(container.name.as_deref().map(shown).unwrap_or_default()),
                or_dash(used.map(|used| used.gpu.given_index()).unwrap_or_default()),
                mib(used.and_then(|used| used.memory_used_bytes), "-"),
                or_dash(limit.unwrap_or_default()),
                container.mode.to_owned(),
                container.state.to_owned(),
                or_dash(container.pid.map(|pid| pid.to_string()).unwrap_or_default()),
                container.backend.to_string(),
                printable(container.root),
            ]);
        }
    }
    aligned(&rows, &[3, 4, 7])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_in_the_table_is_short_and_moves_no_cursor() {
        assert_eq!(shown("default/web-0/main"), "default/web-0/main");
        assert_eq!(shown("a\n\u{1b}[2Jb\u{202e}"), "a\\n\\u{1b}[2Jb\\u{202e}");
        let long = shown(&format!("{}/main", "x".repeat(100_000)));
        assert_eq!(long.chars().count(), LONGEST_NAME);
        assert!(long.starts_with("…xxx") && long.ends_with("x/main"), "{long}");
    }

    #[test]
    fn a_note_says_what_to_do_about_a_container_and_others_have_none() {
        let key = Key { root: "/run/docker/runtime-runc/moby".into(), id: "3f2a".into() };
        let of = |condition| note(&key, condition);
        let created = of(Condition::Created { age_s: 759 }).unwrap();
        assert_eq!(
            created,
            "3f2a: created 12 min ago and never started; if its engine has forgotten it: \
             `cgpu-runtime --root /run/docker/runtime-runc/moby delete --force 3f2a`"
        );
        assert!(of(Condition::Closed).unwrap().ends_with("remove it and create it again"));
        for condition in [Condition::Created { age_s: 5 }, Condition::Active, Condition::Reserved] {
            assert_eq!(of(condition), None);
        }
    }
}
