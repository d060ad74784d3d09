//! Where each engine has its configuration, in the order in which it reads the files.
//!
//! Owns the paths, and what containerd's files import. Must not judge what the files say.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use glob::Pattern;

use super::containerd::Release;
use super::host_tree::Tree;
use super::{Kind, Seen, dialect};

/// Most files of one engine that are read.
pub(crate) const FILES_MAX: usize = 64;

/// Where engines look for hooks.
pub(crate) const HOOKS: [&str; 3] = [
    "/usr/share/containers/oci/hooks.d",
    "/etc/containers/oci/hooks.d",
    "/run/containers/oci/hooks.d",
];

/// What setup calls its own file in a directory of containerd's.
const OWN: &str = "99-cgpu.toml";

/// The directory whose files k0s merges into what its containerd reads.
const K0S_DROP_INS: &str = "/etc/k0s/containerd.d";

/// The programs by which an engine is known to be installed.
pub(crate) fn programs(kind: Kind) -> &'static [&'static str] {
    match kind {
        Kind::Docker => &["dockerd", "docker"],
        Kind::Containerd => &["containerd"],
        Kind::K3s => &["k3s", "/usr/local/bin/k3s"],
        Kind::Rke2 => &["rke2", "/usr/local/bin/rke2", "/opt/rke2/bin/rke2"],
        Kind::MicroK8s => &["/snap/bin/microk8s", "/var/lib/snapd/snap/bin/microk8s"],
        Kind::K0s => &["k0s", "/usr/local/bin/k0s"],
        Kind::Crio => &["crio"],
        Kind::Podman => &["podman"],
    }
}

/// The engine's containerd, where it has one.
pub(crate) fn containerd_program(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Containerd => Some("containerd"),
        Kind::K3s => Some("/var/lib/rancher/k3s/data/current/bin/containerd"),
        Kind::Rke2 => Some("/var/lib/rancher/rke2/bin/containerd"),
        Kind::MicroK8s => Some("/snap/microk8s/current/bin/containerd"),
        Kind::K0s => Some("/var/lib/k0s/bin/containerd"),
        Kind::Docker | Kind::Crio | Kind::Podman => None,
    }
}

/// The engine's own file, which its administrator edits, or which a distribution of Kubernetes
/// writes.
pub(crate) fn main(kind: Kind) -> &'static str {
    match kind {
        Kind::Docker => "/etc/docker/daemon.json",
        Kind::Containerd => "/etc/containerd/config.toml",
        Kind::K3s => "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
        Kind::Rke2 => "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
        Kind::MicroK8s => "/var/snap/microk8s/current/args/containerd-template.toml",
        Kind::K0s => "/etc/k0s/containerd.toml",
        Kind::Crio => "/etc/crio/crio.conf",
        Kind::Podman => "/etc/containers/containers.conf",
    }
}

/// The file of ours in a directory that the engine reads beside its own file without being told.
pub(crate) fn drop_in(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::Crio => Some("/etc/crio/crio.conf.d/99-cgpu.conf"),
        Kind::Podman => Some("/etc/containers/containers.conf.d/99-cgpu.conf"),
        _ => None,
    }
}

/// The files of an engine's configuration, whether they are there or not: where two say
/// something else, the later one counts. `release` is that of its containerd, if known; `also` is
/// a file that is to be made, which is listed where it would be read.
pub(crate) fn files(
    tree: &Tree,
    kind: Kind,
    release: Option<Release>,
    also: Option<&Path>,
) -> Vec<PathBuf> {
    let mut files = match kind {
        Kind::Docker => vec![main(kind).into()],
        Kind::Crio => with_drop_ins(tree, &[main(kind)], &["/etc/crio/crio.conf.d"]),
        Kind::Podman => with_drop_ins(
            tree,
            &["/usr/share/containers/containers.conf", main(kind)],
            &["/usr/share/containers/containers.conf.d", "/etc/containers/containers.conf.d"],
        ),
        _ => {
            let mut files = containerd(tree, Path::new(main(kind)), release, also);
            if kind == Kind::K0s && is_managed_by_k0s(tree) {
                let dropped = tree.list(K0S_DROP_INS).into_iter().chain(also.map(Path::to_owned));
                let dropped: BTreeSet<PathBuf> = dropped.filter(|path| is_toml(path)).collect();
                files.extend(dropped);
            }
            files
        }
    };
    files.truncate(FILES_MAX);
    files
}

fn is_toml(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "toml")
}

fn is_managed_by_k0s(tree: &Tree) -> bool {
    match tree.read(main(Kind::K0s)) {
        Seen::Found(text) => dialect::is_managed_by_k0s(&text),
        _ => true,
    }
}

