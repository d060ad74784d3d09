//! Where the driver's files go in a container: the edits they come to. Pure.
//!
//! All by mounts that the real runtime makes, so that nothing is executed from the image and
//! nothing written through a path of it (what NVIDIA's `ldconfig` and link hooks were broken by:
//! CVE-2024-0132, CVE-2025-23266, CVE-2025-23267, CVE-2025-23359). The libraries come as one
//! directory, mounted where the image's own dynamic linker looks before its system directories
//! ([`super::userland`]): a file mounted over `/etc/ld.so.cache` would make every `ldconfig` and so
//! every `apt-get install` in the container fail, and a file for each library in the system
//! directory would stay as an empty one in what is committed of the container.
//! `LD_LIBRARY_PATH` and `PATH` name it, too, for images without such a linker ([`super::path_variables`]).

use std::fmt;
use std::path::Path;

use thiserror::Error;

use crate::bundle::Mount;

use super::driver::{DriverFile, Use};
use super::tree;
use super::userland::{Linker, Shelf};

/// The program that everybody calls, scripts by its path; the others are found by `PATH`.
const CALLED_BY_PATH: &str = "/usr/bin/nvidia-smi";

// Of what is private, read-only, nosuid and nodev where it is made ([`super::tree`]), and so here.
const TREE: &[&str] = &["rbind"];
const FILE: &[&str] = &["bind", "ro", "nosuid", "nodev", "rprivate"];
const DATA: &[&str] = &["rbind", "ro", "nosuid", "nodev", "noexec", "rprivate"];
// A read-only socket can be connected to all the same, and its owner and mode are the host's.
const SOCKET: &[&str] = &["bind", "ro", "nosuid", "nodev", "noexec", "rprivate"];

/// What a mount point is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MountPoint<'a> {
    Directory,
    /// What this path on the host is: a file or a directory.
    Like(&'a str),
}

/// Why nothing can be mounted at a path of a container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// There is no mount point, and none can be made: `source` is mounted read-only at `at`; the image's
    /// own root, if that is `/`.
    ReadOnly {
        /// Where in the container.
        at: String,
        /// What is mounted there.
        source: String,
    },
    /// A directory is there, or a file where a directory must be.
    OtherKind {
        /// Where in the container.
        path: String,
        /// What is there.
        found: &'static str,
    },
    /// Links lead in a circle.
    LinkLoop {
        /// Where they begin.
        path: String,
    },
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::ReadOnly { at, source } if at == "/" => {
                write!(f, "the image's root {source} is on a read-only file system")
            }
            Obstacle::ReadOnly { at, source } => {
                write!(f, "{source} is mounted read-only at {at} and has no mount point for it")
            }
            Obstacle::OtherKind { path, found } => write!(f, "the container has {found} at {path}"),
            Obstacle::LinkLoop { path } => {
                write!(f, "links of the container lead in a circle at {path}")
            }
        }
    }
}

impl Obstacle {
    /// What to do about it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        match self {
            Obstacle::ReadOnly { at, .. } if at == "/" => {
                "have the image's root on a file system that can be written"
            }
            Obstacle::ReadOnly { .. } => {
                "mount it without ro, or below that directory, or make the mount point in it"
            }
            Obstacle::OtherKind { .. } | Obstacle::LinkLoop { .. } => {
                "remove that from the image or from what is mounted there"
            }
        }
    }
}

/// Why a container can't have the driver's files.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PlaceError {
    /// The directory fits nowhere.
    #[error(
        "the driver's libraries can't be mounted in the container: not at {} ({first}) and not at {} \
         ({second}); {}",
        tree::PLACES[0], tree::PLACES[1], second.remedy()
    )]
    NoDirectory {
        /// What is in the way at the first place.
        first: Obstacle,
        /// What is in the way at the second.
        second: Obstacle,
    },
    /// A library can't be mounted by its name.
    #[error(
        "the driver's library {path} can't be mounted in the container: {obstacle}; {}",
        obstacle.remedy()
    )]
    NoLibrary {
        /// Where in the container.
        path: String,
        /// What is in the way.
        obstacle: Obstacle,
    },
}

