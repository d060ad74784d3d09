//! The driver's device nodes in a directory of the host: which are missing, and how they are made.
//!
//! After a boot the nodes are there only if some program of NVIDIA's made them, and `nvidia-uvm` only
//! if a CUDA program ran. A node is made by the kernel's own numbers, in a directory that is opened
//! without following its last component, and never over anything that is there: what a container or
//! an image can write to plays no part. No module is loaded here.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, RenameFlags, StatxFlags, Uid, chmodat, chownat,
    makedev, mknodat, renameat_with, statx, unlinkat,
};
use thiserror::Error;

use super::device_numbers::{Module, NodeRights, identity};

/// Why the driver has no usable node in a directory of the host.
#[derive(Debug, Error)]
pub enum HostNodeError {
    /// The kernel has no such device.
    #[error(
        "{} is missing: the kernel module {module} isn't loaded; load it and make the node with \
         `cgpu nodes`, and at every boot with `systemctl enable cgpu-nodes`",
        path.display()
    )]
    NotLoaded {
        /// The node.
        path: PathBuf,
        /// What has to be loaded.
        module: Module,
    },
    /// The driver has no such GPU.
    #[error(
        "{} is missing: the driver has no GPU of that minor number; `nvidia-smi` shows which GPUs \
         are there, `cgpu gpus --refresh` has cgpu read them again",
        path.display()
    )]
    NoGpu {
        /// The node.
        path: PathBuf,
    },
    /// The administrator makes the nodes.
    #[error(
        "{} is missing: the driver's parameter NVreg_ModifyDeviceFiles=0 leaves nodes to the \
         administrator; make it with `mknod -m 0{mode:o} {} c {major} {minor}`, or by udev",
        path.display(), path.display()
    )]
    LeftToOthers {
        /// The node.
        path: PathBuf,
        /// The permissions by the driver's parameters.
        mode: u32,
        /// The kernel's major number.
        major: u64,
        minor: u64,
    },
    /// The host doesn't let us.
    #[error(
        "{} is missing, and can't be made: {source}; make it with `mknod -m 0{mode:o} {} c {major} {minor}`",
        path.display(), path.display()
    )]
    Unmakeable {
        /// The node.
        path: PathBuf,
        /// The permissions by the driver's parameters.
        mode: u32,
        /// The kernel's major number.
        major: u64,
        minor: u64,
        #[source]
        source: io::Error,
    },
    /// Something else lies there.
    #[error(
        "{} is no node of the driver's, which is device {major}:{minor}; remove it, and run `cgpu nodes`",
        path.display()
    )]
    Occupied {
        /// The node.
        path: PathBuf,
        /// The kernel's major number.
        major: u64,
        minor: u64,
    },
}

/// The directory below whose `dev` the driver's nodes are, if `configured` (`dev_root`) doesn't say: `root`,
/// the driver's own, if it has them, else `host`, which is `/`. If neither has any, `root` if that has a
/// `dev`: a driver container makes them there.
#[must_use]
pub fn device_root(configured: &Path, root: &Path, host: &Path) -> PathBuf {
    if !configured.as_os_str().is_empty() {
        return configured.to_owned();
    }
    let has_nodes = |root: &Path| root.join("dev/nvidiactl").exists();
    let is_own = root == host || has_nodes(root) || (!has_nodes(host) && root.join("dev").is_dir());
    if is_own { root.to_owned() } else { host.to_owned() }
}

/// The driver's nodes of this host.
#[derive(Debug, Clone)]
pub struct HostNodes {
    /// The directory: `/dev`.
    pub dev: PathBuf,
    /// The host's procfs.
    pub proc_root: PathBuf,
}

/// A node that could be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers {
    /// The kernel's major number.
    pub major: u64,
    pub minor: u64,
}

