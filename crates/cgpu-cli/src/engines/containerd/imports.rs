//! The files of a containerd's configuration: the main one, and what each imports.
//!
//! Owns containerd's patterns and their order. Must not judge the files' contents.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use glob::Pattern;
use toml::Value;

use super::release::{CRI, Release};
use crate::engines::Observed;
use crate::engines::host_tree::Tree;
use crate::engines::installation::{DROP_IN, FILES_MAX};
use crate::engines::toml_values::parse;

/// containerd's file at `main` and all that is imported, in the order of reading: what a file
/// imports is read after everything that was to be read before.
pub(crate) fn files(
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
        if let Observed::Present(text) = tree.read(&path) {
            let patterns = imports(&text);
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
    let patterns = imports(text);
    // Early releases resolve a relative pattern elsewhere: it is usable if the release is later.
    let later = release.map(|release| release >= Release { major: 1, minor: 7 });
    let relative = later.unwrap_or(declared_version(text) >= Some(3));
    let usable = |pattern: &&String| relative || pattern.starts_with('/') || !pattern.contains('*');
    let mut files = patterns.iter().filter(usable).filter_map(|pattern| {
        let pattern = imported(main, pattern, release);
        let file = pattern.parent()?.join(DROP_IN);
        matches(&pattern, &file).then_some(file)
    });
    files.find(|file| !has_wildcard(file))
}

/// The first of `files`, of containerd, that disables the plugin of Kubernetes.
pub(crate) fn cri_disabled_by(tree: &Tree, files: &[PathBuf]) -> Option<PathBuf> {
    let disables = |path: &&PathBuf| match tree.read(path) {
        Observed::Present(text) => disables_cri(&text),
        _ => false,
    };
    files.iter().find(disables).cloned()
}

/// The path or pattern of an import of `file`: a relative one is relative to its directory. containerd
/// before 1.7 resolves relative patterns in its working directory, which is `/` as a service.
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

/// Whether a path is a pattern to containerd: it needs a star, and then other wildcards count too.
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

/// The version that `text`, of containerd, declares.
pub(crate) fn declared_version(text: &str) -> Option<i64> {
    parse(text).ok()?.get("version")?.as_integer()
}

/// The files that a containerd configuration imports, as patterns.
pub(crate) fn imports(text: &str) -> Vec<String> {
    let table = parse(text).unwrap_or_default();
    let imports = table.get("imports").and_then(Value::as_array);
    imports.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Whether a file of containerd disables the plugin of Kubernetes.
pub(crate) fn disables_cri(text: &str) -> bool {
    let table = parse(text).unwrap_or_default();
    let disabled = table.get("disabled_plugins").and_then(Value::as_array);
    let mut disabled = disabled.into_iter().flatten().filter_map(Value::as_str);
    disabled.any(|plugin| CRI.iter().any(|(_, cri)| *cri == plugin))
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
    fn imports_are_followed_as_in_containerd() {
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
            let files = files(&tree, Path::new(main), release, also);
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
    fn drop_in_matches_an_import() {
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

    #[test]
    fn cri_is_disabled_by_any_name() {
        for (plugins, off) in [
            ("['cri']", true),
            ("['aufs', 'io.containerd.grpc.v1.cri']", true),
            ("['io.containerd.cri.v1.runtime']", true),
            ("['aufs']", false),
            ("'cri'", false),
            ("[", false),
        ] {
            assert_eq!(disables_cri(&format!("disabled_plugins = {plugins}")), off, "{plugins}");
        }
        assert!(!disables_cri("# disabled_plugins = ['cri']"));
    }
}
