//! Figures one by one, for programs: `--query-gpu`, `--query-container` and `-q`. Pure.
//!
//! Owns the fields' names, which are `nvidia-smi`'s where it has the figure, and how a value, a unit
//! and "unknown" are written.

use std::fmt::Write;

use cgpu_cli::commands::table::printable;
use cgpu_cli::view::{ContainerView, GpuView, ShareView, Snapshot};
use cgpu_core::units::bytes_to_mib;
use thiserror::Error;

/// What `nvidia-smi` writes for what isn't known.
const UNKNOWN: &str = "[N/A]";

/// Why a query can't be answered.
#[derive(Debug, Error, PartialEq, Eq)]
pub(crate) enum QueryError {
    /// There is no such field.
    #[error("there is no field {name}; `cgpu-smi {option}=help` lists them")]
    NoField {
        /// What was asked for.
        name: String,
        /// Where.
        option: &'static str,
    },
}

/// How values are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style {
    /// Whether a line of names comes first.
    pub(crate) header: bool,
    /// Whether values have their units.
    pub(crate) units: bool,
}

/// A figure of `T`.
#[derive(Debug)]
pub(crate) struct Field<T> {
    name: &'static str,
    unit: &'static str,
    meaning: &'static str,
    value: fn(&T) -> Option<String>,
}

/// A GPU, with the host that it is in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuOf<'a>(&'a Snapshot, &'a GpuView);

/// A container's part of a GPU; no part of one that has no GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartOf<'a>(&'a ContainerView, Option<&'a ShareView>);

fn mib(bytes: Option<u64>) -> Option<String> {
    bytes.map(|bytes| bytes_to_mib(bytes).to_string())
}

fn number(value: Option<impl ToString>) -> Option<String> {
    value.map(|value| value.to_string())
}

fn text(value: &str) -> Option<String> {
    (!value.is_empty()).then(|| printable(value))
}

macro_rules! fields {
    ($type:ty: $($name:literal [$unit:literal] $meaning:literal = $value:expr;)*) => {
        vec![$(Field::<$type> { name: $name, unit: $unit, meaning: $meaning, value: $value }),*]
    };
}

/// The figures of a GPU.
pub(crate) fn gpu_fields<'a>() -> Vec<Field<GpuOf<'a>>> {
    fields! { GpuOf<'a>:
    "index" [""] "the driver's index" = |of| number(Some(of.1.index));
    "uuid" [""] "the GPU's UUID" = |of| text(&of.1.uuid);
    "name" [""] "the product's name" = |of| text(&of.1.name);
    "pci.bus_id" [""] "PCI address" = |of| text(&of.1.bus_id);
    "driver_version" [""] "the driver's version" = |of| text(of.0.driver_version.as_deref()?);
    "count" [""] "GPUs of this host" = |of| number(Some(of.0.gpus.len()));
    "lost" [""] "whether the driver has lost it" = |of| number(Some(of.1.lost));
    "memory.total" ["MiB"] "its memory" = |of| mib(Some(of.1.memory_total_bytes));
    "memory.used" ["MiB"] "memory in use" = |of| mib(of.1.memory_used_bytes);
    "memory.free" ["MiB"] "memory that is not in use" =
        |of| mib(of.1.memory_used_bytes.map(|used| of.1.memory_total_bytes.saturating_sub(used)));
    "memory.promised" ["MiB"] "the sum of the quotas on it" =
        |of| mib(Some(of.1.memory_promised_bytes));
    "utilization.gpu" ["%"] "time in which something ran on it" =
        |of| number(of.1.utilization_percent);
    "temperature.gpu" ["C"] "temperature" = |of| number(of.1.temperature_celsius);
    "power.draw" ["W"] "power that it takes" =
        |of| of.1.power_watts.map(|watts| format!("{watts:.2}"));
    "power.limit" ["W"] "the most power that it may take" =
        |of| of.1.power_limit_watts.map(|watts| format!("{watts:.2}"));
    "policy" [""] "how computing time is shared, 0 to 5" = |of| number(of.1.policy);
    "max_inst" [""] "the most containers with a quota" = |of| number(of.1.max_inst);
    "prio_ratio" ["%"] "what containers of high priority may take" = |of| number(of.1.prio_ratio);
    "free_weight" [""] "weight that no container has" = |of| number(of.1.free_weight);
    "containers.shared" [""] "containers with a quota on it" =
        |of| number(Some(of.1.shared_containers));
    "containers.other" [""] "containers without one" = |of| number(Some(of.1.other_containers));
    }
}

