//! Where each engine has its configuration, in the order in which it reads the files.
//!
//! Owns the paths, and what containerd's main file imports. Must not judge what the files
//! say.

use std::path::{Path, PathBuf};

use super::files::Tree;
use super::{Kind, Seen, dialect};

/// Most files of one engine that are read.
pub(crate) const FILES_MAX: usize = 64;

/// Where engines look for hooks.
pub(crate) const HOOKS: [&str; 3] = [
    "/usr/share/containers/oci/hooks.d",
    "/etc/containers/oci/hooks.d",
    "/run/containers/oci/hooks.d",
];

/// containerd's configuration.
const CONTAINERD: &str = "/etc/containerd/config.toml";

/// What k3s and RKE2 write for the containerd that they bring.
pub(crate) const GENERATED: [&str; 2] = [
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
];

/// The programs by which an engine is known to be installed.
pub(crate) fn programs(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::Docker => &["dockerd", "docker"],
        Kind::Containerd => &["containerd"],
        Kind::Crio => &["crio"],
        Kind::Podman => &["podman"],
    }
}

/// The engine's own file, which its administrator edits.
pub(crate) fn main(kind: Kind) -> &'static str {
    match kind {
        Kind::Docker => "/etc/docker/daemon.json",
        Kind::Containerd => CONTAINERD,
        Kind::Crio => "/etc/crio/crio.conf",
        Kind::Podman => "/etc/containers/containers.conf",
    }
}

/// The file of ours in a directory that the engine reads beside its own file; containerd
/// reads it only where its own file imports it.
pub(crate) fn drop_in(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Docker => None,
        Kind::Containerd => Some("/etc/containerd/conf.d/99-cgpu.toml"),
        Kind::Crio => Some("/etc/crio/crio.conf.d/99-cgpu.conf"),
        Kind::Podman => Some("/etc/containers/containers.conf.d/99-cgpu.conf"),
    }
}

/// The files of an engine's configuration, whether they are there or not: where two say
/// something else, the later one counts.
pub(crate) fn files(tree: &Tree, kind: Kind) -> Vec<PathBuf> {
    let mut files = match kind {
        Kind::Docker => vec![main(kind).into()],
        Kind::Containerd => containerd(tree, Path::new(CONTAINERD)),
        Kind::Crio => with_drop_ins(tree, &[main(kind)], &["/etc/crio/crio.conf.d"]),
        Kind::Podman => with_drop_ins(
            tree,
            &["/usr/share/containers/containers.conf", main(kind)],
            &["/usr/share/containers/containers.conf.d", "/etc/containers/containers.conf.d"],
        ),
    };
    files.truncate(FILES_MAX);
    files
}

/// The version of containerd's own file, which files that it imports mostly leave to it.
pub(crate) fn containerd_version(tree: &Tree) -> i64 {
    match tree.read(CONTAINERD) {
        Seen::Found(text) => dialect::version(&text),
        _ => 1,
    }
}

/// The files at `files`, and those in `directories`.
fn with_drop_ins(tree: &Tree, files: &[&str], directories: &[&str]) -> Vec<PathBuf> {
    let own = files.iter().map(PathBuf::from);
    let dropped = directories.iter().flat_map(|directory| tree.list(directory));
    own.chain(dropped.filter(|path| path.extension().is_some_and(|end| end == "conf"))).collect()
}

/// containerd's file at `main` and what it imports.
pub(crate) fn containerd(tree: &Tree, main: &Path) -> Vec<PathBuf> {
    let imports = match tree.read(main) {
        Seen::Found(text) => dialect::imports(&text),
        _ => Vec::new(),
    };
    let imported =
        imports.into_iter().take(FILES_MAX).flat_map(|pattern| matching(tree, main, &pattern));
    let imported = imported.filter(|path| path != main).collect::<Vec<_>>();
    std::iter::once(main.to_owned()).chain(imported).collect()
}

/// The first of `files`, of containerd, that switches off the plugin of Kubernetes.
pub(crate) fn cri_disabled_by(tree: &Tree, files: &[PathBuf]) -> Option<PathBuf> {
    let disables = |path: &&PathBuf| match tree.read(path) {
        Seen::Found(text) => dialect::disables_cri(&text),
        _ => false,
    };
    files.iter().find(disables).cloned()
}

/// The files that a pattern of `main` means, whose last part may have one star.
fn matching(tree: &Tree, main: &Path, pattern: &str) -> Vec<PathBuf> {
    let path = beside(main, pattern);
    if !pattern.contains('*') {
        return vec![path];
    }
    let listed = path.parent().map(|directory| tree.list(directory)).unwrap_or_default();
    listed.into_iter().filter(|listed| matches(&path, listed)).collect()
}

/// Whether `main`, whose text is given, imports the file at `path`, were it there.
pub(crate) fn imports(main: &Path, text: &str, path: &Path) -> bool {
    dialect::imports(text).iter().any(|pattern| matches(&beside(main, pattern), path))
}

/// What a pattern of `main` means: a relative one is relative to its directory.
fn beside(main: &Path, pattern: &str) -> PathBuf {
    main.parent().unwrap_or(Path::new("/")).join(pattern)
}

/// Whether `path` is what `pattern` means, whose last part may have one star.
fn matches(pattern: &Path, path: &Path) -> bool {
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let (Some(wanted), Some(found)) = (name(pattern), name(path)) else { return false };
    if pattern.parent() != path.parent() {
        return false;
    }
    match wanted.split_once('*') {
        None => wanted == found,
        Some((begin, end)) => {
            found.len() >= begin.len() + end.len()
                && found.starts_with(begin)
                && found.ends_with(end)
        }
    }
}