/// Where the driver's files go in a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Placed {
    pub mounts: Vec<Mount>,
    /// Where the directory of the host is.
    pub directory: Option<&'static str>,
    /// Paths that the container does without, each with what is in the way.
    pub left_out: Vec<(Obstacle, String)>,
}

/// The mounts that give a container `files`, whose libraries and programs are in the directory
/// `tree` of the host, if there is one, in an image with these linkers. `obstacle` says what is in the
/// way of a mount at a path.
///
/// With the directory, a container can do without the rest: variables name it. So it goes elsewhere if
/// something is in its way, and the others are left out.
///
/// # Errors
///
/// If the libraries can't be mounted.
pub fn mounts(
    tree: Option<&Path>,
    files: &[&DriverFile],
    linkers: &[Linker],
    obstacle: impl Fn(&str, MountPoint<'_>) -> Option<Obstacle>,
) -> Result<Placed, PlaceError> {
    let mut placed = Placed::default();
    if let Some(tree) = tree {
        let place = directory(|place| obstacle(place, MountPoint::Directory))?;
        placed.directory = Some(place);
        placed.mounts.push(mount(&tree::shared(tree).to_string_lossy(), place, TREE));
    }
    for linker in linkers {
        let of_width = |file: &&&DriverFile| matches!(&file.used_as, Use::Library { width, .. } if *width == linker.width);
        let mut libraries = files.iter().filter(of_width).peekable();
        if libraries.peek().is_none() {
            continue;
        }
        let system = match (&linker.shelf, tree) {
            (Shelf::Directory { system, below }, Some(tree)) => {
                let source = tree::shelf(tree, linker.width);
                let path = format!("{system}/{below}");
                match obstacle(&path, MountPoint::Directory) {
                    None => {
                        placed.mounts.push(mount(&source.to_string_lossy(), &path, TREE));
                        continue;
                    }
                    // What keeps a directory from being made keeps files from it, too.
                    Some(obstacle @ Obstacle::ReadOnly { .. }) => {
                        placed.left_out.push((obstacle, path));
                        continue;
                    }
                    Some(_) => system,
                }
            }
            (Shelf::Directory { system, .. } | Shelf::Files(system), _) => system,
        };
        for mount in libraries.flat_map(|file| by_names(file, system)) {
            match obstacle(&mount.destination, MountPoint::Like(&mount.source)) {
                None => placed.mounts.push(mount),
                Some(obstacle) if tree.is_some() => {
                    placed.left_out.push((obstacle, mount.destination));
                }
                Some(obstacle) => {
                    return Err(PlaceError::NoLibrary { path: mount.destination, obstacle });
                }
            }
        }
    }
    for file in files {
        let options = match file.used_as {
            Use::Library { .. } => continue,
            Use::Program if tree.is_some() && file.path != CALLED_BY_PATH => continue,
            Use::Program => FILE,
            Use::Data => DATA,
            Use::Socket => SOCKET,
        };
        if let Some(obstacle) = obstacle(&file.path, MountPoint::Like(&file.source)) {
            placed.left_out.push((obstacle, file.path.clone()));
            continue;
        }
        placed.mounts.push(match tree.and_then(|tree| tree::place_of(tree, file)) {
            Some(source) => mount(&source.to_string_lossy(), &file.path, TREE),
            None => mount(&file.source, &file.path, options),
        });
    }
    Ok(placed)
}

/// Where the directory of the host goes: at the first place where nothing is in its way.
fn directory(obstacle: impl Fn(&str) -> Option<Obstacle>) -> Result<&'static str, PlaceError> {
    let [first, second] = tree::PLACES;
    let Some(at_first) = obstacle(first) else { return Ok(first) };
    let Some(at_second) = obstacle(second) else { return Ok(second) };
    Err(PlaceError::NoDirectory { first: at_first, second: at_second })
}

/// A library by each of its names in a directory.
fn by_names(file: &DriverFile, directory: &str) -> Vec<Mount> {
    let Use::Library { names, .. } = &file.used_as else { return Vec::new() };
    let own = Path::new(&file.path).file_name().and_then(|name| name.to_str());
    let names = own.into_iter().chain(names.iter().map(String::as_str));
    names.map(|name| mount(&file.source, &format!("{directory}/{name}"), FILE)).collect()
}

