//! The device nodes of a container's GPUs.
//!
//! Knows the nodes of this host and the edits they come to. Must not know
//! quotas. Nodes are declared in the bundle, so that the engine's own device rules hold
//! and nothing is done behind its back (a `systemctl daemon-reload` then takes nothing
//! away; see [`link_by_number`] for what that takes).

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use nix::sys::stat::{major, minor};
use thiserror::Error;
use tracing::warn;

use crate::bundle::{Bind, DeviceNode, Withheld};
use crate::gpu::Inventory;
use crate::plan::Plan;
use crate::rm::NVIDIA_MAJOR;

/// The edits that give a container the nodes of its GPUs and no other's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nodes {
    /// Character devices to declare.
    pub devices: Vec<DeviceNode>,
    /// Files to bind-mount.
    pub binds: Vec<Bind>,
    /// Nodes of other GPUs.
    pub withheld: Vec<Withheld>,
}

/// What to do about a node that isn't there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// It is an error.
    Refuse,
    /// Declare it by NVIDIA's usual numbers: the GPUs come from a file, and nothing is
    /// enforced, so that there may be no driver at all.
    Presume,
}

/// Why a GPU can't be made usable.
#[derive(Debug, Error)]
pub enum NodeError {
    /// There is no such node.
    #[error("{} is missing; {}", path.display(), remedy)]
    Missing {
        /// The node on the host.
        path: PathBuf,
        /// What makes it.
        remedy: &'static str,
    },
    /// It can't be looked at.
    #[error("cannot look at {}: {source}; see driver.root in the configuration", path.display())]
    Unreadable {
        /// The node on the host.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A node that every container with a GPU gets.
struct Control {
    name: &'static str,
    /// Where it must be there: what makes it.
    remedy: Option<&'static str>,
    /// Its usual minor number under [`NVIDIA_MAJOR`], if it has one.
    usual_minor: Option<i64>,
}

const CONTROLS: &[Control] = &[
    Control {
        name: "nvidiactl",
        remedy: Some("load the driver: `nvidia-modprobe`, or `nvidia-smi` as root"),
        usual_minor: Some(255),
    },
    Control {
        name: "nvidia-uvm",
        remedy: Some("make it with `nvidia-modprobe -u -c=0`"),
        usual_minor: None,
    },
    Control { name: "nvidia-uvm-tools", remedy: None, usual_minor: None },
    Control { name: "nvidia-modeset", remedy: None, usual_minor: None },
];

/// Where containers have the node by which displays are set, and its minor number.
const MODESET: &str = "/dev/nvidia-modeset";
const MODESET_MINOR: i64 = 254;

/// What a path on the host is.
pub(super) enum Found {
    Device(i64, i64),
    File,
    Nothing,
}

pub(super) fn look(path: &Path) -> Result<Found, NodeError> {
    match fs::metadata(path) {
        Ok(meta) if meta.file_type().is_char_device() => {
            // Device numbers have at most 32 bits each.
            let number = |part: u64| i64::try_from(part).unwrap_or(i64::MAX);
            Ok(Found::Device(number(major(meta.rdev())), number(minor(meta.rdev()))))
        }
        Ok(_) => Ok(Found::File),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Found::Nothing),
        Err(source) => Err(NodeError::Unreadable { path: path.to_owned(), source }),
    }
}

/// The nodes of `plan`'s GPUs, found in `driver_root`/dev.
///
/// # Errors
///
/// Where a node isn't there and `missing` doesn't presume it.
pub fn nodes(
    plan: &Plan,
    inventory: &Inventory,
    driver_root: &Path,
    missing: Missing,
) -> Result<Nodes, NodeError> {
    let dev = driver_root.join("dev");
    let mut nodes = Nodes::default();
    for control in CONTROLS {
        let presumed = control.usual_minor.filter(|_| missing == Missing::Presume);
        let remedy = control.remedy.filter(|_| missing == Missing::Refuse);
        nodes.add(&dev, control.name, presumed, remedy)?;
    }
    for (at, gpu) in plan.gpus.iter().enumerate() {
        // Of several MIG devices of one.
        if plan.gpus[..at].iter().any(|other| other.minor == gpu.minor) {
            continue;
        }
        let presumed = (missing == Missing::Presume).then_some(i64::from(gpu.minor));
        let remedy = Some("see `nvidia-smi` whether the GPU is there, `cgpu gpus --refresh` lists");
        nodes.add(&dev, &format!("nvidia{}", gpu.minor), presumed, remedy)?;
    }
    for gpu in inventory.gpus() {
        if plan.gpus.iter().any(|given| given.minor == gpu.minor) {
            continue;
        }
        let name = format!("nvidia{}", gpu.minor);
        let source = dev.join(&name);
        // One that can't be looked at can't be opened either; its number is the usual.
        let (major, minor) = match look(&source) {
            Ok(Found::Device(major, minor)) => (major, minor),
            _ => (NVIDIA_MAJOR, i64::from(gpu.minor)),
        };
        nodes.withheld.push(Withheld {
            path: format!("/dev/{name}"),
            source: source.to_string_lossy().into_owned(),
            major,
            minor,
        });
    }
    Ok(nodes)
}

/// The nodes by which the kernel's graphics reach NVIDIA's GPUs, as `sys` (`/sys`) tells: memory
/// that is taken there passes no monitor.
#[must_use]
pub fn graphics(sys: &Path) -> Vec<Withheld> {
    let entries = fs::read_dir(sys.join("class/drm")).into_iter().flatten().flatten();
    let node = |path: PathBuf| {
        let driver = fs::read_link(path.join("device/driver")).ok()?;
        let name = path.file_name()?.to_str()?;
        let numbers = fs::read_to_string(path.join("dev")).ok()?;
        let (major, minor) = numbers.trim().split_once(':')?;
        let path = format!("/dev/dri/{name}");
        (driver.file_name()? == "nvidia").then_some(Withheld {
            source: path.clone(),
            path,
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
        })
    };
    entries.filter_map(|entry| node(entry.path())).collect()
}

/// The node by which displays are set, below `driver_root`: its surfaces keep memory that was exported to
/// a file as the kernel's own, in no process's figure (`nvkms-surface.c`), and passes no monitor.
#[must_use]
pub fn modeset(driver_root: &Path) -> Withheld {
    let source = driver_root.join("dev/nvidia-modeset");
    let (major, minor) = match look(&source) {
        Ok(Found::Device(major, minor)) => (major, minor),
        _ => (NVIDIA_MAJOR, MODESET_MINOR),
    };
    let source = source.to_string_lossy().into_owned();
    Withheld { path: MODESET.to_owned(), source, major, minor }
}

/// Makes the links in `dev`/char that udev makes of other devices and not of NVIDIA's, whose
/// driver registers no class; `dev` is the host's `/dev`.
///
/// runc 1.1.3 to 1.1.6 tells systemd only of devices that have one. Of the others systemd then
/// knows nothing, and its next `daemon-reload` takes them away from the running container.
/// Without a link the container starts all the same, so failing is told and no error.
pub fn link_by_number(nodes: &Nodes, dev: &Path) {
    for device in &nodes.devices {
        let Ok(name) = Path::new(&device.path).strip_prefix("/dev") else { continue };
        let there = look(&dev.join(name));
        if !matches!(there, Ok(Found::Device(major, minor)) if (major, minor) == (device.major, device.minor))
        {
            continue;
        }
        let link = dev.join("char").join(format!("{}:{}", device.major, device.minor));
        match symlink(Path::new("..").join(name), &link) {
            // A host without `/dev/char` has no systemd.
            Err(error)
                if ![io::ErrorKind::AlreadyExists, io::ErrorKind::NotFound]
                    .contains(&error.kind()) =>
            {
                let link = link.display();
                warn!(%link, %error, "no link by number: a daemon-reload may take the GPU away");
            }
            _ => {}
        }
    }
}

impl Nodes {
    /// The same by bind mounts of the nodes below `driver_root`, for who can't make one.
    ///
    /// # Errors
    ///
    /// If one isn't there, and was presumed by its number.
    pub fn bound(self, driver_root: &Path) -> Result<Self, NodeError> {
        let mut binds = self.binds;
        for device in self.devices {
            let source = driver_root.join(device.path.trim_start_matches('/'));
            if !matches!(look(&source)?, Found::Device(..)) {
                let remedy = "load the driver: `nvidia-modprobe`, or `nvidia-smi` as root";
                return Err(NodeError::Missing { path: source, remedy });
            }
            let source = source.to_string_lossy().into_owned();
            binds.push(Bind { source, destination: device.path });
        }
        Ok(Nodes { devices: Vec::new(), binds, withheld: self.withheld })
    }