/// The files at `files`, and those in `directories`.
fn with_drop_ins(tree: &Tree, files: &[&str], directories: &[&str]) -> Vec<PathBuf> {
    let own = files.iter().map(PathBuf::from);
    let dropped = directories.iter().flat_map(|directory| tree.list(directory));
    own.chain(dropped.filter(|path| path.extension().is_some_and(|end| end == "conf"))).collect()
}

/// containerd's file at `main` and all that is imported, in the order of reading: what a file
/// imports is read after everything that was to be read before.
pub(crate) fn containerd(
    tree: &Tree,
    main: &Path,
    release: Option<Release>,
    also: Option<&Path>,
) -> Vec<PathBuf> {
    let mut pending = VecDeque::from([main.to_owned()]);
    let mut read = Vec::new();
    while let Some(path) = pending.pop_front() {
        if read.contains(&path) {
            continue;
        }
        if read.len() == FILES_MAX {
            break;
        }
        if let Seen::Found(text) = tree.read(&path) {
            let patterns = dialect::imports(&text);
            for pattern in patterns.iter().take(FILES_MAX) {
                pending.extend(matching(tree, &imported(&path, pattern, release), also));
            }
        }
        read.push(path);
    }
    read
}

/// The file of ours that `main`, whose text is given, would import.
pub(crate) fn imported_drop_in(
    main: &Path,
    text: &str,
    release: Option<Release>,
) -> Option<PathBuf> {
    let patterns = dialect::imports(text);
    // Of a relative pattern nobody knows where it leads while containerd may be an early one.
    let later = release.map(|release| release >= Release { major: 1, minor: 7 });
    let relative = later.unwrap_or(dialect::said_version_of(text) >= Some(3));
    let usable = |pattern: &&String| relative || pattern.starts_with('/') || !pattern.contains('*');
    let mut files = patterns.iter().filter(usable).filter_map(|pattern| {
        let pattern = imported(main, pattern, release);
        let file = pattern.parent()?.join(OWN);
        matches(&pattern, &file).then_some(file)
    });
    files.find(|file| !has_wildcard(file))
}

/// The file of ours among those that k0s merges.
pub(crate) fn k0s_drop_in() -> PathBuf {
    Path::new(K0S_DROP_INS).join(OWN)
}

/// The first of `files`, of containerd, that switches off the plugin of Kubernetes.
pub(crate) fn cri_disabled_by(tree: &Tree, files: &[PathBuf]) -> Option<PathBuf> {
    let disables = |path: &&PathBuf| match tree.read(path) {
        Seen::Found(text) => dialect::disables_cri(&text),
        _ => false,
    };
    files.iter().find(disables).cloned()
}

/// What an import of `file` means: a relative one is relative to its directory. containerd
/// before 1.7 looks for relative patterns in its working directory, which is `/` as a service.
fn imported(file: &Path, pattern: &str, release: Option<Release>) -> PathBuf {
    let early = release.is_some_and(|release| release < Release { major: 1, minor: 7 });
    let base = match early && pattern.contains('*') {
        true => Path::new("/"),
        false => file.parent().unwrap_or(Path::new("/")),
    };
    clean(&base.join(pattern))
}

/// A path without `.` and `..`, by its words alone.
fn clean(path: &Path) -> PathBuf {
    let mut cleaned = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::ParentDir => drop(cleaned.pop()),
            Component::Normal(name) => cleaned.push(name),
            _ => {}
        }
    }
    cleaned
}

/// Whether containerd looks for files by this path, and not for one: it asks for a star, and
/// then other wildcards count too.
fn has_wildcard(path: &Path) -> bool {
    path.to_string_lossy().contains('*')
}

/// The files that a path of an import means, in the order of their names.
fn matching(tree: &Tree, pattern: &Path, also: Option<&Path>) -> Vec<PathBuf> {
    if !has_wildcard(pattern) {
        return vec![pattern.to_owned()];
    }
    let mut found = vec![PathBuf::from("/")];
    for name in names(pattern) {
        found = found
            .into_iter()
            .flat_map(|directory| match wildcard(name) {
                None => vec![directory.join(name)],
                Some(wildcard) => {
                    let listed = tree.list(&directory).into_iter();
                    listed.filter(|path| is_named(path, &wildcard)).collect()
                }
            })
            .take(FILES_MAX)
            .collect();
    }
    let found = found.into_iter().filter(|path| tree.at(path).exists());
    let also = also.filter(|also| matches(pattern, also)).map(Path::to_owned);
    found.chain(also).collect::<BTreeSet<PathBuf>>().into_iter().collect()
}

