//! What containerd itself makes of its files: `containerd config dump`.

use std::path::Path;
use std::time::Duration;

use thiserror::Error;
use toml::{Table, Value};

use super::merged_config::{merge, section};
use super::release::{Release, plugins};
use super::runtimes::{self, has_systemd_cgroup, model, passes_ours, snapshotter, table_of};
use crate::engines::child_output::{said, version_of};
use crate::engines::runtime_name::NAME;

/// How long it may take; some hundredths of a second are usual.
const LIMIT: Duration = Duration::from_secs(30);

/// Most bytes of a dump; some thousands are usual.
const BYTES_MAX: u64 = 1 << 20;

/// Why a containerd's word isn't known.
#[derive(Debug, Error)]
pub enum DumpError {
    /// It can't be asked.
    #[error("`{program} --config {file} config dump` says nothing: {why}")]
    Silent {
        /// The program.
        program: String,
        /// Its main file.
        file: String,
        /// Why.
        why: String,
    },
    /// It makes something else of the files.
    #[error(
        "containerd makes something else of {file}: by `{program} config dump` {amiss}; all files \
         are as they were"
    )]
    Amiss {
        /// The program.
        program: String,
        /// Its main file.
        file: String,
        /// What is wrong: the rest of a sentence.
        amiss: String,
    },
}

/// The release of the containerd at `program`, by its own word.
#[must_use]
pub fn release(program: &Path) -> Option<Release> {
    Release::of(&version_of(program).ok()?)
}

/// Whether the containerd at `program` starts with its file at `main` and runs our runtime by
/// the path `runtime`; as its default one, where that is asked for.
///
/// # Errors
///
/// Where it can't be asked, or says something else.
pub fn check(program: &Path, main: &Path, runtime: &Path, default: bool) -> Result<(), DumpError> {
    let file = main.display().to_string();
    let program_name = program.display().to_string();
    let silent =
        |why: String| DumpError::Silent { program: program_name.clone(), file: file.clone(), why };
    let words = ["--config", &file, "config", "dump"];
    let printed = said(program, &words, BYTES_MAX, LIMIT).map_err(silent)?;
    let dumped: Table = String::from_utf8_lossy(&printed)
        .parse()
        .map_err(|error: toml::de::Error| silent(error.message().to_owned()))?;
    match amiss(&dumped, runtime, default) {
        None => Ok(()),
        Some(amiss) => Err(DumpError::Amiss { program: program_name, file, amiss }),
    }
}

/// What is wrong between what was to be written and what containerd makes of its files, which
/// `dumped` says; a sentence's end.
fn amiss(dumped: &Table, program: &Path, default: bool) -> Option<String> {
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
    fn a_dump_is_held_against_what_was_to_be_written() {
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
        let said = |dumped: &Table, default| amiss(dumped, ours, default).unwrap_or_default();
        assert_eq!(said(&dump("cgpu", fine), true), "");
        assert_eq!(said(&dump("runc", fine), false), "");
        assert_eq!(said(&dump("runc", fine), true), "its default runtime is runc");
        let twice = fine.replace("{Binary", "{binaryName = '/usr/bin/runc', Binary");
        assert_eq!(said(&dump("runc", &twice), false), "its runtime cgpu runs /usr/bin/runc");
        assert_eq!(said(&dump("runc", "options = {}\n"), false), "its runtime cgpu runs runc");
        let deaf = fine.replace("'aliyun.com/*', ", "");
        assert_eq!(
            said(&dump("runc", &deaf), false),
            "its runtime cgpu gets no annotations of pods"
        );
        let other = fine.replace("Cgroup = true", "Cgroup = false");
        assert!(said(&dump("runc", &other), false).contains("another SystemdCgroup"));
        let unpacked = fine.replace("pod_", "snapshotter = 'nydus'\npod_");
        let said_of_it = said(&dump("runc", &unpacked), false);
        assert_eq!(said_of_it, "its runtime cgpu has another snapshotter than the others");
        assert_eq!(said(&Table::new(), false), "it has no part for Kubernetes");
    }
}
