//! Facts of the engines, of hook files and of NVIDIA's toolkit: which are there, and
//! whether they know of us.
//!
//! Where their configurations are, and what these say, is known by `crate::engines`. Must
//! not judge, nor run any of them.

use std::path::{Path, PathBuf};

use super::facts::{Engine, EngineFile, EngineKind, Handler, Hook, HookFile, Observed, Toolkit};
use crate::engines::containerd::{
    File, Reading, Release, config_dump, imports, merged_config, runtimes,
};
use crate::engines::host_tree::Tree;
use crate::engines::{
    NamedRuntime, crio, distributions, docker, hooks, installation, podman, runtime_below,
    toml_values,
};

/// NVIDIA's programs for containers.
const TOOLKIT: [&str; 4] =
    ["nvidia-ctk", "nvidia-container-runtime", "nvidia-container-cli", "nvidia-cdi-hook"];

/// Where CDI specifications are; `/var/run` is mostly a link to `/run`.
const CDI: [&str; 3] = ["/etc/cdi", "/run/cdi", "/var/run/cdi"];

/// The engines, those that aren't there too.
pub(super) fn inspect(tree: &Tree) -> Vec<Engine> {
    EngineKind::ALL.map(|kind| engine(tree, kind)).into()
}

fn engine(tree: &Tree, kind: EngineKind) -> Engine {
    let containerd = kind.installation().containerd.and_then(|name| tree.program(name));
    let release =
        containerd.filter(|_| tree.is_own()).and_then(|program| config_dump::release(&program));
    let paths = installation::files(tree, kind, release, None);
    let cri_disabled_by = match kind {
        EngineKind::Containerd => imports::cri_disabled_by(tree, &paths),
        _ => None,
    };
    let texts: Vec<(PathBuf, Result<String, String>)> = paths
        .into_iter()
        .filter_map(|path| match tree.read(&path) {
            Observed::Absent => None,
            Observed::Unreadable(why) => Some((path, Err(why))),
            Observed::Present(text) => Some((path, Ok(distributions::with_values(kind, &text)))),
        })
        .collect();
    let (named, gives_cdi_devices) = match kind {
        EngineKind::Docker => (each(&texts, docker::runtimes), None),
        EngineKind::Crio => (each(&texts, crio::runtimes), None),
        EngineKind::Podman => (each(&texts, podman::runtimes), None),
        _ => containerds(&texts, release),
    };
    let handler = |named: NamedRuntime| Handler {
        executable: is_there(tree, &named.program),
        lower: runtime_below::below(tree, &named.program),
        name: named.name,
        program: named.program,
        flaw: named.flaw,
    };
    let files = texts.into_iter().zip(named).map(|((path, _), named)| EngineFile {
        path,
        handlers: named.map(|named| named.into_iter().map(handler).collect()),
    });
    Engine {
        kind,
        program: kind.installation().programs.iter().find_map(|name| tree.program(name)),
        files: files.collect(),
        cri_disabled_by,
        gives_cdi_devices,
    }
}

type Texts = [(PathBuf, Result<String, String>)];

/// Our runtimes in each file; why it can't be read.
type RuntimesOfFiles = Vec<Result<Vec<NamedRuntime>, String>>;

fn each(
    texts: &Texts,
    reader: impl Fn(&str) -> Result<Vec<NamedRuntime>, String>,
) -> RuntimesOfFiles {
    texts
        .iter()
        .map(|(_, text)| text.as_ref().map_err(String::clone).and_then(|text| reader(text)))
        .collect()
}

/// What containerd's files say, which count together, and whether it gives devices by CDI.
fn containerds(texts: &Texts, release: Option<Release>) -> (RuntimesOfFiles, Option<bool>) {
    let tables: Vec<Result<toml::Table, String>> = texts
        .iter()
        .map(|(_, text)| {
            text.as_ref().map_err(String::clone).and_then(|text| toml_values::parse(text))
        })
        .collect();
    let files: Vec<File<'_>> = tables.iter().flatten().map(File::of).collect();
    let declared: Vec<Option<i64>> = files.iter().map(|file| file.version).collect();
    let reading = Reading::of(release, &declared);
    let gives_cdi_devices = merged_config::gives_cdi_devices(&files, reading, release);
    let mut named = runtimes::runtimes(&files, reading).into_iter();
    let of = |table: &Result<toml::Table, String>| match table {
        Ok(_) => Ok(named.next().unwrap_or_default()),
        Err(why) => Err(why.clone()),
    };
    (tables.iter().map(of).collect(), gives_cdi_devices)
}

/// Whether the program of an engine's runtime can be run: by its path, or by its name.
fn is_there(tree: &Tree, program: &Path) -> bool {
    match program.is_absolute() {
        true => tree.is_executable(program),
        false => tree.program(&program.to_string_lossy()).is_some(),
    }
}

/// The hook files that name us.
pub(super) fn hooks(tree: &Tree) -> Vec<HookFile> {
    let paths = hooks::DIRECTORIES.iter().flat_map(|directory| tree.list(directory));
    let paths = paths.filter(|path| path.extension().is_some_and(|end| end == "json"));
    let files = paths.take(installation::FILES_MAX).filter_map(|path| {
        let hook = match tree.read(&path) {
            Observed::Absent => return None,
            Observed::Unreadable(why) => Err(why),
            Observed::Present(text) => hooks::hook(&text).transpose()?,
        };
        let hook = hook.map(|(program, stages)| Hook {
            executable: is_there(tree, &program),
            stages,
            program,
        });
        Some(HookFile { path, hook })
    });
    files.collect()
}

/// What there is of NVIDIA's toolkit.
pub(super) fn toolkit(tree: &Tree) -> Toolkit {
    let mut seen = Vec::new();
    let mut cdi = Vec::new();
    for directory in CDI {
        let Ok(real) = tree.at(directory).canonicalize() else { continue };
        if seen.contains(&real) {
            continue;
        }
        seen.push(real);
        let is_spec = |path: &PathBuf| {
            path.extension().is_some_and(|end| ["yaml", "yml", "json"].iter().any(|e| end == *e))
        };
        cdi.extend(tree.list(directory).into_iter().filter(is_spec));
    }
    Toolkit { programs: TOOLKIT.iter().filter_map(|name| tree.program(name)).collect(), cdi }
}
