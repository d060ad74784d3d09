//! A real driver, NVIDIA's of the 535 branch, as distributions install it.
//!
//! The files are those of Debian's packages; see `tests/driver-files` for how they come here and
//! for what stands in place of the packages' scripts. There is no module, and there are no device
//! nodes but plain files that a test asks for.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::{Scratch, tree};

/// Who has installed the driver, and so where its files lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Libraries in a directory of their own, with absolute links to them by way of
    /// `/etc/alternatives`. A whole Debian lies around it.
    Debian,
    /// `/usr/lib/x86_64-linux-gnu`.
    Ubuntu,
    /// `/usr/lib64`, and 32-bit libraries in `/usr/lib`.
    Rhel,
    /// `/usr/lib64`, and Vulkan's files in `/etc`.
    Suse,
    /// `/usr/lib`, and 32-bit libraries in `/usr/lib32`.
    Arch,
    /// `lib64` and `bin`, with nothing around them and no cache of a loader.
    ContainerOs,
    /// The root that a driver container shows in `/run/nvidia/driver`, like Ubuntu's.
    DriverContainer,
}

impl Layout {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Debian,
        Self::Ubuntu,
        Self::Rhel,
        Self::Suse,
        Self::Arch,
        Self::ContainerOs,
        Self::DriverContainer,
    ];

    /// The tree's name, and the driver's root in it.
    fn item(self) -> (&'static str, &'static str) {
        match self {
            Self::Debian => ("driver", ""),
            Self::Ubuntu => ("driver-ubuntu", ""),
            Self::Rhel => ("driver-rhel", ""),
            Self::Suse => ("driver-suse", ""),
            Self::Arch => ("driver-arch", ""),
            Self::ContainerOs => ("driver-cos", "home/kubernetes/bin/nvidia"),
            Self::DriverContainer => ("driver-container", "run/nvidia/driver"),
        }
    }

    /// Where the 64-bit libraries themselves lie, below the driver's root.
    pub fn libraries(self) -> &'static str {
        match self {
            Self::Debian => "usr/lib/x86_64-linux-gnu/nvidia/current",
            Self::Ubuntu | Self::DriverContainer => "usr/lib/x86_64-linux-gnu",
            Self::Rhel | Self::Suse => "usr/lib64",
            Self::Arch => "usr/lib",
            Self::ContainerOs => "lib64",
        }
    }

    /// Where programs lie, below the driver's root.
    pub fn programs(self) -> &'static str {
        match self {
            Self::ContainerOs => "bin",
            _ => "usr/bin",
        }
    }

    /// The driver's root that all tests share and none writes to.
    #[track_caller]
    pub fn root(self) -> PathBuf {
        let (item, root) = self.item();
        let tree = tree::made(item);
        if root.is_empty() { tree } else { tree.join(root) }
    }

    /// A driver of the scratch's own, whose files are below its directory `name`.
    #[track_caller]
    pub fn install(self, scratch: &Scratch, name: &str) -> Driver {
        let (item, root) = self.item();
        let root = tree::copy(scratch, name, &tree::made(item)).join(root);
        Driver { layout: self, root }
    }
}

/// The root of the driver as Debian installs it, that all tests share and none writes to.
#[track_caller]
pub fn root() -> PathBuf {
    Layout::Debian.root()
}

/// The driver's version, as `535.261.03`.
#[track_caller]
pub fn version() -> String {
    root();
    tree::said("driver-version")
}

/// A driver that a test may change.
#[derive(Debug)]
pub struct Driver {
    layout: Layout,
    root: PathBuf,
}

impl Driver {
    /// What `driver.root` is to be.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// How it is installed.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The path of a file below the root, through links that are meant to be followed in it.
    ///
    /// # Panics
    ///
    /// Where there is none.
    #[track_caller]
    pub fn file(&self, below: &str) -> PathBuf {
        resolve(&self.root, below)
    }

    /// Plain files in place of device nodes: `nvidiactl`, `nvidia0`, `nvidia-caps/nvidia-cap1`.
    pub fn nodes(&self, names: &[&str]) {
        for name in names {
            self.write(&format!("dev/{name}"), "");
        }
    }

    /// Writes a file below the root, and the directories above it.
    pub fn write(&self, below: &str, contents: impl AsRef<[u8]>) {
        let path = self.root.join(below);
        fs::create_dir_all(path.parent().expect("a file lies in a directory"))
            .and_then(|()| fs::write(path, contents))
            .expect("a file can be written in a scratch");
    }

    /// Makes a link below the root.
    pub fn link(&self, target: &str, below: &str) {
        let path = self.root.join(below);
        fs::create_dir_all(path.parent().expect("a link lies in a directory"))
            .and_then(|()| symlink(target, path))
            .expect("a link can be made in a scratch");
    }

    /// Removes a file or a link below the root.
    #[track_caller]
    pub fn remove(&self, below: &str) {
        fs::remove_file(self.root.join(below)).expect("what is removed is there");
    }
}

/// The path of a file below `root`, where absolute links mean paths below it.
///
/// # Panics
///
/// Where there is none, or links go round in circles.
#[track_caller]
pub fn resolve(root: &Path, below: &str) -> PathBuf {
    let parts = |path: &Path| -> Vec<_> {
        let part = |part: std::path::Component<'_>| part.as_os_str().to_owned();
        path.components().map(part).filter(|part| part != "/" && part != ".").rev().collect()
    };
    let (mut found, mut rest, mut links) = (root.to_owned(), parts(Path::new(below)), 0);
    while let Some(part) = rest.pop() {
        if part == ".." {
            if found != root {
                found.pop();
            }
            continue;
        }
        let next = found.join(part);
        match fs::read_link(&next) {
            Err(_) => found = next,
            Ok(target) => {
                links += 1;
                assert!(links <= 40, "{below} in {} is a circle", root.display());
                if target.is_absolute() {
                    found = root.to_owned();
                }
                rest.extend(parts(&target));
            }
        }
    }
    assert!(found.exists(), "{below} is not in {}: no {}", root.display(), found.display());
    found
}
