//! Whether what a specification says is still so: nodes, their numbers, files, the driver.
//!
//! Owns the check, once of each path, and what is reported of it. A specification is written once and
//! outlives what it describes: a reboot gives nvidia-uvm another major number, an update gives
//! the libraries other names. Must not know where devices and mounts go.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};
use thiserror::Error;

use super::merger::{Collected, HostNode};
use super::node_kind::{Nature, nature};
use super::spec::Node;
use nvrm::{NVIDIA_MAJOR, Version};

/// Libraries whose names end in the driver's version.
const VERSIONED: [&str; 2] = ["libcuda.so.", "libnvidia-ml.so."];

/// The oldest branch whose libraries can be in a container. Tegra has a `libcuda.so.1.1`.
const BRANCH_MIN: u16 = 100;

/// Most bytes read of `/proc/driver/nvidia/version`.
const BANNER_BYTES_MAX: u64 = 4096;

/// What the host says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFacts {
    /// Where the paths of specifications begin: `/`.
    pub root: PathBuf,
    /// The version of the kernel's driver; `None` if it can't be determined.
    pub driver: Option<Version>,
}

impl HostFacts {
    /// What `proc_root` reports.
    #[must_use]
    pub fn read(proc_root: &Path) -> Self {
        let mut banner = Vec::new();
        let driver = File::open(proc_root.join("driver/nvidia/version"))
            .and_then(|file| file.take(BANNER_BYTES_MAX).read_to_end(&mut banner))
            .ok()
            .and_then(|_| Version::in_banner(&String::from_utf8_lossy(&banner)));
        HostFacts { root: "/".into(), driver }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }
}

/// What is no longer as a specification says.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum Stale {
    /// It is for another driver.
    #[error("{} is for driver {stated} (it names {path}), and {running} is running", file.display())]
    Driver {
        file: PathBuf,
        /// The library.
        path: String,
        /// Its version.
        stated: Version,
        /// The kernel's.
        running: Version,
    },
    /// A node has other numbers.
    #[error(
        "{} says that {path} is {}:{}, and it is {}:{} since the driver was loaded",
        file.display(), stated.0, stated.1, found.0, found.1
    )]
    Numbers {
        file: PathBuf,
        /// The node on the host.
        path: String,
        /// Major and minor number in the file.
        stated: (i64, i64),
        /// Those on the host.
        found: (i64, i64),
    },
    /// A node isn't there.
    #[error(
        "{} names {path}, and there is no such node; load the driver (`{}`)",
        file.display(), creator(path)
    )]
    NoNode {
        file: PathBuf,
        /// The node on the host.
        path: String,
    },
    /// A node is no character device.
    #[error("{} names {path}, which is no character device", file.display())]
    NotADevice {
        file: PathBuf,
        /// The node on the host.
        path: String,
    },
    /// The source of a mount, or the program of a hook, isn't there.
    #[error("{} names {path}, and there is no such file", file.display())]
    NoFile {
        file: PathBuf,
        /// The missing one.
        path: String,
    },
}

/// What makes the node of that name.
fn creator(path: &str) -> &'static str {
    if path.ends_with("/nvidia-modeset") { "nvidia-modprobe -m" } else { "nvidia-modprobe -u -c=0" }
}

impl Stale {
    #[must_use]
    pub fn file(&self) -> &Path {
        match self {
            Stale::Driver { file, .. }
            | Stale::Numbers { file, .. }
            | Stale::NoNode { file, .. }
            | Stale::NotADevice { file, .. }
            | Stale::NoFile { file, .. } => file,
        }
    }
}

/// The nodes of `collected` as they are, in their order.
///
/// # Errors
///
/// What is no longer so, with what explains most at the head.
pub(super) fn lookup(
    collected: &Collected<'_>,
    host: &HostFacts,
) -> Result<Vec<HostNode>, Vec<Stale>> {
    let (mut stale, mut seen) = (Vec::new(), Vec::new());
    let stated = collected.mounts().iter().find_map(|mount| {
        let (stated, running) = (version(&mount.item.host_path)?, host.driver?);
        (stated != running).then(|| Stale::Driver {
            file: mount.file.to_owned(),
            path: mount.item.host_path.clone(),
            stated,
            running,
        })
    });
    stale.extend(stated);
    for node in collected.nodes() {
        match check_at(node.file, node.item, host) {
            Ok(found) => seen.push(found),
            Err(problem) => stale.push(problem),
        }
    }
    let mounts = collected.mounts().iter().filter(|mount| mount.item.is_bind());
    let mounts = mounts.map(|mount| (mount.file, &mount.item.host_path));
    let hooks = collected.hooks().iter().map(|hook| (hook.file, &hook.item.path));
    // NVIDIA's four hooks are of one program.
    let mut checked = HashSet::new();
    for (file, path) in mounts.chain(hooks) {
        if checked.insert(path) && fs::metadata(host.at(path)).is_err() {
            stale.push(Stale::NoFile { file: file.to_owned(), path: path.clone() });
        }
    }
    if stale.is_empty() { Ok(seen) } else { Err(stale) }
}

fn check_at(file: &Path, node: &Node, host: &HostFacts) -> Result<HostNode, Stale> {
    let (file, path) = (|| file.to_owned(), || node.source().to_owned());
    let Ok(meta) = fs::metadata(host.at(node.source())) else {
        return Err(Stale::NoNode { file: file(), path: path() });
    };
    if !meta.file_type().is_char_device() {
        let is_file = meta.is_file() && node.major == 0;
        return if is_file {
            Ok(HostNode::File)
        } else {
            Err(Stale::NotADevice { file: file(), path: path() })
        };
    }
    let found = (i64::from(major(meta.rdev())), i64::from(minor(meta.rdev())));
    // A GPU's node is stated by its name, too: behind it is that GPU and nothing else.
    let stated = match nature(node, None) {
        Nature::Gpu(gpus) => {
            let other = gpus.iter().find(|minor| found != (NVIDIA_MAJOR, **minor));
            other.map_or(found, |minor| (NVIDIA_MAJOR, *minor))
        }
        _ if node.major == 0 => found,
        _ => (node.major, node.minor),
    };
    if stated != found {
        return Err(Stale::Numbers { file: file(), path: path(), stated, found });
    }
    Ok(HostNode::Device { major: found.0, minor: found.1, mode: meta.mode() })
}

/// The driver's version that the name of a library ends in.
fn version(path: &str) -> Option<Version> {
    let name = Path::new(path).file_name()?.to_str()?;
    let ending = VERSIONED.iter().find_map(|library| name.strip_prefix(library))?;
    ending.parse().ok().filter(|version: &Version| version.branch >= BRANCH_MIN)
}
