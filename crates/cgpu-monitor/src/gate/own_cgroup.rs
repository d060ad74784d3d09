//! The cgroup of a monitor whose engine starts it in a pod's: `cgpu/SHORT_ID` below the host's root.
//!
//! CRI-O, podman and containerd start their helpers in the pod's cgroups: its memory limit, its freezer or its end
//! would hit the monitor, too. In its own cgroup the monitor has its container's weight of the processor. It never has
//! a maximum: a throttled monitor would hold locks of the driver, which are shared by all processes of the host
//! (`ProcessorBudget` enforces its container's limit on the monitor instead). A monitor that isn't in a pod's cgroup
//! stays where it is: while a process changes its cgroup, the kernel lets no process of the host start, for 5 ms and
//! more (`cgroup_threadgroup_rwsem`).
//!
//! The cgroup is made in the hierarchy of version 2, and in the processor's of version 1. Of the other hierarchies of
//! version 1 a monitor leaves its pod's cgroup for the root.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::settings::Settings;
use cgpu_core::processor::ProcessorShares;

/// Where the host has its cgroups.
const ROOT: &str = "/sys/fs/cgroup";

/// The directory of all monitors' cgroups, below a hierarchy's root.
const ALL: &str = "cgpu";

/// A hierarchy of cgroups in which a process is.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hierarchy {
    root: PathBuf,
    /// The controllers of version 1; empty for version 2.
    controllers: String,
    /// The process's cgroup, from the root on.
    path: String,
}

impl Hierarchy {
    /// Those of `text`, which is `/proc/PID/cgroup`, on a host that has them below `root` (cgroups(7)).
    fn list(root: &Path, text: &str) -> Vec<Self> {
        let of = |line: &str| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            let root = match controllers.strip_prefix("name=").unwrap_or(controllers) {
                "" if root.join("cgroup.controllers").exists() => root.to_owned(),
                "" => root.join("unified"),
                name => root.join(name),
            };
            Some(Hierarchy { root, controllers: controllers.to_owned(), path: path.to_owned() })
        };
        text.lines().filter_map(of).collect()
    }

    fn is_of_a_pod(&self) -> bool {
        self.path.contains("kubepods") || self.path.contains("libpod")
    }

    /// Whether monitors have cgroups of their own in it.
    fn has_own(&self) -> bool {
        self.controllers.is_empty() || self.controllers.split(',').any(|name| name == "cpu")
    }

    /// Moves this process into the cgroup of that monitor, which is made, or into the root.
    fn join(&self, short_id: &str, shares: Option<ProcessorShares>) -> io::Result<()> {
        if !self.has_own() {
            return enter(&self.root);
        }
        let all = self.root.join(ALL);
        let own = all.join(short_id);
        fs::create_dir_all(&own)?;
        // If the host allows no cgroup a weight, the monitor has an equal part.
        if let Some(shares) = shares {
            if self.controllers.is_empty() {
                let _ = fs::write(all.join("cgroup.subtree_control"), "+cpu");
                let _ = fs::write(own.join("cpu.weight"), shares.weight().to_string());
            } else {
                let _ = fs::write(own.join("cpu.shares"), shares.0.to_string());
            }
        }
        enter(&own)
    }
}

fn enter(cgroup: &Path) -> io::Result<()> {
    // Zero is the process that writes.
    fs::write(cgroup.join("cgroup.procs"), "0")
}

/// Moves this process, a monitor, out of the pod's cgroups in which it was started into its own ones. Returns the
/// controllers by which it is still in its pod's cgroup, since the host doesn't permit more; `unified` for version 2.
pub(crate) fn leave_pod(settings: &Settings) -> Vec<String> {
    let Settings { short_id, started_in, processor_shares, .. } = settings;
    // One that ends may have removed the cgroup before it had a process.
    let join = |of: &Hierarchy| of.join(short_id, *processor_shares);
    let all = Hierarchy::list(Path::new(ROOT), started_in).into_iter();
    let failed = all.filter(|of| of.is_of_a_pod() && join(of).or_else(|_| join(of)).is_err());
    let name = |of: Hierarchy| match of.controllers.is_empty() {
        true => "unified".to_owned(),
        false => of.controllers,
    };
    failed.map(name).collect()
}

/// Removes the cgroups of monitors that have ended, except where `is_known` says otherwise of the short id. A cgroup
/// that has a process stays.
pub fn remove_unused(is_known: impl Fn(&str) -> bool) {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    for hierarchy in Hierarchy::list(Path::new(ROOT), &own).iter().filter(|of| of.has_own()) {
        for unused in fs::read_dir(hierarchy.root.join(ALL)).into_iter().flatten().flatten() {
            if !is_known(&unused.file_name().to_string_lossy()) {
                let _ = fs::remove_dir(unused.path());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_found_where_hosts_mount_them() {
        let dir = tempfile::tempdir().unwrap();
        let text = "4:memory:/kubepods/pod1/one\n3:cpu,cpuacct:/docker/two\n1:name=systemd:/\n0::/libpod-x:y\n";
        let found = Hierarchy::list(dir.path(), text);
        let roots: Vec<_> =
            found.iter().map(|of| of.root.strip_prefix(dir.path()).unwrap()).collect();
        assert_eq!(roots, ["memory", "cpu,cpuacct", "systemd", "unified"].map(Path::new));
        let of: Vec<_> = found.iter().map(|of| (of.has_own(), of.is_of_a_pod())).collect();
        assert_eq!(of, [(false, true), (true, false), (false, false), (true, true)]);
        assert_eq!(found[3].path, "/libpod-x:y");
        fs::write(dir.path().join("cgroup.controllers"), "").unwrap();
        assert_eq!(Hierarchy::list(dir.path(), "0::/x\n")[0].root, dir.path());
    }

    #[test]
    fn a_monitor_gets_its_containers_weight() {
        let dir = tempfile::tempdir().unwrap();
        let hierarchy = |controllers: &str| {
            let root = dir.path().join(if controllers.is_empty() { "two" } else { controllers });
            fs::create_dir_all(&root).unwrap();
            Hierarchy { root, controllers: controllers.to_owned(), path: "/kubepods/x".to_owned() }
        };
        for controllers in ["", "cpu", "memory"] {
            hierarchy(controllers).join("abc", Some(ProcessorShares(512))).unwrap();
        }
        let read = |path: &str| fs::read_to_string(dir.path().join(path)).unwrap();
        assert_eq!(read("two/cgpu/abc/cpu.weight"), "20");
        assert_eq!(read("two/cgpu/cgroup.subtree_control"), "+cpu");
        assert_eq!(read("two/cgpu/abc/cgroup.procs"), "0");
        assert_eq!(read("cpu/cgpu/abc/cpu.shares"), "512");
        assert_eq!(read("memory/cgroup.procs"), "0");
    }
}
