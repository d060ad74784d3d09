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

use rustix::fs::{major, minor};
use thiserror::Error;
use tracing::warn;

use super::node_creation::{HostNodeError, HostNodes, Numbers};
use crate::bundle::{Bind, DeviceNode, Withheld};
use cgpu_core::gpu::Inventory;
use cgpu_core::plan::Plan;
use nvrm::NVIDIA_MAJOR;

/// The edits that give a container the nodes of its GPUs and no other's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Nodes {
    /// Character devices to declare.
    pub devices: Vec<DeviceNode>,
    /// Files to bind-mount.
    pub binds: Vec<Bind>,
    /// Devices to allow that are among the files.
    pub allowed: Vec<DeviceNode>,
    /// Nodes of other GPUs.
    pub withheld: Vec<Withheld>,
}

/// What to do about a node that isn't there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// Make it by the kernel's numbers; an error if the kernel has no such device.
    Make,
    /// Declare it by the kernel's numbers, as if it had been made.
    Foresee,
    /// Declare it by the kernel's numbers, else by NVIDIA's usual ones: the GPUs come from a file, and
    /// nothing is enforced, so that there may be no driver at all.
    Presume,
}

/// Why a GPU can't be made usable.
#[derive(Debug, Error)]
pub enum NodeError {
    /// There is no such node, and none can be made.
    #[error(transparent)]
    Missing(#[from] HostNodeError),
    /// There is no such node, and only root can make one.
    #[error(
        "{} is missing, and only root can make it: run `cgpu nodes` as root, and at every boot by \
         `systemctl enable cgpu-nodes`",
        path.display()
    )]
    Roots {
        /// The node.
        path: PathBuf,
    },
    /// It can't be inspected.
    #[error("cannot look at {}: {source}; see driver.root in the configuration", path.display())]
    Unreadable {
        /// The node on the host.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// A node that every container with a GPU gets.
struct Control<'a> {
    name: &'a str,
    /// How much a container needs it.
    need: Need,
    /// Its usual minor number under [`NVIDIA_MAJOR`], if it has one.
    usual_minor: Option<i64>,
}

/// How much a container needs a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    /// Nothing works without it.
    Required,
    /// It is made if it can be.
    Useful,
    /// The container gets it if it is there.
    Optional,
}

const CONTROLS: &[Control<'_>] = &[
    Control { name: "nvidiactl", need: Need::Required, usual_minor: Some(255) },
    Control { name: "nvidia-uvm", need: Need::Required, usual_minor: None },
    Control { name: "nvidia-uvm-tools", need: Need::Useful, usual_minor: None },
    Control { name: "nvidia-modeset", need: Need::Optional, usual_minor: None },
];

/// Where containers have the node by which displays are set, and its minor number.
const MODESET: &str = "/dev/nvidia-modeset";
const MODESET_MINOR: i64 = 254;

/// What a path on the host is.
pub(super) enum PathKind {
    Device(i64, i64),
    File,
    Nothing,
}

pub(super) fn lookup(path: &Path) -> Result<PathKind, NodeError> {
    match fs::metadata(path) {
        Ok(meta) if meta.file_type().is_char_device() => {
            Ok(PathKind::Device(major(meta.rdev()).into(), minor(meta.rdev()).into()))
        }
        Ok(_) => Ok(PathKind::File),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(PathKind::Nothing),
        Err(source) => Err(NodeError::Unreadable { path: path.to_owned(), source }),
    }
}