    fn add(
        &mut self,
        dev: &Path,
        name: &str,
        presumed_minor: Option<i64>,
        remedy: Option<&'static str>,
    ) -> Result<(), NodeError> {
        let source = dev.join(name);
        let path = format!("/dev/{name}");
        match (look(&source)?, presumed_minor, remedy) {
            (Found::Device(major, minor), ..) => {
                self.devices.push(DeviceNode::new(path, major, minor));
            }
            (Found::File, ..) => self
                .binds
                .push(Bind { source: source.to_string_lossy().into_owned(), destination: path }),
            (Found::Nothing, Some(minor), _) => {
                self.devices.push(DeviceNode::new(path, NVIDIA_MAJOR, minor));
            }
            (Found::Nothing, None, Some(remedy)) => {
                return Err(NodeError::Missing { path: source, remedy });
            }
            (Found::Nothing, None, None) => {}
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Gpu, GpuState};
    use crate::plan::{Kind, PlannedGpu};
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};

    fn gpu(index: u32, minor: u32) -> Gpu {
        Gpu {
            index,
            uuid: format!("GPU-{index}"),
            minor,
            bus_id: String::new(),
            name: String::new(),
            memory_bytes: 1 << 20,
            reserved_bytes: 0,
            state: GpuState::Ok,
            mig_enabled: false,
            mig_devices: Vec::new(),
        }
    }

