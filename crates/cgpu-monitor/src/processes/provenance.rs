//! How a file or a process is known to be a container's.
//!
//! Pure: facts of the kernel go in, and whether a file or a process is the container's comes out. An open file keeps
//! the mount it was opened on, wherever its descriptor goes; a container's nodes are on mounts, or even on a file
//! system, of its own. The kernel uses a mount's id again once no process has a file open on the mount, so a mount in a
//! process's own table is that process's.

use std::collections::BTreeSet;

/// The most mounts, file systems, namespaces and cgroups that are remembered, of each kind.
const MOST: usize = 256;

/// What is known of a container: where its nodes are opened, and where its processes live.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Provenance {
    mounts: BTreeSet<u64>,
    /// All mounts of the container's first process that the host doesn't have, as they are now.
    first_mounts: BTreeSet<u64>,
    filesystems: BTreeSet<u64>,
    namespaces: BTreeSet<u64>,
    cgroups: BTreeSet<String>,
}

impl Provenance {
    /// Adds the mount on which a node was opened, and the file system where it is the container's own.
    pub(crate) fn add_mount(&mut self, mount: u64, filesystem: Option<u64>) {
        remember(&mut self.mounts, mount);
        if let Some(filesystem) = filesystem {
            remember(&mut self.filesystems, filesystem);
        }
    }

    /// Sets the mounts of the container's first process that the host doesn't have.
    pub(crate) fn set_first_process_mounts(&mut self, mounts: BTreeSet<u64>) {
        self.first_mounts = mounts;
    }

    /// Adds the mount namespace and the cgroup of one of the container's processes, the cgroup as `/proc/PID/cgroup`
    /// has it. `None` where processes that aren't the container's may be in it, too.
    pub(crate) fn add_process(&mut self, namespace: Option<u64>, cgroup: Option<&str>) {
        if let Some(namespace) = namespace {
            remember(&mut self.namespaces, namespace);
        }
        if let Some(cgroup) = cgroup {
            remember(&mut self.cgroups, cgroup.trim_end().to_owned());
        }
    }

    /// Whether nothing is known of where the container's nodes are.
    #[must_use]
    pub(crate) fn is_unknown(&self) -> bool {
        self.mounts.is_empty() && self.first_mounts.is_empty() && self.filesystems.is_empty()
    }

    /// Whether an open file is the container's, by its mount or its file system.
    #[must_use]
    pub(crate) fn has_file(&self, mount: u64, filesystem: u64) -> bool {
        self.mounts.contains(&mount)
            || self.first_mounts.contains(&mount)
            || self.filesystems.contains(&filesystem)
    }

    /// Whether a process is the container's, by its mount namespace or its cgroup.
    #[must_use]
    pub(crate) fn has_process(&self, namespace: u64, cgroup: &str) -> bool {
        let cgroup = cgroup.trim_end();
        let below = |known: &String| {
            let rest = cgroup.strip_prefix(known.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.namespaces.contains(&namespace) || self.cgroups.iter().any(below)
    }
}

/// Adds `one` if the set isn't full: a container can make as many as it likes, so later ones are left out.
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
    fn mount_table_is_read_by_its_first_column() {
        let text = "24 31 0:22 / /proc rw,nosuid shared:13 - proc proc rw\n\
                    1031 905 0:61 /nvidia\\040ctl /dev/nvidiactl rw - fuse sim rw\n\
                    \n\
                    x y\n";
        assert_eq!(mounts(text), [24, 1031].into());
        assert_eq!(mounts(""), [].into());
    }

    /// A file is known as the container's by its mount or its file system.
    #[test]
    fn file_is_identified_by_mount_or_file_system() {
        let mut provenance = Provenance::default();
        assert!(provenance.is_unknown() && !provenance.has_file(7, 5));
        provenance.add_mount(7, None);
        assert!(provenance.has_file(7, 5) && !provenance.has_file(8, 5));
        provenance.add_mount(9, Some(5));
        assert!(
            provenance.has_file(8, 5) && !provenance.has_file(8, 6) && !provenance.is_unknown()
        );
    }

    /// A process is known as the container's by its mount namespace or its cgroup.
    #[test]
    fn own_processes_share_a_namespace_or_a_cgroup() {
        let mut provenance = Provenance::default();
        assert!(!provenance.has_process(1, "0::/pod/app\n"));
        provenance.add_process(Some(1), Some("0::/pod/app\n"));
        assert!(provenance.has_process(1, "0::/\n"));
        assert!(provenance.has_process(2, "0::/pod/app\n"));
        assert!(provenance.has_process(2, "0::/pod/app/child\n"));
        assert!(!provenance.has_process(2, "0::/pod/apple\n"));
        assert!(!provenance.has_process(2, "0::/pod\n"));
    }

    #[test]
    fn a_container_can_not_make_it_grow() {
        let mut provenance = Provenance::default();
        (0..10_000).for_each(|mount| provenance.add_mount(mount, Some(mount)));
        assert!(provenance.has_file(0, u64::MAX) && !provenance.has_file(9_999, u64::MAX));
    }
}
