//! The cgroups of one scratch: in every mounted hierarchy, the tree of its name.
//!
//! Knows both versions: on v1 and hybrid machines each controller has its own hierarchy, on v2
//! there is one.

use std::fs;
use std::path::{Path, PathBuf};

use super::traces::mounts;

/// Whether `/sys/fs/cgroup` is one cgroup v2 hierarchy, as crun wants it.
pub fn is_unified() -> bool {
    nix::sys::statfs::statfs("/sys/fs/cgroup")
        .is_ok_and(|fs| fs.filesystem_type() == nix::sys::statfs::CGROUP2_SUPER_MAGIC)
}

/// Every cgroup called `name` at the top of a hierarchy, and all below it, children first.
pub(super) fn trees(name: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for mount in mounts().iter().filter(|mount| mount.kind == "cgroup" || mount.kind == "cgroup2") {
        collect(&mount.point.join(name), &mut found);
    }
    found
}

/// Lets paused containers run again: on v1 a frozen process doesn't even die of SIGKILL.
pub(super) fn thaw(name: &str) {
    for cgroup in trees(name) {
        let state = cgroup.join("freezer.state");
        if state.exists() {
            let _ = fs::write(state, "THAWED");
        }
    }
}

/// The processes in the trees of `name`, those too that look like zombies because only their
/// first thread has ended.
pub fn members(name: &str) -> Vec<i32> {
    let lists = trees(name)
        .into_iter()
        .map(|cgroup| fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default());
    lists
        .flat_map(|list| list.lines().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Removes the trees of `name`; what is still busy stays.
pub(super) fn remove(name: &str) {
    for cgroup in trees(name) {
        let _ = fs::remove_dir(cgroup);
    }
}

fn collect(cgroup: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(cgroup) else { return };
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
    {
        collect(&entry.path(), found);
    }
    found.push(cgroup.to_owned());
}