/// The figures of a container on one of its GPUs.
pub(crate) fn container_fields<'a>() -> Vec<Field<PartOf<'a>>> {
    fields! { PartOf<'a>:
    "id" [""] "the container's id" = |of| text(&of.0.id);
    "short_id" [""] "12 characters of that, unique on this host" = |of| text(&of.0.short_id);
    "name" [""] "what its engine calls it" = |of| text(of.0.name.as_deref()?);
    "root" [""] "its runtime's root" = |of| text(&of.0.root);
    "gpu.index" [""] "index of the GPU, or of the GPU and the MIG device" =
        |of| Some(of.1?.gpu.given_index());
    "gpu.uuid" [""] "UUID of that" = |of| text(of.1?.gpu.given_uuid());
    "memory.quota" ["MiB"] "the most memory that it may use; unknown where it has none" =
        |of| mib(of.1?.gpu.memory_limit_bytes);
    "memory.used" ["MiB"] "memory that it uses" = |of| mib(of.1?.memory_used_bytes);
    "memory.free" ["MiB"] "what is left of its quota" = |of| {
        let (share, used) = (of.1?, of.1?.memory_used_bytes?);
        mib(Some(share.gpu.memory_limit_bytes?.saturating_sub(used)))
    };
    "utilization.gpu" ["%"] "time in which something of it ran on the GPU" =
        |of| number(of.1?.utilization_percent);
    "share.gpu" ["%"] "the part of the GPU's time that is its own while all have work" =
        |of| of.1?.compute_per_cent().map(|share| share.trim_end_matches('%').to_owned());
    "share.held" ["%"] "the part of the GPU's time that it had lately" =
        |of| of.1?.held_per_cent().map(|held| held.trim_end_matches('%').to_owned());
    "weight" [""] "compute weight" = |of| number(Some(of.0.weight));
    "high_priority" [""] "whether it has high priority" = |of| number(Some(of.0.high_priority));
    "processes" [""] "processes that use the driver" = |of| number(of.0.process_count);
    "mode" [""] "shared, whole or unenforced" = |of| text(of.0.mode.name());
    "state" [""] "reserved, created, active, silent or closed" = |of| text(of.0.state.name());
    "enforced" [""] "whether its quota holds now" = |of| number(Some(of.0.enforced));
    "backend" [""] "who holds it to its quota" = |of| number(Some(of.0.backend));
    "pid" [""] "its first process" = |of| number(of.0.pid);
    "age" ["s"] "time since that began" = |of| number(of.0.age_s);
    "calls.executed" [""] "driver calls that its monitor made for it" =
        |of| number(of.0.calls.map(|calls| calls.executed));
    "calls.over_quota" [""] "allocations refused for its quota" =
        |of| number(of.0.calls.map(|calls| calls.over_quota));
    "calls.refused" [""] "calls refused for another reason" =
        |of| number(of.0.calls.map(|calls| calls.refused));
    "killed" [""] "processes killed for memory taken past the monitor" =
        |of| number(of.0.calls.map(|calls| calls.killed));
    }
}