/// Whether `path` is one that `pattern` means.
fn matches(pattern: &Path, path: &Path) -> bool {
    if !has_wildcard(pattern) {
        return pattern == path;
    }
    names(pattern).count() == names(path).count()
        && names(pattern).zip(names(path)).all(|(wanted, found)| match wildcard(wanted) {
            None => wanted == found,
            Some(wildcard) => wildcard.matches(&found.to_string_lossy()),
        })
}

fn names(path: &Path) -> impl Iterator<Item = &OsStr> {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name),
        _ => None,
    })
}

fn is_named(path: &Path, wildcard: &Pattern) -> bool {
    path.file_name().is_some_and(|name| wildcard.matches(&name.to_string_lossy()))
}

/// The wildcard that a name is, as Go's `filepath.Match` understands it: a class is negated by
/// `^`, and two stars are as good as one. One that can't be understood means its own letters:
/// containerd doesn't start with it.
fn wildcard(name: &OsStr) -> Option<Pattern> {
    let name = name.to_string_lossy();
    if !name.contains(['*', '?', '[']) {
        return None;
    }
    let mut wildcard = name.replace("[^", "[!");
    while wildcard.contains("**") {
        wildcard = wildcard.replace("**", "*");
    }
    let literal = || Pattern::new(&Pattern::escape(&name));
    Pattern::new(&wildcard).or_else(|_| literal()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Tree) {
        let directory = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let at = directory.path().join(path.strip_prefix('/').unwrap());
            fs::create_dir_all(at.parent().unwrap()).unwrap();
            fs::write(at, text).unwrap();
        }
        let tree = Tree::new(directory.path(), None);
        (directory, tree)
    }

    #[test]
    fn imports_are_followed_as_containerd_follows_them() {
        let main = "/etc/containerd/config.toml";
        let imports = "imports = ['conf.d/[0-9]*.toml', '/opt/*/gpu.toml', '../x/y.toml', \
                       'config.toml', '/none/[ab].toml']\n";
        let nested = "imports = ['deeper/*', '/etc/containerd/config.toml']\n";
        let (_directory, tree) = tree(&[
            (main, imports),
            ("/etc/containerd/conf.d/99-b.toml", ""),
            ("/etc/containerd/conf.d/10-a.toml", nested),
            ("/etc/containerd/conf.d/a.toml", ""),
            ("/etc/containerd/conf.d/deeper/z", ""),
            ("/opt/two/gpu.toml", ""),
            ("/opt/one/gpu.toml", ""),
            ("/opt/one/other.toml", ""),
            ("/opt/gpu.toml", ""),
        ]);
        let read = |release, also| -> Vec<String> {
            let files = containerd(&tree, Path::new(main), release, also);
            files.into_iter().map(|path| path.display().to_string()).collect()
        };
        let ours = Path::new("/etc/containerd/conf.d/99-cgpu.toml");
        let expected = [
            main,
            "/etc/containerd/conf.d/10-a.toml",
            "/etc/containerd/conf.d/99-b.toml",
            "/etc/containerd/conf.d/99-cgpu.toml",
            "/opt/one/gpu.toml",
            "/opt/two/gpu.toml",
            "/etc/x/y.toml",
            // Without a star it is a name.
            "/none/[ab].toml",
            "/etc/containerd/conf.d/deeper/z",
        ];
        assert_eq!(read(None, Some(ours)), expected);
        // Debian 12's: relative patterns lead nowhere, relative names don't.
        let early = read(Some(Release { major: 1, minor: 6 }), Some(ours));
        assert_eq!(early, [expected[0], expected[4], expected[5], expected[6], expected[7]]);
    }

    #[test]
    fn our_file_lies_where_an_import_would_find_it() {
        let main = Path::new("/etc/containerd/config.toml");
        let [six, seven] = [6, 7].map(|minor| Some(Release { major: 1, minor }));
        for (imports, release, file) in [
            ("'/etc/containerd/conf.d/*.toml'", None, Some("/etc/containerd/conf.d/99-cgpu.toml")),
            ("'/x/*.conf', 'config.d/*'", seven, Some("/etc/containerd/config.d/99-cgpu.toml")),
            ("'conf.d/*.toml'", six, None),
            ("'conf.d/*.toml'", None, None),
            ("'conf.d/*.toml'", seven, Some("/etc/containerd/conf.d/99-cgpu.toml")),
            ("'/a/[0-8]*.toml'", None, None),
            ("'/a/[^0-8]*.toml'", None, Some("/a/99-cgpu.toml")),
            ("'/a/b.toml', '/*/b.toml', '/*/*.toml'", None, None),
            ("'/a/99-cgpu.toml'", None, Some("/a/99-cgpu.toml")),
        ] {
            let text = format!("imports = [{imports}]\n");
            let found = imported_drop_in(main, &text, release);
            assert_eq!(found, file.map(PathBuf::from), "{imports}");
        }
    }
}