fn mount(source: &str, destination: &str, options: &[&str]) -> Mount {
    Mount {
        source: source.to_owned(),
        destination: destination.to_owned(),
        kind: "bind".to_owned(),
        options: options.iter().map(|&option| option.to_owned()).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::driver::{Capability, Width};
    use super::*;

    fn file(path: &str, used_as: Use) -> DriverFile {
        DriverFile {
            source: format!("/host{path}"),
            path: path.into(),
            used_as,
            capabilities: vec![Capability::Compute],
        }
    }

    fn library(path: &str, names: &[&str], width: Width) -> DriverFile {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        file(path, Use::Library { names, width })
    }

    fn placed(tree: Option<&str>, shelf: Shelf) -> Vec<(String, String)> {
        let files = [
            library("/usr/lib64/libcuda.so.535.1", &["libcuda.so.1"], Width::Native),
            file("/usr/bin/nvidia-smi", Use::Program),
            file("/usr/bin/nvidia-debugdump", Use::Program),
            file("/etc/OpenCL/vendors/nvidia.icd", Use::Data),
            file("/run/nvidia-persistenced/socket", Use::Socket),
        ];
        let files: Vec<_> = files.iter().collect();
        let linkers = [
            Linker { width: Width::Native, shelf },
            Linker { width: Width::Compat32, shelf: Shelf::Files("/usr/lib32") },
        ];
        mounts(tree.map(Path::new), &files, &linkers, |_, _| None)
            .unwrap()
            .mounts
            .into_iter()
            .map(|mount| (mount.source, mount.destination))
            .collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    /// The driver's libraries are mounted as a directory if the linker takes one, and by their
    /// names otherwise.
    #[test]
    fn libraries_mount_as_a_directory_if_linkers_allow() {
        let tree = "/run/cgpu/driver/a/9";
        let smi = ("/host/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi");
        let icd = ("/host/etc/OpenCL/vendors/nvidia.icd", "/etc/OpenCL/vendors/nvidia.icd");
        let debugdump = ("/host/usr/bin/nvidia-debugdump", "/usr/bin/nvidia-debugdump");
        let socket = ("/host/run/nvidia-persistenced/socket", "/run/nvidia-persistenced/socket");
        let whole = ("/run/cgpu/driver/a/9/nvidia", "/usr/local/nvidia");
        let called = ("/run/cgpu/driver/a/9/nvidia/bin/nvidia-smi", smi.1);
        let datum = ("/run/cgpu/driver/a/9/data/etc/OpenCL/vendors/nvidia.icd", icd.1);
        let own = ("/host/usr/lib64/libcuda.so.535.1", "/usr/lib64/libcuda.so.535.1");
        let soname = ("/host/usr/lib64/libcuda.so.535.1", "/usr/lib64/libcuda.so.1");
        let libraries = format!("{tree}/nvidia/lib64");
        let directory = Shelf::Directory { system: "/usr/lib64", below: "tls" };
        for (tree, shelf, wanted) in [
            (
                Some(tree),
                directory.clone(),
                &[whole, (&libraries, "/usr/lib64/tls"), called, datum, socket][..],
            ),
            (Some(tree), Shelf::Files("/usr/lib64"), &[whole, own, soname, called, datum, socket]),
            (None, directory, &[own, soname, smi, debugdump, icd, socket]),
        ] {
            assert_eq!(placed(tree, shelf), pairs(wanted));
        }
    }

    /// But for what is so where it's made; `tests/driver` looks at the mounts of a container.
    #[test]
    fn mounts_are_read_only_nosuid_and_nodev() {
        let files =
            [file(CALLED_BY_PATH, Use::Program), file("/b", Use::Data), file("/c", Use::Socket)];
        let files: Vec<_> = files.iter().collect();
        for tree in [None, Some(Path::new("/t"))] {
            for mount in mounts(tree, &files, &[], |_, _| None).unwrap().mounts {
                let has = |option: &str| mount.options.iter().any(|there| there == option);
                let here = has("ro") && has("nosuid") && has("nodev");
                assert_ne!(here, mount.source.starts_with("/t/"), "{mount:?}");
            }
        }
    }

    fn read_only(at: &str) -> Obstacle {
        Obstacle::ReadOnly { at: at.into(), source: "/srv/x".into() }
    }

    /// Where the files go if nothing can be mounted below one of `blocked`.
    fn placed_around(
        tree: Option<&str>,
        shelf: Shelf,
        blocked: &[&str],
    ) -> Result<(Vec<String>, Vec<String>), String> {
        let files = [
            library("/usr/lib64/libcuda.so.535.1", &[], Width::Native),
            file(CALLED_BY_PATH, Use::Program),
            file("/etc/OpenCL/vendors/nvidia.icd", Use::Data),
        ];
        let files: Vec<_> = files.iter().collect();
        let obstacle = |path: &str, _: MountPoint<'_>| {
            let at = blocked.iter().find(|at| Path::new(path).starts_with(at))?;
            Some(read_only(at))
        };
        let linkers = [Linker { width: Width::Native, shelf }];
        let placed = mounts(tree.map(Path::new), &files, &linkers, obstacle)
            .map_err(|error| error.to_string())?;
        let mounts = placed.mounts.into_iter().map(|mount| mount.destination).collect();
        Ok((mounts, placed.left_out.into_iter().map(|(_, path)| path).collect()))
    }

    /// Below a read-only mount without a mount point, files go elsewhere or are left out.
    #[test]
    fn files_avoid_read_only_mounts_or_are_omitted() {
        let shelf = || Shelf::Directory { system: "/usr/lib64", below: "tls" };
        let (smi, icd) = (CALLED_BY_PATH, "/etc/OpenCL/vendors/nvidia.icd");
        let (usual, other, tls) = ("/usr/local/nvidia", "/nvidia-driver", "/usr/lib64/tls");
        for (blocked, mounted, left_out) in [
            (&["/srv"][..], &[usual, tls, smi, icd][..], &[][..]),
            (&["/usr/local"], &[other, tls, smi, icd], &[]),
            (&["/usr"], &[other, icd], &[tls, smi]),
            (&["/usr/lib64"], &[usual, smi, icd], &[tls]),
            (&["/usr/bin"], &[usual, tls, icd], &[smi]),
            (&["/etc"], &[usual, tls, smi], &[icd]),
        ] {
            let texts = |texts: &[&str]| texts.iter().map(|&text| text.into()).collect::<Vec<_>>();
            let expected = Ok((texts(mounted), texts(left_out)));
            assert_eq!(placed_around(Some("/t"), shelf(), blocked), expected, "{blocked:?}");
        }
        let refused = placed_around(Some("/t"), shelf(), &["/usr", "/nvidia-driver"]).unwrap_err();
        assert_eq!(
            refused,
            "the driver's libraries can't be mounted in the container: not at /usr/local/nvidia \
             (/srv/x is mounted read-only at /usr and has no mount point for it) and not at \
             /nvidia-driver (/srv/x is mounted read-only at /nvidia-driver and has no mount point for \
             it); mount it without ro, or below that directory, or make the mount point in it"
        );
        let refused = placed_around(None, shelf(), &["/usr"]).unwrap_err();
        assert_eq!(
            refused,
            "the driver's library /usr/lib64/libcuda.so.535.1 can't be mounted in the container: \
             /srv/x is mounted read-only at /usr and has no mount point for it; mount it without ro, \
             or below that directory, or make the mount point in it"
        );
    }

    /// Libraries are mounted by their names if their directory can't be mounted.
    #[test]
    fn libraries_mount_by_name_if_their_directory_fails() {
        let library = library("/usr/lib64/libcuda.so.535.1", &[], Width::Native);
        let shelf = Shelf::Directory { system: "/usr/lib64", below: "tls" };
        let circle = |path: &str, _: MountPoint<'_>| {
            let path = path.to_owned();
            path.ends_with("/tls").then_some(Obstacle::LinkLoop { path })
        };
        let linkers = [Linker { width: Width::Native, shelf }];
        let placed = mounts(Some(Path::new("/t")), &[&library], &linkers, circle).unwrap();
        assert_eq!(placed.mounts[1].destination, "/usr/lib64/libcuda.so.535.1");
        assert_eq!(placed.left_out, []);
    }
}
