//! The runtime below ours, where it isn't the one that ours would choose: an engine whose
//! containers were crun's keeps crun.
//!
//! containerd, CRI-O and podman call a runtime by its path and can't be told to give it
//! arguments. So setup makes a directory for each such runtime, `libexec/cgpu/over-crun` beside
//! our `bin`, with two links: `cgpu-runtime` to ours, which is the path that the engine is told,
//! and `runtime` to the one below. Ours reads from the path by which it was called which it is.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::host_tree::Tree;
use super::runtime_name::RUNTIME;
use cgpu::runtime::real::{LOWER, OVER};

/// The runtimes that ours may stand over, by the names of their programs.
const KNOWN: [&str; 2] = ["runc", "crun"];

/// Why there are no links.
#[derive(Debug, Error)]
#[error("{} can't be made: {source}; give cgpu's runtime by --runtime, in a directory that can be written", path.display())]
pub struct LinkError {
    /// The directory, or the link.
    path: PathBuf,
    /// Why.
    #[source]
    source: io::Error,
}

/// Our runtime over another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Over {
    /// The directory of the links, as the host names it.
    directory: PathBuf,
    /// Our runtime.
    program: PathBuf,
    /// The one below.
    lower: PathBuf,
}

impl Over {
    /// Our runtime at `program` over the one that the engine's containers have, `lower`; `None`
    /// where ours would choose that one by itself, which is `chosen`, or where it is none that
    /// ours can stand over.
    pub(crate) fn new(program: &Path, lower: Option<&Path>, chosen: Option<&Path>) -> Option<Self> {
        let lower = lower.filter(|lower| lower.is_absolute() && Some(*lower) != chosen)?;
        let name = lower.file_name()?.to_str().filter(|name| KNOWN.contains(name))?;
        // Two of one name are told apart by their directories' names.
        let usual = Path::new("/usr/bin").join(name);
        let name = match lower == usual || lower.parent() == Some(Path::new("/usr/sbin")) {
            true => name.to_owned(),
            false => lower.display().to_string().trim_matches('/').replace('/', "-"),
        };
        let directory = directory_of(program)?.join(format!("{OVER}{name}"));
        Some(Over { directory, program: program.to_owned(), lower: lower.to_owned() })
    }

    /// What the engine is told to run.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.join(RUNTIME)
    }

    /// The runtime below.
    #[must_use]
    pub fn lower(&self) -> &Path {
        &self.lower
    }

    /// Makes the links below `root`, where they aren't as they should be.
    ///
    /// # Errors
    ///
    /// Where they can't be made.
    pub fn make(&self, root: &Path) -> Result<(), LinkError> {
        let at = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| LinkError { path, source }
        };
        fs::create_dir_all(at(&self.directory)).map_err(failed(&self.directory))?;
        for (name, target) in [(RUNTIME, &self.program), (LOWER, &self.lower)] {
            let link = self.directory.join(name);
            if fs::read_link(at(&link)).is_ok_and(|there| there == *target) {
                continue;
            }
            let fresh = self.directory.join(format!("{name}.new"));
            let _ = fs::remove_file(at(&fresh));
            symlink(target, at(&fresh))
                .and_then(|()| fs::rename(at(&fresh), at(&link)))
                .map_err(failed(&link))?;
        }
        Ok(())
    }
}

/// Where setup puts its links for our runtime at `program`.
fn directory_of(program: &Path) -> Option<PathBuf> {
    let beside = program.parent()?;
    match beside.file_name() == Some(OsStr::new("bin")) {
        true => Some(beside.parent()?.join("libexec/cgpu")),
        false => Some(beside.to_owned()),
    }
}

/// Whether an engine's path of our runtime is one of the links for our runtime at `program`.
pub(crate) fn is_link(told: &Path, program: &Path) -> bool {
    let directory = told.parent().filter(|directory| is_over(directory));
    directory.is_some_and(|directory| directory.parent() == directory_of(program).as_deref())
}

fn is_over(directory: &Path) -> bool {
    directory.file_name().is_some_and(|name| name.to_string_lossy().starts_with(OVER))
}

/// The runtime below ours, where an engine calls ours by one of the links.
pub(crate) fn below(tree: &Tree, told: &Path) -> Option<PathBuf> {
    let directory = told.parent().filter(|directory| is_over(directory))?;
    fs::read_link(tree.at(directory.join(LOWER))).ok()
}

/// Takes the links away that an engine was told of at `told` and no file of the host names any
/// more. What can't be taken stays: it does no harm.
pub fn forget(root: &Path, told: &Path, is_named: impl Fn(&str) -> bool) {
    let tree = Tree::new(root, None);
    let Some(directory) = told.parent().filter(|directory| is_over(directory)) else { return };
    if is_named(&told.display().to_string()) || below(&tree, told).is_none() {
        return;
    }
    let directory = tree.at(directory);
    for name in [RUNTIME, LOWER] {
        let _ = fs::remove_file(directory.join(name));
    }
    let _ = fs::remove_dir(&directory);
    let _ = directory.parent().map(fs::remove_dir);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_stands_over_what_it_would_not_choose_itself() {
        let over = |program: &str, lower: Option<&str>, chosen: &str| {
            let over = Over::new(Path::new(program), lower.map(Path::new), Some(Path::new(chosen)));
            over.map(|over| over.path().display().to_string())
        };
        let ours = "/usr/bin/cgpu-runtime";
        for (lower, path) in [
            (None, None),
            (Some("/usr/bin/runc"), None),
            (Some("crun"), None),
            (Some("/usr/bin/nvidia-container-runtime"), None),
            (Some("/usr/bin/crun"), Some("/usr/libexec/cgpu/over-crun/cgpu-runtime")),
            (
                Some("/usr/libexec/crio/crun"),
                Some("/usr/libexec/cgpu/over-usr-libexec-crio-crun/cgpu-runtime"),
            ),
            (
                Some("/usr/local/bin/runc"),
                Some("/usr/libexec/cgpu/over-usr-local-bin-runc/cgpu-runtime"),
            ),
        ] {
            assert_eq!(over(ours, lower, "/usr/bin/runc").as_deref(), path, "{lower:?}");
        }
        assert_eq!(
            over("/opt/x/cgpu-runtime", Some("/usr/bin/crun"), "/usr/bin/runc").as_deref(),
            Some("/opt/x/over-crun/cgpu-runtime")
        );
    }

    #[test]
    fn links_are_made_once_and_go_with_the_last_that_names_them() {
        let root = tempfile::tempdir().unwrap();
        let tree = Tree::new(root.path(), None);
        let ours = Path::new("/usr/bin/cgpu-runtime");
        let over = Over::new(ours, Some(Path::new("/usr/bin/crun")), None).unwrap();
        for _ in 0..2 {
            over.make(root.path()).unwrap();
            assert_eq!(below(&tree, &over.path()), Some("/usr/bin/crun".into()));
        }
        assert!(is_link(&over.path(), ours) && !is_link(ours, ours));
        assert_eq!(below(&tree, ours), None);
        forget(root.path(), &over.path(), |_| true);
        assert!(below(&tree, &over.path()).is_some());
        forget(root.path(), ours, |_| false);
        forget(root.path(), &over.path(), |_| false);
        assert!(!tree.at("/usr/libexec/cgpu").exists());
    }
}
