//! Where the driver's files go in a container: the edits they come to. Pure.
//!
//! All by mounts that the real runtime makes, so that nothing is executed from the image and
//! nothing written through a path of it (what NVIDIA's `ldconfig` and link hooks were broken by:
//! CVE-2024-0132, CVE-2025-23266, CVE-2025-23267, CVE-2025-23359). The libraries come as one
//! directory, mounted where the image's own dynamic linker looks before its system directories
//! ([`super::userland`]): a file mounted over `/etc/ld.so.cache` would make every `ldconfig` and so
//! every `apt-get install` in the container fail, and a file for each library in the system
//! directory would stay as an empty one in what is committed of the container.
//! `LD_LIBRARY_PATH` and `PATH` name it, too, for images without such a linker.

use std::path::Path;

use crate::bundle::Mount;

use super::driver::{DriverFile, Use};
use super::tree::{self, IN_CONTAINER};
use super::userland::{Linker, Shelf};

/// The variables that name the directory, and what of it; one that isn't there is made where a
/// program can do without it.
const VARIABLES: &[(&str, &str, bool)] =
    &[("LD_LIBRARY_PATH", tree::LIBRARIES, true), ("PATH", tree::PROGRAMS, false)];

/// The program that everybody calls, scripts by its path; the others are found by `PATH`.
const CALLED_BY_PATH: &str = "/usr/bin/nvidia-smi";

// Of what is private, read-only, nosuid and nodev where it is made ([`super::tree`]), and so here.
const TREE: &[&str] = &["rbind"];
const FILE: &[&str] = &["bind", "ro", "nosuid", "nodev", "rprivate"];
const DATA: &[&str] = &["rbind", "ro", "nosuid", "nodev", "noexec", "rprivate"];
// A read-only socket can be connected to all the same, and its owner and mode are the host's.
const SOCKET: &[&str] = &["bind", "ro", "nosuid", "nodev", "noexec", "rprivate"];

/// The mounts that give a container `files`, whose libraries and programs are in the directory
/// `tree` of the host, if there is one, in an image with these linkers.
#[must_use]
pub fn mounts(tree: Option<&Path>, files: &[&DriverFile], linkers: &[Linker]) -> Vec<Mount> {
    let mut mounts = Vec::new();
    if let Some(tree) = tree {
        mounts.push(mount(&tree::shared(tree).to_string_lossy(), IN_CONTAINER, TREE));
    }
    for linker in linkers {
        let of_width = |file: &&&DriverFile| matches!(&file.used_as, Use::Library { width, .. } if *width == linker.width);
        let mut libraries = files.iter().filter(of_width).peekable();
        match (&linker.shelf, tree) {
            _ if libraries.peek().is_none() => {}
            (Shelf::Directory { system, below }, Some(tree)) => {
                let source = tree::shelf(tree, linker.width);
                let path = format!("{system}/{below}");
                mounts.push(mount(&source.to_string_lossy(), &path, TREE));
            }
            (Shelf::Directory { system, .. } | Shelf::Files(system), _) => {
                mounts.extend(libraries.flat_map(|file| by_names(file, system)));
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
        mounts.push(match tree.and_then(|tree| tree::place_of(tree, file)) {
            Some(source) => mount(&source.to_string_lossy(), &file.path, TREE),
            None => mount(&file.source, &file.path, options),
        });
    }
    mounts
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

/// What becomes of the variables of a process (`NAME=value`; of a name given twice the last
/// counts) in a container that has the directory: those that change.
#[must_use]
pub fn variables(env: &[impl AsRef<str>]) -> Vec<(String, String)> {
    let value = |name: &str| {
        let mut items = env.iter().rev().filter_map(|item| item.as_ref().split_once('='));
        items.find(|(there, _)| *there == name).map(|(_, value)| value)
    };
    let mut changed = Vec::new();
    for (name, directory, is_made) in VARIABLES {
        let directory = format!("{IN_CONTAINER}/{directory}");
        let value = match value(name).filter(|value| !value.is_empty()) {
            Some(value) if value.split(':').any(|part| part.trim_end_matches('/') == directory) => {
                continue;
            }
            // After all of the image's own: what it has there it has for a reason.
            Some(value) => format!("{value}:{directory}"),
            None if *is_made => directory,
            None => continue,
        };
        changed.push(((*name).to_owned(), value));
    }
    changed
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
        mounts(tree.map(Path::new), &files, &linkers)
            .into_iter()
            .map(|mount| (mount.source, mount.destination))
            .collect()
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect()
    }

    #[test]
    fn libraries_come_as_a_directory_where_the_linker_takes_one() {
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
    fn everything_is_read_only_and_nothing_is_a_device_or_setuid() {
        let files =
            [file(CALLED_BY_PATH, Use::Program), file("/b", Use::Data), file("/c", Use::Socket)];
        let files: Vec<_> = files.iter().collect();
        for tree in [None, Some(Path::new("/t"))] {
            for mount in mounts(tree, &files, &[]) {
                let has = |option: &str| mount.options.iter().any(|there| there == option);
                let here = has("ro") && has("nosuid") && has("nodev");
                assert_ne!(here, mount.source.starts_with("/t/"), "{mount:?}");
            }
        }
    }

    #[test]
    fn variables_name_the_directory_after_all_that_the_image_names() {
        for (env, wanted) in [
            (&[][..], &[("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")][..]),
            (&["LD_LIBRARY_PATH="], &[("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64")]),
            (
                &["LD_LIBRARY_PATH=/x", "PATH=/bin", "LD_LIBRARY_PATH=/y"],
                &[
                    ("LD_LIBRARY_PATH", "/y:/usr/local/nvidia/lib64"),
                    ("PATH", "/bin:/usr/local/nvidia/bin"),
                ],
            ),
            (&["PATH=/usr/local/nvidia/bin/:/bin", "LD_LIBRARY_PATH=/usr/local/nvidia/lib64"], &[]),
        ] {
            assert_eq!(variables(env), pairs(wanted), "{env:?}");
        }
    }
}