impl HostNodes {
    /// The major number of `module`; `None` if it isn't loaded.
    #[must_use]
    pub fn major(&self, module: Module) -> Option<u64> {
        module.major(&fs::read_to_string(self.proc_root.join("devices")).unwrap_or_default())
    }

    /// The numbers of the missing node `name`, by the kernel.
    ///
    /// # Errors
    ///
    /// If the kernel has no such device, or the administrator makes the nodes.
    pub fn numbers(&self, name: &str) -> Result<Numbers, HostNodeError> {
        self.numbers_and_rights(name).map(|(numbers, _)| numbers)
    }

    fn numbers_and_rights(&self, name: &str) -> Result<(Numbers, NodeRights), HostNodeError> {
        let path = self.dev.join(name);
        let Some((module, minor)) = identity(name) else {
            return Err(HostNodeError::NoGpu { path });
        };
        let Some(major) = self.major(module) else {
            return Err(HostNodeError::NotLoaded { path, module });
        };
        if module == Module::Nvidia && minor != 255 && !self.gpu_minors().contains(&minor) {
            return Err(HostNodeError::NoGpu { path });
        }
        let params = fs::read_to_string(self.proc_root.join("driver/nvidia/params"));
        let rights = NodeRights::parse(&params.unwrap_or_default());
        let mode = rights.mode;
        match rights.may_make {
            true => Ok((Numbers { major, minor }, rights)),
            false => Err(HostNodeError::LeftToOthers { path, mode, major, minor }),
        }
    }

    /// The names of the nodes that containers need, those of the driver's GPUs last.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let gpus = self.gpu_minors().into_iter().map(|minor| format!("nvidia{minor}"));
        let controls = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"].map(str::to_owned);
        controls.into_iter().chain(gpus).collect()
    }

    /// Makes the nodes that NVML opens, if they are missing: nvidia-modprobe, by which NVML does that
    /// itself, may not be installed. What fails here NVML reports.
    pub fn make_for_nvml(&self) {
        if self.major(Module::Nvidia).is_none() {
            return;
        }
        let is_module_s =
            |name: &String| identity(name).is_some_and(|(of, _)| of == Module::Nvidia);
        for name in self.names().into_iter().filter(is_module_s) {
            if !self.dev.join(&name).exists() {
                let _ = self.make(&name);
            }
        }
    }

    fn gpu_minors(&self) -> Vec<u64> {
        let gpus = fs::read_dir(self.proc_root.join("driver/nvidia/gpus"));
        let text = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("information")).ok();
        let texts = gpus.into_iter().flatten().flatten().filter_map(text);
        let mut minors: Vec<u64> = texts.filter_map(|text| device_minor(&text)).collect();
        minors.sort_unstable();
        minors
    }

    /// Makes the missing node `name`. If another process makes it first, that is as good.
    ///
    /// # Errors
    ///
    /// If the kernel has no such device, the administrator makes the nodes, or the host refuses.
    pub fn make(&self, name: &str) -> Result<Numbers, HostNodeError> {
        let (numbers, rights) = self.numbers_and_rights(name)?;
        let Numbers { major, minor } = numbers;
        let (path, mode) = (self.dev.join(name), rights.mode);
        let unmakeable =
            |source| HostNodeError::Unmakeable { path: path.clone(), mode, major, minor, source };
        match made(&self.dev, name, numbers, rights) {
            Ok(()) => Ok(numbers),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                match is_device(&path, numbers) {
                    true => Ok(numbers),
                    false => Err(HostNodeError::Occupied { path, major, minor }),
                }
            }
            Err(source) => Err(unmakeable(source)),
        }
    }
}

/// The minor number in the text of `/proc/driver/nvidia/gpus/BUS_ID/information`.
fn device_minor(information: &str) -> Option<u64> {
    let value = |line: &str| line.strip_prefix("Device Minor:")?.trim().parse().ok();
    information.lines().find_map(value)
}