    fn inventory() -> Inventory {
        Inventory::new(vec![gpu(0, 1), gpu(1, 0), gpu(2, 2)]).unwrap()
    }

    fn plan() -> Plan {
        let gpu = PlannedGpu {
            index: 0,
            uuid: "GPU-0".into(),
            minor: 1,
            memory_total_bytes: 1 << 20,
            memory_reserved_bytes: 0,
            memory_limit_bytes: None,
            mig: None,
        };
        Plan {
            backend: Kind::None,
            gpus: vec![gpu],
            weight: 1,
            high_priority: false,
            caveats: crate::plan::Caveats::default(),
        }
    }

    fn root(names: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("dev")).unwrap();
        for name in names {
            fs::write(dir.path().join("dev").join(name), "").unwrap();
        }
        dir
    }

    #[test]
    fn without_a_driver_the_usual_numbers_are_presumed() {
        let root = root(&[]);
        let found = nodes(&plan(), &inventory(), root.path(), Missing::Presume).unwrap();
        let device = |path: &str, minor| DeviceNode::new(path.into(), 195, minor);
        assert_eq!(found.devices, [device("/dev/nvidiactl", 255), device("/dev/nvidia1", 1)]);
        let withheld: Vec<_> = found.withheld.iter().map(|node| node.path.as_str()).collect();
        assert_eq!(withheld, ["/dev/nvidia0", "/dev/nvidia2"]);
    }

    #[test]
    fn a_missing_node_is_refused_with_what_makes_it() {
        for (there, error) in [
            (&[][..], "dev/nvidiactl is missing; load the driver: `nvidia-modprobe`"),
            (&["nvidiactl"], "dev/nvidia-uvm is missing; make it with `nvidia-modprobe -u -c=0`"),
            (&["nvidiactl", "nvidia-uvm"], "dev/nvidia1 is missing; see `nvidia-smi`"),
        ] {
            let root = root(there);
            let text =
                nodes(&plan(), &inventory(), root.path(), Missing::Refuse).unwrap_err().to_string();
            assert!(text.contains(error), "{text}");
        }
    }