/// The GPUs of `snapshot` with these fields, a line each.
///
/// # Errors
///
/// Where there is no such field.
pub(crate) fn gpus(
    snapshot: &Snapshot,
    names: &[String],
    style: Style,
) -> Result<String, QueryError> {
    let rows = snapshot.gpus.iter().map(|gpu| GpuOf(snapshot, gpu));
    values(&gpu_fields(), "--query-gpu", names, rows, style)
}

/// The containers of `snapshot` with these fields, a line for each of their GPUs.
///
/// # Errors
///
/// Where there is no such field.
pub(crate) fn containers(
    snapshot: &Snapshot,
    names: &[String],
    style: Style,
) -> Result<String, QueryError> {
    let rows = snapshot.containers.iter().flat_map(parts);
    values(&container_fields(), "--query-container", names, rows, style)
}

fn parts(container: &ContainerView) -> Vec<PartOf<'_>> {
    if container.shares.is_empty() {
        return vec![PartOf(container, None)];
    }
    container.shares.iter().map(|share| PartOf(container, Some(share))).collect()
}

fn values<T>(
    fields: &[Field<T>],
    option: &'static str,
    names: &[String],
    rows: impl Iterator<Item = T>,
    style: Style,
) -> Result<String, QueryError> {
    let chosen = names.iter().map(|name| {
        let name = name.trim();
        let found = fields.iter().find(|field| field.name == name);
        found.ok_or_else(|| QueryError::NoField { name: printable(name), option })
    });
    let chosen: Vec<&Field<T>> = chosen.collect::<Result<_, _>>()?;
    let mut lines = String::new();
    if style.header {
        let titles = chosen.iter().map(|field| match field.unit {
            "" => field.name.to_owned(),
            unit => format!("{} [{unit}]", field.name),
        });
        line(&mut lines, titles);
    }
    for row in rows {
        line(&mut lines, chosen.iter().map(|field| field.written(&row, style.units)));
    }
    Ok(lines)
}

/// Adds a line of comma-separated values, as `nvidia-smi` writes it; one with a comma or a quote in
/// it is quoted.
fn line(lines: &mut String, values: impl Iterator<Item = String>) {
    let quoted = values.map(|value| match value.contains([',', '"']) {
        true => format!("\"{}\"", value.replace('"', "\"\"")),
        false => value,
    });
    lines.push_str(&quoted.collect::<Vec<_>>().join(", "));
    lines.push('\n');
}

impl<T> Field<T> {
    fn written(&self, of: &T, units: bool) -> String {
        match (self.value)(of) {
            None => UNKNOWN.to_owned(),
            Some(value) if units && !self.unit.is_empty() => format!("{value} {}", self.unit),
            Some(value) => value,
        }
    }
}

/// The fields and their meanings, a line each.
pub(crate) fn help<T>(fields: &[Field<T>]) -> String {
    fields.iter().fold(String::new(), |mut lines, field| {
        let unit = if field.unit.is_empty() { String::new() } else { format!(" [{}]", field.unit) };
        let _ = writeln!(lines, "{:<18} {}{unit}", field.name, field.meaning);
        lines
    })
}

