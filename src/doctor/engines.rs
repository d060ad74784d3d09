//! Facts of the engines, of hook files and of NVIDIA's toolkit: which are there, and
//! whether they know of us.
//!
//! Where their configurations are, and what these say, is known by `crate::engines`. Must
//! not judge, nor run any of them.

use std::path::{Path, PathBuf};

use super::facts::{Engine, EngineFile, EngineKind, Handler, Hook, HookFile, Seen, Toolkit};
use crate::engines::dialect::{self, Named};
use crate::engines::files::Tree;
use crate::engines::places;

/// NVIDIA's programs for containers.
const TOOLKIT: [&str; 4] =
    ["nvidia-ctk", "nvidia-container-runtime", "nvidia-container-cli", "nvidia-cdi-hook"];

/// Where CDI specifications are; `/var/run` is mostly a link to `/run`.
const CDI: [&str; 3] = ["/etc/cdi", "/run/cdi", "/var/run/cdi"];

/// The engines, those that aren't there too.
pub(super) fn look(tree: &Tree) -> Vec<Engine> {
    let kinds = [EngineKind::Docker, EngineKind::Containerd, EngineKind::Crio, EngineKind::Podman];
    kinds.map(|kind| engine(tree, kind)).into()
}

fn engine(tree: &Tree, kind: EngineKind) -> Engine {
    let inherited = places::containerd_version(tree);
    let paths = places::files(tree, kind);
    let cri_disabled_by = match kind {
        EngineKind::Containerd => places::cri_disabled_by(tree, &paths),
        _ => None,
    };
    let files = paths.into_iter().map(|path| (tree.read(&path), path));
    let files: Vec<(Seen<String>, PathBuf)> = files.collect();
    let texts = files.iter().filter_map(|(seen, _)| match seen {
        Seen::Found(text) => {
            Some((dialect::said_version_of(text).unwrap_or(inherited), text.as_str()))
        }
        _ => None,
    });
    let model = match kind {
        EngineKind::Containerd => dialect::model(&texts.collect::<Vec<_>>()),
        _ => toml::Table::new(),
    };
    let dialect = |text: &str| match kind {
        EngineKind::Docker => dialect::docker(text),
        EngineKind::Containerd => dialect::containerd(text, inherited, &model),
        EngineKind::Crio => dialect::crio(text),
        EngineKind::Podman => dialect::podman(text),
    };
    Engine {
        kind,
        program: places::programs(kind).iter().find_map(|name| tree.program(name)),
        files: files.iter().filter_map(|(seen, path)| file(tree, dialect, seen, path)).collect(),
        cri_disabled_by,
    }
}

fn file(
    tree: &Tree,
    dialect: impl Fn(&str) -> Result<Vec<Named>, String>,
    seen: &Seen<String>,
    path: &Path,
) -> Option<EngineFile> {
    let read = match seen {
        Seen::Absent => return None,
        Seen::Unreadable(why) => Err(why.clone()),
        Seen::Found(text) => dialect(text),
    };
    let handler = |named: Named| Handler {
        executable: is_there(tree, &named.program),
        name: named.name,
        program: named.program,
        flaw: named.flaw,
    };
    let path = path.to_owned();
    Some(EngineFile { path, handlers: read.map(|named| named.into_iter().map(handler).collect()) })
}

/// Whether a program that an engine is told of can be run: by its path, or by its name.
fn is_there(tree: &Tree, program: &Path) -> bool {
    match program.is_absolute() {
        true => tree.is_executable(program),
        false => tree.program(&program.to_string_lossy()).is_some(),
    }
}

/// The hook files that name us.
pub(super) fn hooks(tree: &Tree) -> Vec<HookFile> {
    let paths = places::HOOKS.iter().flat_map(|directory| tree.list(directory));
    let paths = paths.filter(|path| path.extension().is_some_and(|end| end == "json"));
    let files = paths.take(places::FILES_MAX).filter_map(|path| {
        let hook = match tree.read(&path) {
            Seen::Absent => return None,
            Seen::Unreadable(why) => Err(why),
            Seen::Found(text) => dialect::hook(&text).transpose()?,
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
