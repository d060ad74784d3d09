//! containerd's own reading of its files: `containerd config dump`.

use std::path::Path;
use std::time::Duration;

use thiserror::Error;
use toml::{Table, Value};

use super::merged_config::{merge, section};
use super::release::{Release, plugins};
use super::runtimes::{self, has_systemd_cgroup, model, passes_ours, snapshotter, table_of};
use crate::engines::child_output::{output_of, version_of};
use crate::engines::runtime_name::NAME;

/// How long it may take; some hundredths of a second are usual.
const LIMIT: Duration = Duration::from_secs(30);

/// Most bytes of a dump; some thousands are usual.
const BYTES_MAX: u64 = 1 << 20;

#[derive(Debug, Error)]
pub enum DumpError {
    #[error("`{program} --config {file} config dump` says nothing: {why}")]
    NoOutput { program: String, file: String, why: String },
    #[error(
        "containerd makes something else of {file}: by `{program} config dump` {mismatch}; all files \
         are as they were"
    )]
    Mismatch { program: String, file: String, mismatch: String },
}

/// The release that the containerd at `program` reports.
#[must_use]
pub fn release(program: &Path) -> Option<Release> {
    Release::of(&version_of(program).ok()?)
}

/// Whether the containerd at `program` starts with its file at `main` and runs our runtime by
/// the path `runtime`; as its default one, if `default`.
///
/// # Errors
///
/// If it can't be run, or reports something else.
pub fn check(program: &Path, main: &Path, runtime: &Path, default: bool) -> Result<(), DumpError> {
    let file = main.display().to_string();
    let program_name = program.display().to_string();
    let no_output = |why: String| DumpError::NoOutput {
        program: program_name.clone(),
        file: file.clone(),
        why,
    };
    let words = ["--config", &file, "config", "dump"];
    let printed = output_of(program, &words, BYTES_MAX, LIMIT).map_err(no_output)?;
    let dumped: Table = String::from_utf8_lossy(&printed)
        .parse()
        .map_err(|error: toml::de::Error| no_output(error.message().to_owned()))?;
    match mismatch(&dumped, runtime, default) {
        None => Ok(()),
        Some(mismatch) => Err(DumpError::Mismatch { program: program_name, file, mismatch }),
    }
}

/// How containerd's reading, `dumped`, differs from what setup wrote; a sentence's end.
fn mismatch(dumped: &Table, program: &Path, default: bool) -> Option<String> {
    let sections = plugins().filter_map(|plugin| section(dumped, plugin));
    let Some(section) = sections.reduce(merge) else {
        return Some("it has no part for Kubernetes".to_owned());
    };
    let runtime = table_of(&section, "runtimes").and_then(|all| table_of(all, NAME));
    let Some(runtime) = runtime else { return Some("it has no runtime cgpu".to_owned()) };
    let runs = runtimes::program(runtime).unwrap_or("runc");
    if Path::new(runs) != program {
        return Some(format!("its runtime cgpu runs {runs}"));
    }
    if !passes_ours(runtime) {
        return Some("its runtime cgpu gets no annotations of pods".to_owned());
    }
    let model = model(&section);
    if !model.is_empty() && has_systemd_cgroup(&model) != has_systemd_cgroup(runtime) {
        return Some("its runtime cgpu has another SystemdCgroup than the others".to_owned());
    }
    if !model.is_empty() && snapshotter(&model) != snapshotter(runtime) {
        return Some("its runtime cgpu has another snapshotter than the others".to_owned());
    }
    let named = section.get("default_runtime_name").and_then(Value::as_str).unwrap_or_default();
    (default && named != NAME).then(|| format!("its default runtime is {named}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dump_is_compared_with_the_written_runtime() {
        let ours = Path::new("/usr/bin/cgpu-runtime");
        let dump = |default: &str, runtime: &str| -> Table {
            format!(
                "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\n\
                 default_runtime_name = '{default}'\n\
                 [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n\
                 runtime_type = 'io.containerd.runc.v2'\noptions = {{SystemdCgroup = true}}\n\
                 [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.cgpu]\n{runtime}"
            )
            .parse()
            .unwrap()
        };
        let fine = "pod_annotations = ['aliyun.com/*', 'cgpu/*']\n\
                    options = {BinaryName = '/usr/bin/cgpu-runtime', SystemdCgroup = true}\n";
        let difference_of =
            |dumped: &Table, default| mismatch(dumped, ours, default).unwrap_or_default();
        assert_eq!(difference_of(&dump("cgpu", fine), true), "");
        assert_eq!(difference_of(&dump("runc", fine), false), "");
        assert_eq!(difference_of(&dump("runc", fine), true), "its default runtime is runc");
        let twice = fine.replace("{Binary", "{binaryName = '/usr/bin/runc', Binary");
        assert_eq!(
            difference_of(&dump("runc", &twice), false),
            "its runtime cgpu runs /usr/bin/runc"
        );
        assert_eq!(
            difference_of(&dump("runc", "options = {}\n"), false),
            "its runtime cgpu runs runc"
        );
        let deaf = fine.replace("'aliyun.com/*', ", "");
        assert_eq!(
            difference_of(&dump("runc", &deaf), false),
            "its runtime cgpu gets no annotations of pods"
        );
        let other = fine.replace("Cgroup = true", "Cgroup = false");
        assert!(difference_of(&dump("runc", &other), false).contains("another SystemdCgroup"));
        let unpacked = fine.replace("pod_", "snapshotter = 'nydus'\npod_");
        let difference = difference_of(&dump("runc", &unpacked), false);
        assert_eq!(difference, "its runtime cgpu has another snapshotter than the others");
        assert_eq!(difference_of(&Table::new(), false), "it has no part for Kubernetes");
    }
}
