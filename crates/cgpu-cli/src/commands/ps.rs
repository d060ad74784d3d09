//! `cgpu ps`: the registered containers.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;

use super::Format;
use super::table::{aligned, or_dash, printable};
use crate::view::{ContainerView, Mode, Processes, Program, ShareView, State, collect_records};
use cgpu::admission::{UNSTARTED_S, deletion};
use cgpu::container_names;
use cgpu::host::Host;
use cgpu_core::plan::{Caveats, Kind, PlannedGpu};
use cgpu_core::units::bytes_to_mib;
use cgpu_host::registry::Key;

/// A container as `--format json` prints it.
#[derive(Debug, Serialize)]
struct Container<'a> {
    id: &'a str,
    name: Option<&'a str>,
    root: &'a str,
    backend: Kind,
    mode: Mode,
    state: State,
    pid: Option<i32>,
    gpus: Vec<UsedGpu<'a>>,
    #[serde(skip_serializing_if = "<[Program]>::is_empty")]
    leaked_to: &'a [Program],
    #[serde(flatten)]
    caveats: &'a Caveats,
}

#[derive(Debug, Serialize)]
struct UsedGpu<'a> {
    #[serde(flatten)]
    gpu: &'a PlannedGpu,
    memory_used_bytes: Option<u64>,
    memory_enforced_bytes: Option<u64>,
    compute_share: Option<f64>,
    compute_held: Option<f64>,
}

/// Prints the containers that are registered and not gone; the one that `word` means, if given.
///
/// # Errors
///
/// Where the registry can't be read, or no container is meant, or more than one.
pub fn run(host: &Host, word: Option<&str>, format: Format, out: &mut dyn Write) -> Result<()> {
    let (mut records, unreadable) = host.check_registry()?.check_each()?;
    if let Some(word) = word {
        records = vec![container_names::chosen(word, records)?];
    }
    let snapshot = collect_records(host, records, &[], Processes::Numbered, None)?;
    match format {
        Format::Json => {
            let containers: Vec<_> = snapshot.containers.iter().map(container).collect();
            serde_json::to_writer_pretty(&mut *out, &containers)?;
            writeln!(out)?;
        }
        Format::Text => {
            out.write_all(table(&snapshot.containers).as_bytes())?;
            for note in snapshot.containers.iter().flat_map(notes) {
                writeln!(out, "{note}")?;
            }
        }
    }
    out.flush()?;
    // The rest is shown, and the error says that it isn't all.
    unreadable.into_iter().next().map_or(Ok(()), |error| Err(error.into()))
}

/// What is to be known of a container, and what is to be done about it.
fn notes(container: &ContainerView) -> Vec<String> {
    let id = printable(&container.id);
    let Caveats { unenforced_by, reaches_past, .. } = &container.caveats;
    let unenforced = unenforced_by.as_ref().map(|setting| match container.mode {
        Mode::Shared => format!("{id}: has GPUs without a quota too: {}", printable(setting)),
        Mode::Whole | Mode::Unenforced => {
            format!("{id}: no quota is enforced on it: {}", printable(setting))
        }
    });
    let reaches = (!reaches_past.is_empty()).then(|| {
        let ways = printable(&reaches_past.join(", "));
        format!("{id}: can reach past the enforcement of quotas: {ways}")
    });
    let changed = container.shares.iter().filter_map(|share| changed(&id, share));
    note(container).into_iter().chain(unenforced).chain(reaches).chain(changed).collect()
}

/// That a monitor enforces another quota than is reserved: root has changed it, and not by `cgpu set`.
fn changed(id: &str, share: &ShareView) -> Option<String> {
    let reserved = share.gpu.memory_limit_bytes?;
    let enforced = share.memory_enforced_bytes.filter(|enforced| *enforced != reserved)?;
    Some(format!(
        "{id}: its monitor enforces {} MiB on GPU {}, and {} MiB are reserved: the monitor's quota \
         was changed without the registry; see `cgpu events {id}`, and set it by `cgpu set`",
        bytes_to_mib(enforced),
        share.gpu.given_index(),
        bytes_to_mib(reserved),
    ))
}

/// What is to be done about a container in its state.
fn note(container: &ContainerView) -> Option<String> {
    let id = printable(&container.id);
    match container.state {
        State::Created => {
            let age_s = container.age_s.filter(|age_s| *age_s >= UNSTARTED_S)?;
            let key = Key { root: container.root.clone(), id: container.id.clone() };
            Some(format!(
                "{id}: created {} min ago and never started; if its engine has forgotten it: `{}`",
                age_s / 60,
                printable(&deletion(&key)),
            ))
        }
        State::Closed => Some(format!(
            "{id}: its monitor has ended, so its driver calls fail; remove it and create it again",
        )),
        State::Silent => Some(format!(
            "{id}: its monitor does not answer, so its figures are unknown; look again, and see \
             `cgpu doctor`",
        )),
        State::Leaked => {
            let program = |of: &Program| format!("{} (process {})", printable(&of.name), of.pid);
            let programs: Vec<String> = container.leaked_to.iter().map(program).collect();
            let programs = match programs.is_empty() {
                true => "a program of the host".to_owned(),
                false => programs.join(", "),
            };
            Some(format!(
                "{id}: it has ended, and its quota stays reserved: {programs} has a descriptor of the \
                 driver's that was opened in it; restart that program",
            ))
        }
        State::Reserved | State::Active => None,
    }
}

