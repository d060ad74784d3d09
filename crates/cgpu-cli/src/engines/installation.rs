//! What an engine consists of on a host: its programs, its files in the order of reading, its
//! units. Each engine's module has its own.

use std::path::{Path, PathBuf};

use super::containerd::{Release, imports};
use super::distributions::k0s;
use super::host_tree::Tree;
use super::{Kind, containerd, crio, distributions, docker, podman};

/// Most files of one engine that are read.
pub(crate) const FILES_MAX: usize = 64;

/// What setup calls its own file in a directory of containerd's.
pub(super) const DROP_IN: &str = "99-cgpu.toml";

#[derive(Debug)]
pub(crate) struct Installation {
    pub(super) name: &'static str,
    /// The programs by which it is known to be installed.
    pub(crate) programs: &'static [&'static str],
    /// Its containerd, if it has one.
    pub(crate) containerd: Option<&'static str>,
    /// The socket of a distribution's containerd.
    pub(super) socket: Option<&'static str>,
    /// The engine's own file, which its administrator edits, or which a distribution of Kubernetes
    /// writes.
    pub(crate) main_file: &'static str,
    /// The file that it reads before that one.
    pub(super) vendor_file: Option<&'static str>,
    /// The directories whose files it reads after that one.
    pub(super) directories: &'static [&'static str],
    /// The file of ours in one of them.
    pub(super) drop_in: Option<&'static str>,
    /// The names that its unit may have; none if it reads its files at each start of a container.
    pub(super) units: &'static [&'static str],
}

impl Installation {
    pub(super) const NONE: Installation = Installation {
        name: "",
        programs: &[],
        containerd: None,
        socket: None,
        main_file: "",
        vendor_file: None,
        directories: &[],
        drop_in: None,
        units: &[],
    };
}

impl Kind {
    pub(crate) fn installation(self) -> &'static Installation {
        match self {
            Kind::Docker => &docker::INSTALLATION,
            Kind::Containerd => &containerd::INSTALLATION,
            Kind::K3s => &distributions::K3S,
            Kind::Rke2 => &distributions::RKE2,
            Kind::MicroK8s => &distributions::MICROK8S,
            Kind::K0s => &k0s::K0S,
            Kind::Crio => &crio::INSTALLATION,
            Kind::Podman => &podman::INSTALLATION,
        }
    }
}

/// The files of an engine's configuration, whether they exist or not: if two
/// differ, the later one counts. `release` is that of its containerd, if known; `also` is
/// a file that is to be made, which is listed where it would be read.
pub(crate) fn files(
    tree: &Tree,
    kind: Kind,
    release: Option<Release>,
    also: Option<&Path>,
) -> Vec<PathBuf> {
    let installation = kind.installation();
    let mut files = match kind {
        Kind::Docker | Kind::Crio | Kind::Podman => with_drop_ins(tree, installation),
        _ => imports::files(tree, Path::new(installation.main_file), release, also),
    };
    if kind == Kind::K0s {
        files.extend(k0s::merged_files(tree, also));
    }
    files.truncate(FILES_MAX);
    files
}

fn with_drop_ins(tree: &Tree, installation: &Installation) -> Vec<PathBuf> {
    let own = installation.vendor_file.into_iter().chain([installation.main_file]);
    let dropped = installation.directories.iter().flat_map(|directory| tree.list(directory));
    let dropped = dropped.filter(|path| path.extension().is_some_and(|end| end == "conf"));
    own.map(PathBuf::from).chain(dropped).collect()
}
