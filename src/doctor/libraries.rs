//! Which of the driver's user-space libraries a host has: by their files' names.
//!
//! Owns that one look. Must not load any: the name ends in the driver's version, which is
//! all that is asked for. Whoever knows the driver's files better takes its place.

use std::fs;
use std::path::{Path, PathBuf};

use crate::rm::Version;

/// Libraries that every driver brings, up to where their version begins.
const NAMES: [&str; 2] = ["libcuda.so.", "libnvidia-ml.so."];

/// Most entries read of one directory.
const ENTRIES_MAX: usize = 65_536;

/// A library of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// The driver's version that it belongs to.
    pub version: Version,
    /// Its file.
    pub path: PathBuf,
}

/// The newest of the driver's libraries under `driver_root`, as NVIDIA's packages, the
/// distributions' and driver containers place them.
#[must_use]
pub fn newest_library(driver_root: &Path) -> Option<Library> {
    let arch = std::env::consts::ARCH;
    let directories = [
        format!("usr/lib/{arch}-linux-gnu"),
        format!("usr/lib/{arch}-linux-gnu/nvidia/current"),
        "usr/lib64".to_owned(),
        "usr/lib64/nvidia".to_owned(),
        "usr/lib".to_owned(),
        format!("lib/{arch}-linux-gnu"),
        "lib64".to_owned(),
        "usr/local/nvidia/lib64".to_owned(),
        "home/kubernetes/bin/nvidia/lib64".to_owned(),
    ];
    let found = directories.iter().flat_map(|directory| {
        let entries = fs::read_dir(driver_root.join(directory)).into_iter().flatten();
        entries.take(ENTRIES_MAX).filter_map(Result::ok).filter_map(|entry| {
            let name = entry.file_name();
            let version = version_in(name.to_str()?)?;
            Some(Library { version, path: entry.path() })
        })
    });
    // The first of several: the same file by another directory's name.
    found.reduce(|newest, other| if other.version > newest.version { other } else { newest })
}

/// The driver's version in a library's name; `libcuda.so.1` has none.
fn version_in(name: &str) -> Option<Version> {
    NAMES.iter().find_map(|library| name.strip_prefix(library)).and_then(|end| end.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_version_is_found_wherever_it_lies() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(newest_library(root.path()), None);
        let add = |path: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            path
        };
        add("usr/lib64/libcuda.so.1");
        add("usr/lib64/libcuda.so");
        add("usr/lib64/libcuda.so.535.161.08.bak");
        add("usr/lib64/libcudart.so.12.4.99");
        assert_eq!(newest_library(root.path()), None);
        add("usr/lib64/libcuda.so.535.161.08");
        let path = add("usr/lib/libnvidia-ml.so.550.54.14");
        let version = "550.54.14".parse().unwrap();
        assert_eq!(newest_library(root.path()), Some(Library { version, path }));
    }
}