fn container(usage: &ContainerView) -> Container<'_> {
    fn used(share: &ShareView) -> UsedGpu<'_> {
        UsedGpu {
            gpu: &share.gpu,
            memory_used_bytes: share.memory_used_bytes,
            memory_enforced_bytes: share.memory_enforced_bytes,
            compute_share: share.compute_share,
            compute_held: share.compute_held,
        }
    }
    Container {
        id: &usage.id,
        name: usage.name.as_deref(),
        root: &usage.root,
        backend: usage.backend,
        mode: usage.mode,
        state: usage.state,
        pid: usage.pid,
        gpus: usage.shares.iter().map(used).collect(),
        leaked_to: &usage.leaked_to,
        caveats: &usage.caveats,
    }
}

const HEADER: [&str; 12] = [
    "CONTAINER",
    "NAME",
    "GPU",
    "USED (MiB)",
    "LIMIT (MiB)",
    "SHARE",
    "HELD",
    "MODE",
    "STATE",
    "PID",
    "BACKEND",
    "ROOT",
];

/// Most characters of a name in the table.
const LONGEST_NAME: usize = 40;

/// A name that fits into the table, with nothing in it that could move a cursor. The end of one that
/// is too long says more than its beginning: the container in a pod.
fn shown(name: &str) -> String {
    let safe = printable(name);
    match safe.chars().count().checked_sub(LONGEST_NAME) {
        None | Some(0) => safe,
        Some(more) => std::iter::once('…').chain(safe.chars().skip(more + 1)).collect(),
    }
}

fn table(containers: &[ContainerView]) -> String {
    let mib = |bytes: Option<u64>, unknown: &str| match bytes {
        Some(bytes) => bytes_to_mib(bytes).to_string(),
        None => unknown.to_owned(),
    };
    let mut rows = vec![HEADER.map(str::to_owned)];
    for container in containers {
        let none = [None].into_iter().filter(|_| container.shares.is_empty());
        for share in container.shares.iter().map(Some).chain(none) {
            let limit = share.map(|share| mib(share.limit_bytes(), "whole"));
            rows.push([
                printable(container.id.get(..12).unwrap_or(&container.id)),
                or_dash(container.name.as_deref().map(shown).unwrap_or_default()),
                or_dash(share.map(|share| share.gpu.given_index()).unwrap_or_default()),
                mib(share.and_then(|share| share.memory_used_bytes), "-"),
                or_dash(limit.unwrap_or_default()),
                or_dash(share.and_then(ShareView::compute_per_cent).unwrap_or_default()),
                or_dash(share.and_then(ShareView::held_per_cent).unwrap_or_default()),
                container.mode.name().to_owned(),
                container.state.name().to_owned(),
                or_dash(container.pid.map(|pid| pid.to_string()).unwrap_or_default()),
                container.backend.to_string(),
                printable(&container.root),
            ]);
        }
    }
    aligned(&rows, &[3, 4, 5, 6, 9])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A container's name in the table is short and moves no cursor.
    #[test]
    fn container_name_is_shortened_and_escapes_control_characters() {
        assert_eq!(shown("default/web-0/main"), "default/web-0/main");
        assert_eq!(shown("a\n\u{1b}[2Jb\u{202e}"), "a\\n\\u{1b}[2Jb\\u{202e}");
        let long = shown(&format!("{}/main", "x".repeat(100_000)));
        assert_eq!(long.chars().count(), LONGEST_NAME);
        assert!(long.starts_with("…xxx") && long.ends_with("x/main"), "{long}");
    }

    fn usage(state: State, age_s: u64) -> ContainerView {
        ContainerView {
            id: "3f2a".into(),
            short_id: "3f2a________".into(),
            name: None,
            root: "/run/docker/runtime-runc/moby".into(),
            backend: Kind::Gate,
            mode: Mode::Shared,
            state,
            enforced: true,
            pid: None,
            age_s: Some(age_s),
            weight: 1,
            high_priority: false,
            shares: Vec::new(),
            processes: Vec::new(),
            process_count: None,
            calls: None,
            durations: None,
            monitor_updates: None,
            leaked_to: Vec::new(),
            caveats: Caveats::default(),
        }
    }

    /// A note says what to do about a container in trouble, and other containers have no note.
    #[test]
    fn notes_give_remedies_for_containers_in_trouble_alone() {
        let of = |state, age_s| note(&usage(state, age_s));
        let created = of(State::Created, 759).unwrap();
        assert_eq!(
            created,
            "3f2a: created 12 min ago and never started; if its engine has forgotten it: \
             `cgpu-runtime --root /run/docker/runtime-runc/moby delete --force 3f2a`"
        );
        assert!(of(State::Closed, 5).unwrap().ends_with("remove it and create it again"));
        assert!(of(State::Silent, 5).unwrap().contains("does not answer"));
        for (state, age_s) in [(State::Created, 5), (State::Active, 759), (State::Reserved, 759)] {
            assert_eq!(of(state, age_s), None);
        }
    }
}
