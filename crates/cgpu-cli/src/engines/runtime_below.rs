//! The runtime below ours, if it isn't the one that ours would choose: an engine whose
//! containers were crun's retains crun.
//!
//! containerd, CRI-O and podman call a runtime by its path and can't be configured to pass it
//! arguments. So setup makes a directory for each such runtime, `libexec/cgpu/over-crun` next to
//! our `bin`, with two links: `cgpu-runtime` to ours, which is the path in the engine's
//! configuration, and `runtime` to the one below. Ours finds it by the path of its call.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::host_tree::Tree;
use super::runtime_name::RUNTIME;
use cgpu::runtime::real::{LOWER, OVER};

/// The runtimes that ours can run, by the names of their programs.
const KNOWN: [&str; 2] = ["runc", "crun"];

/// Why there are no links.
#[derive(Debug, Error)]
#[error("{} can't be made: {source}; give cgpu's runtime by --runtime, in a directory that can be written", path.display())]
pub struct LinkError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// The links by which our runtime runs another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeLinks {
    /// The directory of the links, as the host names it.
    directory: PathBuf,
    program: PathBuf,
    lower: PathBuf,
}

impl RuntimeLinks {
    /// The links by which our runtime at `program` runs `lower`, the runtime of the engine's
    /// containers; `None` if ours would choose that one by itself, as `chosen`, or can't run it.
    pub(crate) fn new(program: &Path, lower: Option<&Path>, chosen: Option<&Path>) -> Option<Self> {
        let lower = lower.filter(|lower| lower.is_absolute() && Some(*lower) != chosen)?;
        let name = lower.file_name()?.to_str().filter(|name| KNOWN.contains(name))?;
        // Two of one name differ by their directories' names.
        let usual = Path::new("/usr/bin").join(name);
        let name = match lower == usual || lower.parent() == Some(Path::new("/usr/sbin")) {
            true => name.to_owned(),
            false => lower.display().to_string().trim_matches('/').replace('/', "-"),
        };
        let directory = directory_of(program)?.join(format!("{OVER}{name}"));
        Some(RuntimeLinks { directory, program: program.to_owned(), lower: lower.to_owned() })
    }

    /// The path for the engine's configuration.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.join(RUNTIME)
    }

    #[must_use]
    pub fn lower(&self) -> &Path {
        &self.lower
    }

    /// Makes the links below `root`, if they are missing or differ.
    ///
    /// # Errors
    ///
    /// If they can't be made.
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

/// The directory of setup's links for our runtime at `program`.
fn directory_of(program: &Path) -> Option<PathBuf> {
    let parent = program.parent()?;
    match parent.file_name() == Some(OsStr::new("bin")) {
        true => Some(parent.parent()?.join("libexec/cgpu")),
        false => Some(parent.to_owned()),
    }
}

/// Whether an engine's path of our runtime is one of the links for our runtime at `program`.
pub(crate) fn is_link(registered: &Path, program: &Path) -> bool {
    let directory = registered.parent().filter(|directory| is_link_directory(directory));
    directory.is_some_and(|directory| directory.parent() == directory_of(program).as_deref())
}

fn is_link_directory(directory: &Path) -> bool {
    directory.file_name().is_some_and(|name| name.to_string_lossy().starts_with(OVER))
}

/// The runtime below ours, if an engine calls ours by one of the links.
pub(crate) fn below(tree: &Tree, registered: &Path) -> Option<PathBuf> {
    let directory = registered.parent().filter(|directory| is_link_directory(directory))?;
    fs::read_link(tree.at(directory.join(LOWER))).ok()
}

/// Removes the links of the path `registered` if no file of the host names it any more. What can't
/// be removed stays: it does no harm.
pub fn remove_unused(root: &Path, registered: &Path, is_named: impl Fn(&str) -> bool) {
    let tree = Tree::new(root, None);
    let Some(directory) = registered.parent().filter(|directory| is_link_directory(directory))
    else {
        return;
    };
    if is_named(&registered.display().to_string()) || below(&tree, registered).is_none() {
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

    // Links are made for a runtime that ours would not choose by itself.
    #[test]
    fn links_are_for_runtimes_not_chosen_anyway() {
        let over = |program: &str, lower: Option<&str>, chosen: &str| {
            let links = RuntimeLinks::new(
                Path::new(program),
                lower.map(Path::new),
                Some(Path::new(chosen)),
            );
            links.map(|links| links.path().display().to_string())
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
    fn links_are_removed_with_their_last_use() {
        let root = tempfile::tempdir().unwrap();
        let tree = Tree::new(root.path(), None);
        let ours = Path::new("/usr/bin/cgpu-runtime");
        let links = RuntimeLinks::new(ours, Some(Path::new("/usr/bin/crun")), None).unwrap();
        for _ in 0..2 {
            links.make(root.path()).unwrap();
            assert_eq!(below(&tree, &links.path()), Some("/usr/bin/crun".into()));
        }
        assert!(is_link(&links.path(), ours) && !is_link(ours, ours));
        assert_eq!(below(&tree, ours), None);
        remove_unused(root.path(), &links.path(), |_| true);
        assert!(below(&tree, &links.path()).is_some());
        remove_unused(root.path(), ours, |_| false);
        remove_unused(root.path(), &links.path(), |_| false);
        assert!(!tree.at("/usr/libexec/cgpu").exists());
    }
}
