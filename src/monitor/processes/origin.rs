//! Where a container's files of the driver are opened, and who is at home there.
//!
//! Pure: what the kernel says in, whose a file or a process is out. An open file keeps the
//! mount it was opened on, wherever its descriptor goes; a container's nodes are on mounts,
//! or even on a file system, of its own. Numbers of mounts are used again once nobody has
//! anything open on them, so that a mount in a process's own table is that process's.

use std::collections::BTreeSet;

/// Mounts, file systems, namespaces and cgroups that are remembered, of each.
const MOST: usize = 256;

/// What is known of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    mounts: BTreeSet<u64>,
    /// All mounts of its first process, as they are now.
    firsts: BTreeSet<u64>,
    filesystems: BTreeSet<u64>,
    namespaces: BTreeSet<u64>,
    cgroups: BTreeSet<String>,
}

impl Origin {
    /// A node was opened there: the mount, and the file system where it's the container's own.
    pub(crate) fn learn(&mut self, mount: u64, filesystem: Option<u64>) {
        remember(&mut self.mounts, mount);
        if let Some(filesystem) = filesystem {
            remember(&mut self.filesystems, filesystem);
        }
    }

    /// Its first process has these mounts that the host doesn't have.
    pub(crate) fn inhabit(&mut self, mounts: BTreeSet<u64>) {
        self.firsts = mounts;
    }

    /// One of its processes is in that mount namespace and in that cgroup, as
    /// `/proc/PID/cgroup` has it; `None` where others may be in it, too.
    pub(crate) fn settle(&mut self, namespace: Option<u64>, cgroup: Option<&str>) {
        if let Some(namespace) = namespace {
            remember(&mut self.namespaces, namespace);
        }
        if let Some(cgroup) = cgroup {
            remember(&mut self.cgroups, cgroup.trim_end().to_owned());
        }
    }

    /// Whether nothing is known of where its nodes are.
    #[must_use]
    pub(crate) fn is_unknown(&self) -> bool {
        self.mounts.is_empty() && self.firsts.is_empty() && self.filesystems.is_empty()
    }

    /// Whether an open file is of the container's: by its mount, or its file system.
    #[must_use]
    pub(crate) fn has(&self, mount: u64, filesystem: u64) -> bool {
        self.mounts.contains(&mount)
            || self.firsts.contains(&mount)
            || self.filesystems.contains(&filesystem)
    }

    /// Whether a process is the container's: by its mount namespace, or its cgroup.
    #[must_use]
    pub(crate) fn houses(&self, namespace: u64, cgroup: &str) -> bool {
        let cgroup = cgroup.trim_end();
        let below = |home: &String| {
            let rest = cgroup.strip_prefix(home.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.namespaces.contains(&namespace) || self.cgroups.iter().any(below)
    }
}

/// What came late is forgotten: the container can make as many as it likes.
fn remember<T: Ord>(set: &mut BTreeSet<T>, one: T) {
    if set.len() < MOST {
        set.insert(one);
    }
}

/// The numbers of the mounts in `/proc/PID/mountinfo`.
#[must_use]
pub(crate) fn mounts(mountinfo: &str) -> BTreeSet<u64> {
    let numbers = mountinfo.lines().filter_map(|line| line.split(' ').next()?.parse().ok());
    numbers.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_table_is_read_by_its_first_column() {
        let text = "24 31 0:22 / /proc rw,nosuid shared:13 - proc proc rw\n\
                    1031 905 0:61 /nvidia\\040ctl /dev/nvidiactl rw - fuse sim rw\n\
                    \n\
                    x y\n";
        assert_eq!(mounts(text), [24, 1031].into());
        assert_eq!(mounts(""), [].into());
    }

    #[test]
    fn a_file_is_known_by_its_mount_or_its_file_system() {
        let mut origin = Origin::default();
        assert!(origin.is_unknown() && !origin.has(7, 5));
        origin.learn(7, None);
        assert!(origin.has(7, 5) && !origin.has(8, 5));
        origin.learn(9, Some(5));
        assert!(origin.has(8, 5) && !origin.has(8, 6) && !origin.is_unknown());
    }

    #[test]
    fn processes_at_home_share_a_namespace_or_a_cgroup() {
        let mut origin = Origin::default();
        assert!(!origin.houses(1, "0::/pod/app\n"));
        origin.settle(Some(1), Some("0::/pod/app\n"));
        assert!(origin.houses(1, "0::/\n"));
        assert!(origin.houses(2, "0::/pod/app\n"));
        assert!(origin.houses(2, "0::/pod/app/child\n"));
        assert!(!origin.houses(2, "0::/pod/apple\n"));
        assert!(!origin.houses(2, "0::/pod\n"));
    }

    #[test]
    fn a_container_can_not_make_it_grow() {
        let mut origin = Origin::default();
        (0..10_000).for_each(|mount| origin.learn(mount, Some(mount)));
        assert!(origin.has(0, u64::MAX) && !origin.has(9_999, u64::MAX));
    }
}
