//! Facts of the engines, of hook files and of NVIDIA's toolkit: which are there, and
//! whether they know of us.
//!
//! Owns where their configurations are; what these say is read by `dialect`. Must not
//! judge, nor run any of them.

use std::path::{Path, PathBuf};

use super::dialect::{self, Named};
use super::facts::{Engine, EngineFile, EngineKind, Handler, Hook, HookFile, Seen, Toolkit};
use super::files::Tree;

/// containerd's configuration.
const CONTAINERD: &str = "/etc/containerd/config.toml";

/// Most files of one engine that are read.
const FILES_MAX: usize = 64;

/// NVIDIA's programs for containers.
const TOOLKIT: [&str; 4] =
    ["nvidia-ctk", "nvidia-container-runtime", "nvidia-container-cli", "nvidia-cdi-hook"];

/// Where CDI specifications are; `/var/run` is mostly a link to `/run`.
const CDI: [&str; 3] = ["/etc/cdi", "/run/cdi", "/var/run/cdi"];

/// Where engines look for hooks.
const HOOKS: [&str; 3] = [
    "/usr/share/containers/oci/hooks.d",
    "/etc/containers/oci/hooks.d",
    "/run/containers/oci/hooks.d",
];

/// The engines, those that aren't there too.
pub(super) fn look(tree: &Tree) -> Vec<Engine> {
    let kinds = [EngineKind::Docker, EngineKind::Containerd, EngineKind::Crio, EngineKind::Podman];
    kinds.map(|kind| engine(tree, kind)).into()
}

fn engine(tree: &Tree, kind: EngineKind) -> Engine {
    let (programs, paths): (&[&str], Vec<PathBuf>) = match kind {
        EngineKind::Docker => (&["dockerd", "docker"], vec!["/etc/docker/daemon.json".into()]),
        EngineKind::Containerd => (&["containerd"], containerd_files(tree)),
        EngineKind::Crio => {
            (&["crio"], with_drop_ins(tree, &["/etc/crio/crio.conf"], &["/etc/crio/crio.conf.d"]))
        }
        EngineKind::Podman => (
            &["podman"],
            with_drop_ins(
                tree,
                &["/usr/share/containers/containers.conf", "/etc/containers/containers.conf"],
                &["/usr/share/containers/containers.conf.d", "/etc/containers/containers.conf.d"],
            ),
        ),
    };
    let inherited = match tree.read(CONTAINERD) {
        Seen::Found(text) => dialect::version(&text),
        _ => 1,
    };
    let files = paths.into_iter().take(FILES_MAX);
    Engine {
        kind,
        program: programs.iter().find_map(|name| tree.program(name)),
        files: files.filter_map(|path| file(tree, kind, inherited, path)).collect(),
    }
}

/// The files at `files`, and those in `directories`.
fn with_drop_ins(tree: &Tree, files: &[&str], directories: &[&str]) -> Vec<PathBuf> {
    let own = files.iter().map(PathBuf::from);
    let dropped = directories.iter().flat_map(|directory| tree.list(directory));
    own.chain(dropped.filter(|path| path.extension().is_some_and(|end| end == "conf"))).collect()
}

/// containerd's file and what it imports.
fn containerd_files(tree: &Tree) -> Vec<PathBuf> {
    let main = PathBuf::from(CONTAINERD);
    let imports = match tree.read(&main) {
        Seen::Found(text) => dialect::imports(&text),
        _ => Vec::new(),
    };
    let imported = imports.into_iter().take(FILES_MAX).flat_map(|pattern| matching(tree, &pattern));
    let imported = imported.filter(|path| *path != main).collect::<Vec<_>>();
    std::iter::once(main.clone()).chain(imported).collect()
}

/// The files that a pattern means, whose last part may have one star.
fn matching(tree: &Tree, pattern: &str) -> Vec<PathBuf> {
    let path = Path::new("/etc/containerd").join(pattern);
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
    let Some((begin, end)) = name.as_deref().and_then(|name| name.split_once('*')) else {
        return vec![path];
    };
    let listed = path.parent().map(|directory| tree.list(directory)).unwrap_or_default();
    let matches = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        name.is_some_and(|name| {
            name.len() >= begin.len() + end.len() && name.starts_with(begin) && name.ends_with(end)
        })
    };
    listed.into_iter().filter(matches).collect()
}

fn file(tree: &Tree, kind: EngineKind, inherited: i64, path: PathBuf) -> Option<EngineFile> {
    let read = match tree.read(&path) {
        Seen::Absent => return None,
        Seen::Unreadable(why) => Err(why),
        Seen::Found(text) => match kind {
            EngineKind::Docker => dialect::docker(&text),
            EngineKind::Containerd => dialect::containerd(&text, inherited),
            EngineKind::Crio => dialect::crio(&text),
            EngineKind::Podman => dialect::podman(&text),
        },
    };
    let handler = |named: Named| Handler {
        executable: is_there(tree, &named.program),
        name: named.name,
        program: named.program,
        flaw: named.flaw,
    };
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
    let paths = HOOKS.iter().flat_map(|directory| tree.list(directory));
    let paths = paths.filter(|path| path.extension().is_some_and(|end| end == "json"));
    let files = paths.take(FILES_MAX).filter_map(|path| {
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