/// Makes a node with all its rights in one step, so that no other process sees it without them.
fn made(dev: &Path, name: &str, numbers: Numbers, rights: NodeRights) -> io::Result<()> {
    let (Ok(major), Ok(minor)) = (u32::try_from(numbers.major), u32::try_from(numbers.minor))
    else {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    };
    let flags = (OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::PATH).bits().cast_signed();
    let dev = File::options().read(true).custom_flags(flags).open(dev)?;
    let new = format!(".{name}.cgpu-{:x}", RandomState::new().build_hasher().finish());
    let device = makedev(major, minor);
    mknodat(&dev, &new, FileType::CharacterDevice, Mode::empty(), device)?;
    let equipped = || {
        let owner = (Uid::from_raw(rights.uid), Gid::from_raw(rights.gid));
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        chownat(&dev, &new, Some(owner.0), Some(owner.1), flags)?;
        chmodat(&dev, &new, Mode::from_raw_mode(rights.mode), AtFlags::empty())?;
        renameat_with(&dev, &new, &dev, name, RenameFlags::NOREPLACE)
    };
    equipped().map_err(|error| {
        let _ = unlinkat(&dev, &new, AtFlags::empty());
        error.into()
    })
}

/// Whether the character device of these numbers is at `path`, and no link to it.
fn is_device(path: &Path, numbers: Numbers) -> bool {
    let found = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS);
    found.is_ok_and(|stat| {
        FileType::from_raw_mode(stat.stx_mode.into()) == FileType::CharacterDevice
            && (u64::from(stat.stx_rdev_major), u64::from(stat.stx_rdev_minor))
                == (numbers.major, numbers.minor)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};

    const DEVICES: &str = "Character devices:\n  1 mem\n195 nvidia\n511 nvidia-uvm\n";

    struct Fixture {
        dir: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            for name in ["dev", "proc/driver/nvidia/gpus/0000:07:00.0"] {
                fs::create_dir_all(dir.path().join(name)).unwrap();
            }
            let fixture = Fixture { dir };
            fixture.write("proc/devices", DEVICES);
            let information = "Model: x\nDevice Minor: \t 3\n";
            fixture.write("proc/driver/nvidia/gpus/0000:07:00.0/information", information);
            fixture
        }

        fn at(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn write(&self, name: &str, text: &str) {
            fs::write(self.at(name), text).unwrap();
        }

        fn make(&self, name: &str) -> Result<Numbers, String> {
            let (dev, proc_root) = (self.at("dev"), self.at("proc"));
            let nodes = HostNodes { dev: dev.clone(), proc_root };
            nodes.make(name).map_err(|error| error.to_string().replace(dev.to_str().unwrap(), ""))
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(self.at("dev")).unwrap();
            let mut names: Vec<_> =
                entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    #[test]
    fn nodes_are_the_drivers_own_or_the_hosts() {
        let (none, root, host) = (Path::new(""), "driver", "host");
        for (made, expected) in [
            (&["driver/lib", "host/dev"][..], host),
            (&["driver/dev", "host/dev"], root),
            (&["driver/dev", "host/dev/nvidiactl"], host),
            (&["driver/dev/nvidiactl", "host/dev/nvidiactl"], root),
            (&["driver/dev/nvidiactl", "host/dev"], root),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let at = |name: &str| dir.path().join(name);
            made.iter().for_each(|path| fs::create_dir_all(at(path)).unwrap());
            assert_eq!(device_root(none, &at(root), &at(host)), at(expected), "{made:?}");
            assert_eq!(device_root(&at("other"), &at(root), &at(host)), at("other"));
        }
        assert_eq!(device_root(none, Path::new("/"), Path::new("/")), Path::new("/"));
    }

    /// Nodes are created with the numbers and the permissions that the kernel reports.
    #[test]
    fn nodes_have_the_kernels_numbers_and_permissions() {
        let fixture = Fixture::new();
        for (name, major, minor) in [
            ("nvidia-uvm", 511, 0),
            ("nvidia-uvm-tools", 511, 1),
            ("nvidiactl", 195, 255),
            ("nvidia3", 195, 3),
        ] {
            assert_eq!(fixture.make(name), Ok(Numbers { major, minor }), "{name}");
            let meta = fs::symlink_metadata(fixture.at("dev").join(name)).unwrap();
            assert!(meta.file_type().is_char_device());
            assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (0o666, 0, 0), "{name}");
            let device = makedev(major.try_into().unwrap(), minor.try_into().unwrap());
            assert_eq!(meta.rdev(), device);
            // Another creation was first.
            assert_eq!(fixture.make(name), Ok(Numbers { major, minor }), "{name}");
        }
        assert_eq!(fixture.names().len(), 4, "nothing else is left: {:?}", fixture.names());
        fs::remove_file(fixture.at("dev/nvidia3")).unwrap();
        let params = "DeviceFileUID: 7\nDeviceFileGID: 44\nDeviceFileMode: 432\n";
        fixture.write("proc/driver/nvidia/params", params);
        fixture.make("nvidia3").unwrap();
        let meta = fs::symlink_metadata(fixture.at("dev/nvidia3")).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (0o660, 7, 44));
    }

    #[test]
    fn node_forbidden_by_kernel_or_administrator_is_refused() {
        let fixture = Fixture::new();
        let refused = fixture.make("nvidia4").unwrap_err();
        assert!(refused.starts_with("/nvidia4 is missing: the driver has no GPU of that"));
        fixture.write("proc/driver/nvidia/params", "ModifyDeviceFiles: 0\nDeviceFileMode: 432\n");
        let refused = fixture.make("nvidia-uvm").unwrap_err();
        assert!(refused.contains("make it with `mknod -m 0660 /nvidia-uvm c 511 0`"), "{refused}");
        fixture.write("proc/devices", "Character devices:\n195 nvidia\n");
        let refused = fixture.make("nvidia-uvm").unwrap_err();
        let expected = "/nvidia-uvm is missing: the kernel module nvidia-uvm isn't loaded; load it \
                        and make the node with `cgpu nodes`";
        assert!(refused.starts_with(expected), "{refused}");
        assert_eq!(fixture.names(), [""; 0]);
    }

    #[test]
    fn no_link_is_followed_and_nothing_replaced() {
        let fixture = Fixture::new();
        let elsewhere = fixture.at("elsewhere");
        symlink(&elsewhere, fixture.at("dev/nvidia-uvm")).unwrap();
        symlink("/dev/null", fixture.at("dev/nvidia3")).unwrap();
        fs::write(fixture.at("dev/nvidiactl"), "").unwrap();
        for name in ["nvidia-uvm", "nvidia3", "nvidiactl"] {
            let refused = fixture.make(name).unwrap_err();
            assert!(refused.contains("is no node of the driver's, which is device "), "{refused}");
        }
        assert!(!elsewhere.exists());
        assert_eq!(fixture.names(), ["nvidia-uvm", "nvidia3", "nvidiactl"]);
        fs::rename(fixture.at("dev"), &elsewhere).unwrap();
        symlink(&elsewhere, fixture.at("dev")).unwrap();
        let refused = fixture.make("nvidia-uvm-tools").unwrap_err();
        assert!(refused.contains("can't be made: Not a directory"), "{refused}");
        assert!(!elsewhere.join("nvidia-uvm-tools").exists());
    }

    #[test]
    fn creations_at_one_moment_all_have_the_node() {
        let fixture = Fixture::new();
        std::thread::scope(|scope| {
            let creators: Vec<_> =
                (0..8).map(|_| scope.spawn(|| fixture.make("nvidia3"))).collect();
            for creator in creators {
                assert_eq!(creator.join().unwrap(), Ok(Numbers { major: 195, minor: 3 }));
            }
        });
        assert_eq!(fixture.names(), ["nvidia3"]);
    }
}