/// All that is known, a line for each figure.
pub(crate) fn all(snapshot: &Snapshot, time: &str) -> String {
    let mut lines = String::new();
    let mut figure = |depth: usize, name: &str, value: &str| {
        let indent = " ".repeat(4 * depth);
        let name = format!("{indent}{name}");
        let _ = if value.is_empty() {
            writeln!(lines, "{name}")
        } else {
            writeln!(lines, "{name:<42}: {value}")
        };
    };
    figure(0, "timestamp", time);
    figure(0, "host", &printable(&snapshot.hostname));
    figure(0, "cgpu version", &printable(&snapshot.cgpu_version));
    figure(0, "driver version", snapshot.driver_version.as_deref().unwrap_or(UNKNOWN));
    figure(0, "GPUs", &snapshot.gpus.len().to_string());
    figure(0, "containers", &snapshot.containers.len().to_string());
    for gpu in &snapshot.gpus {
        figure(0, &format!("GPU {}", gpu.index), "");
        for field in gpu_fields() {
            figure(1, field.name, &field.written(&GpuOf(snapshot, gpu), true));
        }
    }
    let fields = container_fields();
    for container in &snapshot.containers {
        figure(0, &format!("container {}", printable(&container.short_id)), "");
        for (at, part) in parts(container).into_iter().enumerate() {
            let is_of_gpu = |field: &&Field<_>| {
                ["gpu.", "memory.", "utilization."]
                    .iter()
                    .any(|start| field.name.starts_with(start))
            };
            if at == 0 {
                for field in fields.iter().filter(|field| !is_of_gpu(field)) {
                    figure(1, field.name, &field.written(&part, true));
                }
            }
            for field in fields.iter().filter(is_of_gpu) {
                figure(1, field.name, &field.written(&part, true));
            }
        }
        for process in &container.processes {
            figure(1, &format!("process {}", process.pid), "");
            let name = process.name.as_deref().map_or(UNKNOWN.to_owned(), printable);
            figure(2, "name", &name);
            for (gpu, bytes) in &process.memory {
                figure(
                    2,
                    &format!("memory.used on GPU {gpu}"),
                    &format!("{} MiB", bytes_to_mib(*bytes)),
                );
            }
        }
    }
    for gap in &snapshot.gaps {
        figure(0, "unknown", &printable(gap));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sheet::fixture;

    const ALL: Style = Style { header: true, units: true };

    fn names(names: &str) -> Vec<String> {
        names.split(',').map(str::to_owned).collect()
    }

    #[test]
    fn query_output_is_written_like_nvidia_smis() {
        let host = fixture::host(2, 1);
        let asked = names("index,name, memory.total,power.draw");
        assert_eq!(
            gpus(&host, &asked, ALL).unwrap(),
            "index, name, memory.total [MiB], power.draw [W]\n\
             0, Tesla V100, 16384 MiB, 211.60 W\n1, Tesla V100, 16384 MiB, 211.60 W\n"
        );
        let bare = Style { header: false, units: false };
        let asked = names("name,gpu.index,memory.used,memory.quota,memory.free,age");
        assert_eq!(
            containers(&host, &asked, bare).unwrap(),
            "default/pod-0-0/main, 0, 1024, 2048, 1024, 3700\n\
             default/pod-1-0/main, 1, 1024, 2048, 1024, 3700\n"
        );
    }

    /// A value that is not known is not printed as zero, and hostile text is escaped.
    #[test]
    fn unknown_values_are_not_zero_hostile_text_escaped() {
        let mut host = fixture::host(1, 1);
        host.gpus[0].utilization_percent = None;
        host.containers[0].name = Some("a,\"b\"\u{1b}[2J\n".into());
        let bare = Style { header: false, units: true };
        assert_eq!(gpus(&host, &names("utilization.gpu"), bare).unwrap(), "[N/A]\n");
        assert_eq!(
            containers(&host, &names("name"), bare).unwrap(),
            "\"a,\"\"b\"\"\\u{1b}[2J\\n\"\n"
        );
        assert!(all(&host, "now").lines().all(|line| !line.chars().any(char::is_control)));
    }

    #[test]
    fn container_without_a_gpu_still_has_a_line() {
        let mut host = fixture::host(1, 1);
        host.containers[0].shares.clear();
        let bare = Style { header: false, units: true };
        assert_eq!(containers(&host, &names("pid,gpu.index"), bare).unwrap(), "4000, [N/A]\n");
    }

    #[test]
    fn invalid_field_is_refused_with_the_list_command() {
        let error = gpus(&fixture::host(1, 0), &names("index,memory"), ALL).unwrap_err();
        assert_eq!(
            error.to_string(),
            "there is no field memory; `cgpu-smi --query-gpu=help` lists them"
        );
        for field in container_fields().iter().map(|field| field.name) {
            assert!(help(&container_fields()).contains(field));
        }
    }
}