    #[test]
    fn files_are_bound_and_devices_declared_by_their_own_numbers() {
        let root = root(&["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]);
        let path = root.path().join("dev/nvidia1");
        mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, 3)).unwrap();
        let found = nodes(&plan(), &inventory(), root.path(), Missing::Refuse).unwrap();
        assert_eq!(found.devices, [DeviceNode::new("/dev/nvidia1".into(), 1, 3)]);
        let bound: Vec<_> = found.binds.iter().map(|bind| bind.destination.as_str()).collect();
        assert_eq!(bound, ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]);
    }

    #[test]
    fn graphics_of_nvidia_s_gpus_are_told_by_the_kernel() {
        let sys = tempfile::tempdir().unwrap();
        for (name, numbers, driver) in [
            ("card0", "226:0", "i915"),
            ("card1", "226:1", "nvidia"),
            ("renderD129", "226:129", "nvidia"),
            ("version", "", ""),
        ] {
            let path = sys.path().join("class/drm").join(name);
            fs::create_dir_all(path.join("device")).unwrap();
            fs::write(path.join("dev"), format!("{numbers}\n")).unwrap();
            symlink(format!("../../../bus/pci/drivers/{driver}"), path.join("device/driver"))
                .unwrap();
        }
        let mut found: Vec<_> =
            graphics(sys.path()).into_iter().map(|node| (node.path, node.minor)).collect();
        found.sort_unstable();
        assert_eq!(found, [("/dev/dri/card1".into(), 1), ("/dev/dri/renderD129".into(), 129)]);
        assert_eq!(graphics(Path::new("/nowhere")), []);
    }

    #[test]
    fn who_can_make_no_node_gets_the_hosts_by_bind_mounts() {
        let root = root(&["nvidia-uvm"]);
        let dev = root.path().join("dev");
        let found = || Nodes {
            devices: vec![DeviceNode::new("/dev/nvidia0".into(), 195, 0)],
            binds: vec![Bind { source: "/s".into(), destination: "/d".into() }],
            withheld: Vec::new(),
        };
        let error = found().bound(root.path()).unwrap_err().to_string();
        let missing = format!("{}/nvidia0 is missing; load the driver: ", dev.display());
        assert!(error.starts_with(&missing), "{error}");
        mknod(&dev.join("nvidia0"), SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, 3))
            .unwrap();
        let bound = found().bound(root.path()).unwrap();
        assert_eq!(bound.devices, []);
        let binds: Vec<_> = bound
            .binds
            .iter()
            .map(|bind| (bind.source.as_str(), bind.destination.as_str()))
            .collect();
        let source = dev.join("nvidia0").display().to_string();
        assert_eq!(binds, [("/s", "/d"), (source.as_str(), "/dev/nvidia0")]);
    }

    #[test]
    fn nodes_of_this_host_get_the_link_that_udev_does_not_make() {
        let root = root(&["nvidiactl"]);
        let dev = root.path().join("dev");
        let device = |name: &str, minor| {
            mknod(&dev.join(name), SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, 3))
                .unwrap();
            DeviceNode::new(format!("/dev/{name}"), 1, minor)
        };
        let absent = DeviceNode::new("/dev/nvidia2".into(), 195, 2);
        let devices = vec![device("nvidia0", 3), device("nvidia1", 4), absent];
        let found = Nodes { devices, ..Nodes::default() };
        link_by_number(&found, &dev);
        assert!(!dev.join("char").exists(), "it is not for us to make");
        fs::create_dir(dev.join("char")).unwrap();
        for _ in 0..2 {
            link_by_number(&found, &dev);
            let links: Vec<_> =
                fs::read_dir(dev.join("char")).unwrap().map(|link| link.unwrap()).collect();
            assert_eq!(links.len(), 1, "numbers must be the node's: {links:?}");
            assert_eq!(links[0].file_name(), "1:3");
            assert_eq!(fs::read_link(links[0].path()).unwrap(), Path::new("../nvidia0"));
            assert!(links[0].path().exists());
        }
    }
}