/// The nodes of `plan`'s GPUs, found among those of the host.
///
/// # Errors
///
/// If a node that the container needs is missing, and `missing` doesn't help.
pub fn nodes(
    plan: &Plan,
    inventory: &Inventory,
    host: &HostNodes,
    missing: Missing,
) -> Result<Nodes, NodeError> {
    let mut nodes = Nodes::default();
    for control in CONTROLS {
        nodes.add(host, control, missing)?;
    }
    for (at, gpu) in plan.gpus.iter().enumerate() {
        // Of several MIG devices of one.
        if plan.gpus[..at].iter().any(|other| other.minor == gpu.minor) {
            continue;
        }
        let name = &format!("nvidia{}", gpu.minor);
        let usual_minor = Some(i64::from(gpu.minor));
        nodes.add(host, &Control { name, need: Need::Required, usual_minor }, missing)?;
    }
    for gpu in inventory.gpus() {
        if plan.gpus.iter().any(|given| given.minor == gpu.minor) {
            continue;
        }
        let name = format!("nvidia{}", gpu.minor);
        let source = host.dev.join(&name);
        // One that can't be inspected can't be opened either; its number is the usual.
        let (major, minor) = match lookup(&source) {
            Ok(PathKind::Device(major, minor)) => (major, minor),
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

/// The nodes by which the kernel's graphics reach NVIDIA's GPUs, as `sys` (`/sys`) reports: memory
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

/// The node by which displays are set, in `dev`: its surfaces keep memory that was exported to
/// a file as the kernel's own, in no process's driver usage (`nvkms-surface.c`), and passes no monitor.
#[must_use]
pub fn modeset(dev: &Path) -> Withheld {
    let source = dev.join("nvidia-modeset");
    let (major, minor) = match lookup(&source) {
        Ok(PathKind::Device(major, minor)) => (major, minor),
        _ => (NVIDIA_MAJOR, MODESET_MINOR),
    };
    let source = source.to_string_lossy().into_owned();
    Withheld { path: MODESET.to_owned(), source, major, minor }
}

/// Makes the links in `dev`/char that udev makes of other devices and not of NVIDIA's, whose
/// driver registers no class; `dev` is the host's `/dev`.
///
/// runc 1.1.3 to 1.1.6 reports to systemd only devices that have one. Of the others systemd then
/// knows nothing, and its next `daemon-reload` takes them away from the running container.
/// Without a link the container starts all the same, so a failure is logged and is no error.
pub fn link_by_number(nodes: &Nodes, dev: &Path) {
    for device in &nodes.devices {
        let Ok(name) = Path::new(&device.path).strip_prefix("/dev") else { continue };
        let there = lookup(&dev.join(name));
        if !matches!(there, Ok(PathKind::Device(major, minor)) if (major, minor) == (device.major, device.minor))
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

/// The numbers of a node that isn't there; `None` if the container does without.
fn absent(
    host: &HostNodes,
    control: &Control<'_>,
    missing: Missing,
) -> Result<Option<(i64, i64)>, HostNodeError> {
    let Numbers { major, minor } = match missing {
        _ if control.need == Need::Optional => return Ok(None),
        Missing::Make => host.make(control.name)?,
        Missing::Foresee => host.numbers(control.name)?,
        Missing::Presume => match host.numbers(control.name) {
            Ok(numbers) => numbers,
            Err(_) => return Ok(control.usual_minor.map(|minor| (NVIDIA_MAJOR, minor))),
        },
    };
    // Device numbers have at most 32 bits each.
    let number = |part: u64| i64::try_from(part).unwrap_or(i64::MAX);
    Ok(Some((number(major), number(minor))))
}

impl Nodes {
    /// The same by bind mounts of the nodes of `host`, for a runtime that can't make one.
    ///
    /// # Errors
    ///
    /// If one isn't there, and was declared by its number.
    pub fn bound(self, host: &HostNodes) -> Result<Self, NodeError> {
        let mut binds = self.binds;
        for device in self.devices {
            let name = device.path.trim_start_matches("/dev/");
            let source = host.dev.join(name);
            if !matches!(lookup(&source)?, PathKind::Device(..)) {
                return Err(NodeError::Roots { path: source });
            }
            let source = source.to_string_lossy().into_owned();
            binds.push(Bind { source, destination: device.path });
        }
        Ok(Nodes { devices: Vec::new(), binds, ..self })
    }

    /// Has the devices bind-mounted from the host's `dev`, for a container in a user namespace. No device can
    /// be made there, and runtimes bind-mount it from the same path of the host as in the container (runc,
    /// `bindMountDeviceNode`): from `/dev`, where a driver container's nodes aren't.
    pub fn bind_devices(&mut self, dev: &Path) {
        if dev == Path::new("/dev") {
            return;
        }
        let source = |device: &DeviceNode| {
            let source = dev.join(device.path.strip_prefix("/dev/")?);
            source.exists().then(|| source.to_string_lossy().into_owned())
        };
        for device in std::mem::take(&mut self.devices) {
            match source(&device) {
                Some(source) => {
                    self.binds.push(Bind { source, destination: device.path.clone() });
                    self.allowed.push(device);
                }
                None => self.devices.push(device),
            }
        }
    }

    fn add(
        &mut self,
        host: &HostNodes,
        control: &Control<'_>,
        missing: Missing,
    ) -> Result<(), NodeError> {
        let source = host.dev.join(control.name);
        let path = format!("/dev/{}", control.name);
        let (major, minor) = match lookup(&source)? {
            PathKind::Device(major, minor) => (major, minor),
            PathKind::File => {
                let source = source.to_string_lossy().into_owned();
                self.binds.push(Bind { source, destination: path });
                return Ok(());
            }
            PathKind::Nothing => match absent(host, control, missing) {
                Ok(Some(numbers)) => numbers,
                Err(error) if control.need == Need::Required => return Err(error.into()),
                Ok(None) | Err(_) => return Ok(()),
            },
        };
        self.devices.push(DeviceNode::new(path, major, minor));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cgpu_core::gpu::{Gpu, GpuState};
    use cgpu_core::plan::{Kind, PlannedGpu};
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
            caveats: cgpu_core::plan::Caveats::default(),
        }
    }

    fn found(root: &Path, missing: Missing) -> Result<Nodes, NodeError> {
        let (dev, proc_root) = (root.join("dev"), root.join("proc"));
        nodes(&plan(), &inventory(), &HostNodes { dev, proc_root }, missing)
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
        let found = found(root.path(), Missing::Presume).unwrap();
        let device = |path: &str, minor| DeviceNode::new(path.into(), 195, minor);
        assert_eq!(found.devices, [device("/dev/nvidiactl", 255), device("/dev/nvidia1", 1)]);
        let withheld: Vec<_> = found.withheld.iter().map(|node| node.path.as_str()).collect();
        assert_eq!(withheld, ["/dev/nvidia0", "/dev/nvidia2"]);
    }

    #[test]
    fn missing_node_is_refused_if_kernel_lacks_device() {
        for (there, error) in [
            (&[][..], "dev/nvidiactl is missing: the kernel module nvidia isn't loaded"),
            (&["nvidiactl"], "dev/nvidia-uvm is missing: the kernel module nvidia-uvm isn't"),
            (
                &["nvidiactl", "nvidia-uvm"],
                "dev/nvidia1 is missing: the kernel module nvidia isn't",
            ),
        ] {
            for missing in [Missing::Make, Missing::Foresee] {
                let root = root(there);
                let text = found(root.path(), missing).unwrap_err().to_string();
                assert!(text.contains(error), "{text}");
            }
        }
    }

    #[test]
    fn missing_nodes_are_made_or_foreseen() {
        let root = root(&[]);
        let gpu = root.path().join("proc/driver/nvidia/gpus/0000:01:00.0");
        fs::create_dir_all(&gpu).unwrap();
        fs::write(gpu.join("information"), "Device Minor: 1\n").unwrap();
        let devices = "Character devices:\n195 nvidia\n511 nvidia-uvm\n";
        fs::write(root.path().join("proc/devices"), devices).unwrap();
        let nodes = [
            ("nvidiactl", 195, 255),
            ("nvidia-uvm", 511, 0),
            ("nvidia-uvm-tools", 511, 1),
            ("nvidia1", 195, 1),
        ];
        let node = |(name, major, minor)| DeviceNode::new(format!("/dev/{name}"), major, minor);
        let wanted = nodes.map(node);
        let dev = root.path().join("dev");
        for missing in [Missing::Foresee, Missing::Presume] {
            assert_eq!(found(root.path(), missing).unwrap().devices, wanted);
        }
        assert_eq!(fs::read_dir(&dev).unwrap().count(), 0, "a look makes nothing");
        assert_eq!(found(root.path(), Missing::Make).unwrap().devices, wanted);
        assert_eq!(fs::read_dir(&dev).unwrap().count(), 4);
        assert_eq!(found(root.path(), Missing::Make).unwrap().devices, wanted);
        fs::remove_file(dev.join("nvidia-uvm-tools")).unwrap();
        fs::write(root.path().join("proc/driver/nvidia/params"), "ModifyDeviceFiles: 0\n").unwrap();
        let found = found(root.path(), Missing::Make).unwrap();
        assert_eq!(found.devices.len(), 3, "CUDA does without nvidia-uvm-tools");
    }

    /// Files are bound, and devices are declared by their own numbers.
    #[test]
    fn files_are_bound_and_devices_declared_by_number() {
        let root = root(&["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]);
        let path = root.path().join("dev/nvidia1");
        mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, 3)).unwrap();
        let found = found(root.path(), Missing::Make).unwrap();
        assert_eq!(found.devices, [DeviceNode::new("/dev/nvidia1".into(), 1, 3)]);
        let bound: Vec<_> = found.binds.iter().map(|bind| bind.destination.as_str()).collect();
        assert_eq!(bound, ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]);
    }

    /// Devices of another root are bound into a user namespace.
    #[test]
    fn other_root_devices_are_bound_into_user_namespaces() {
        let root = root(&["nvidiactl", "nvidia-uvm"]);
        let path = root.path().join("dev/nvidia1");
        mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(195, 1)).unwrap();
        let declared = found(root.path(), Missing::Make).unwrap();
        let mut bound = declared.clone();
        bound.bind_devices(Path::new("/dev"));
        assert_eq!(bound, declared, "the runtime finds these");
        bound.bind_devices(&root.path().join("dev"));
        assert_eq!(bound.devices, []);
        assert_eq!(bound.allowed, declared.devices);
        let source = path.to_string_lossy().into_owned();
        assert_eq!(bound.binds[2], Bind { source, destination: "/dev/nvidia1".into() });
        // One that the host lacks is declared as before.
        std::fs::remove_file(path).unwrap();
        let mut absent = declared.clone();
        absent.bind_devices(&root.path().join("dev"));
        assert_eq!(absent, declared);
    }

    #[test]
    fn nvidia_graphics_nodes_are_identified_by_the_kernel() {
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

    /// A runtime that can't create nodes gets the host's nodes by bind mounts.
    #[test]
    fn rootless_runtime_binds_the_hosts_nodes() {
        let root = root(&["nvidia-uvm"]);
        let dev = root.path().join("dev");
        let found = || Nodes {
            devices: vec![DeviceNode::new("/dev/nvidia0".into(), 195, 0)],
            binds: vec![Bind { source: "/s".into(), destination: "/d".into() }],
            ..Nodes::default()
        };
        let host = HostNodes { dev: dev.clone(), proc_root: "/proc".into() };
        let error = found().bound(&host).unwrap_err().to_string();
        let missing = format!("{}/nvidia0 is missing, and only root can make it: ", dev.display());
        assert!(error.starts_with(&missing), "{error}");
        mknod(&dev.join("nvidia0"), SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, 3))
            .unwrap();
        let bound = found().bound(&host).unwrap();
        assert_eq!(bound.devices, []);
        let binds: Vec<_> = bound
            .binds
            .iter()
            .map(|bind| (bind.source.as_str(), bind.destination.as_str()))
            .collect();
        let source = dev.join("nvidia0").display().to_string();
        assert_eq!(binds, [("/s", "/d"), (source.as_str(), "/dev/nvidia0")]);
    }

    /// Nodes of this host get the link by number that udev does not create.
    #[test]
    fn host_nodes_get_the_link_udev_omits() {
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
