//! Facts of the kernel, of the backend that isolates, and of the real runtimes.
//!
//! Owns asking them; the gate's abilities are the gate's own probes. Must not judge.

use std::path::Path;

use super::facts::{Cgroups, Isolation, Observed, Runtime};
use crate::engines::child_output;
use crate::engines::host_tree::Tree;
use cgpu::backend::gate::check_kernel;
use cgpu::host::Host;
use cgpu_monitor::daemon::check_sizes;
use cgpu_monitor::gate::entry;

/// Runtimes that are known to work, whether configured or not.
const KNOWN: [&str; 2] = ["runc", "crun"];

/// Kernel and backend of `host`, whose paths are as we reach them.
pub(super) fn inspect(tree: &Tree, host: &Host) -> Isolation {
    // The kernel's own, whatever [driver] proc_root says of where a driver is reported.
    let kernel = &tree.at("/proc/sys/kernel");
    let text = |path: &str| match crate::engines::host_tree::read(&kernel.join(path)) {
        Observed::Present(text) => text.trim().to_owned(),
        _ => String::new(),
    };
    let release = text("osrelease");
    let ability =
        check_kernel(&release, &text("seccomp/actions_avail"), &text("randomize_va_space"));
    let abilities = entry::abilities();
    Isolation {
        kernel: release,
        ability: ability.map_err(|error| error.to_string()),
        listener: abilities.listener,
        layout: check_sizes().map_err(|error| error.to_string()),
        killable_wait: abilities.killable_wait,
        cgroups: cgroups(&tree.at("/sys/fs/cgroup")),
        backend: host.backend,
        why: host.why_backend,
        usable: host.isolation(host.backend).usable().map_err(|error| error.to_string()),
    }
}

/// How cgroups are mounted at `mount`.
fn cgroups(mount: &Path) -> Cgroups {
    let has = |path: &str| mount.join(path).exists();
    if has("cgroup.controllers") {
        Cgroups::V2
    } else if has("unified/cgroup.procs") {
        Cgroups::Hybrid
    } else if has("memory") || has("devices") || has("systemd") {
        Cgroups::V1
    } else {
        Cgroups::Nowhere
    }
}

/// The configured candidates, then those of [`KNOWN`] that are there next to them. On
/// another host's files none is run.
pub(super) fn runtimes(tree: &Tree, candidates: &[String]) -> Vec<Runtime> {
    let inspect = |name: &str| {
        let path = tree.program(name);
        let version = match &path {
            Some(path) if tree.is_own() => child_output::version_of(path),
            Some(_) => Err("it is another host's, and not run here".to_owned()),
            None => Err("it isn't there".to_owned()),
        };
        Runtime { name: name.to_owned(), path, version }
    };
    let mut found: Vec<Runtime> =
        candidates.iter().filter(|name| !name.is_empty()).map(|name| inspect(name)).collect();
    for name in KNOWN.iter().filter(|name| !candidates.iter().any(|given| given == *name)) {
        let known = inspect(name);
        if known.path.is_some() && !found.iter().any(|other| other.path == known.path) {
            found.push(known);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn cgroup_version_is_detected_by_mounted_files() {
        for (files, kind) in [
            (&[][..], Cgroups::Nowhere),
            (&["cgroup.controllers", "memory"], Cgroups::V2),
            (&["memory/tasks", "unified/cgroup.procs"], Cgroups::Hybrid),
            (&["memory/tasks"], Cgroups::V1),
        ] {
            let dir = tempfile::tempdir().unwrap();
            for file in files {
                let path = dir.path().join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "").unwrap();
            }
            assert_eq!(cgroups(dir.path()), kind, "{files:?}");
        }
    }
}
