//! Facts of NVIDIA's driver: what is loaded, its nodes, its libraries.
//!
//! Owns where the kernel reports it. Must not load NVML, nor judge. GPUs that the
//! driver has are read as the inventory reads them.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};

use super::facts::{BusGpu, Cdi, Driver, Files, Library, Node, NodeKind, Observed};
use super::sentence;
use crate::engines::host_tree::Tree;
use cgpu_host::config::{Config, Inject, InventorySource};
use cgpu_host::inventory::{self, Fingerprint, FingerprintError, KernelGpu, Settings, Source};
use cgpu_inject::cdi::{HostFacts, Specifications, State, Wanted};
use cgpu_inject::device_numbers::{Module, NodeRights, character_majors, identity};
use cgpu_inject::root::Root;
use cgpu_inject::{driver_search, node_creation};
use nvrm::Version;

/// NVIDIA's kernel modules, as `/sys/module` calls them.
const MODULES: [&str; 4] = ["nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"];

/// Where the kernel itself reports its driver.
const KERNELS_OWN: &str = "/proc";

/// NVIDIA's vendor number on PCI.
const VENDOR: &str = "0x10de";

/// What display controllers' classes begin with: VGA, 3D.
const DISPLAY_CLASS: &str = "0x03";

/// Major number of `nvidiactl`, `nvidiaN` and `nvidia-modeset`.
const NVIDIA_MAJOR: u64 = 195;

/// The driver of the host in `tree`, configured as `config` says.
pub(super) fn inspect(tree: &Tree, config: &Config) -> Driver {
    let proc = tree.at(&config.driver.proc_root);
    let root = tree.at(&config.driver.root);
    let version_path = config.driver.proc_root.join("driver/nvidia/version");
    let banner = match tree.read(&version_path) {
        Observed::Present(text) => {
            Observed::Present(text.lines().next().unwrap_or_default().to_owned())
        }
        other => other,
    };
    let gpus = match config.inventory.source {
        InventorySource::File => listed(&tree.at(&config.inventory.path)),
        InventorySource::Auto => match Fingerprint::read(&proc) {
            Ok(state) => Ok(of_kernel(&state)),
            Err(FingerprintError::NoDriver { .. }) => Ok(Vec::new()),
            Err(error) => Err(sentence(&error)),
        },
    };
    let wanted: Vec<Wanted> = gpus.iter().flatten().filter_map(|gpu| gpu.whole.clone()).collect();
    let gpus = gpus.map(|gpus| gpus.into_iter().map(|gpu| gpu.minor).collect::<Vec<_>>());
    let may_make = match tree.read(config.driver.proc_root.join("driver/nvidia/params")) {
        Observed::Present(text) => NodeRights::parse(&text).may_make,
        _ => true,
    };
    let majors = match tree.read(config.driver.proc_root.join("devices")) {
        Observed::Present(text) => character_majors(&text),
        _ => Vec::new(),
    };
    let minors = gpus.iter().flatten().flatten().copied().collect::<Vec<u32>>();
    let kernel = match &banner {
        Observed::Present(banner) => Version::in_banner(banner),
        Observed::Absent | Observed::Unreadable(_) => None,
    };
    let library = Root::open(&root).ok().and_then(|files| {
        let (version, path) =
            driver_search::installed(&files, kernel.map(|version| version.to_string()).as_deref())?;
        let path = config.driver.root.join(path.strip_prefix("/").unwrap_or(&path));
        Some(Library { version: version.parse().ok()?, path })
    });
    Driver {
        version_path,
        banner,
        on_bus: on_bus(tree),
        gpus,
        modules: MODULES
            .iter()
            .map(|name| (*name, tree.at("/sys/module").join(name).is_dir()))
            .collect(),
        nodes: nodes(tree, &device_root(tree, config).join("dev"), (&majors, may_make), &minors),
        root: config.driver.root.clone(),
        library,
        files: files(tree, config, kernel, &wanted),
        gpus_from_file: config.inventory.source == InventorySource::File,
        made_up: config.driver.proc_root != Path::new(KERNELS_OWN),
    }
}

/// The directory below whose `dev` the driver's nodes are on the host in `tree`.
pub(super) fn device_root(tree: &Tree, config: &Config) -> PathBuf {
    let (dev_root, root) = (&config.driver.dev_root, &config.driver.root);
    match node_creation::device_root(dev_root, &tree.at(root), &tree.at("/")) {
        own if own == tree.at(root) => root.clone(),
        host if host == tree.at("/") => "/".into(),
        configured => configured,
    }
}

/// A GPU of the host.
struct Gpu {
    /// The minor number of its node, if it is known.
    minor: Option<u32>,
    /// It, if a container can have it as a whole.
    whole: Option<Wanted>,
}

/// The GPUs that the kernel's module has.
fn of_kernel(state: &Fingerprint) -> Vec<Gpu> {
    let mut index = 0..;
    let mut gpu = |gpu: &KernelGpu| {
        let is_excluded = gpu.excluded == Some(true);
        // NVML counts no GPU that the module excludes.
        let index = if is_excluded { None } else { index.next() };
        let whole = gpu.minor.filter(|minor| !state.has_mig(*minor)).zip(index);
        let whole = whole.map(|(minor, index)| Wanted {
            index,
            uuid: gpu.uuid.clone().unwrap_or_else(|| "UUID not known yet".to_owned()),
            minor,
            mig: None,
        });
        Gpu { minor: gpu.minor, whole }
    };
    state.gpus().iter().map(&mut gpu).collect()
}

/// The GPUs that the inventory file at `path` lists.
fn listed(path: &Path) -> Result<Vec<Gpu>, String> {
    // What is no regular file may never end.
    if fs::metadata(path).is_ok_and(|meta| !meta.is_file()) {
        return Err(format!("the inventory file {} is no regular file", path.display()));
    }
    let source = Source::File(path.to_owned());
    let listed = inventory::cached(&Settings { source, ..Settings::default() });
    let listed = listed.map_err(|error| sentence(&error))?.unwrap_or_default();
    let gpu = |gpu: &cgpu_core::gpu::Gpu| Gpu {
        minor: Some(gpu.minor),
        whole: (!gpu.mig_enabled).then(|| Wanted {
            index: gpu.index,
            uuid: gpu.uuid.clone(),
            minor: gpu.minor,
            mig: None,
        }),
    };
    Ok(listed.gpus().iter().map(gpu).collect())
}

/// By which means the driver's files come into containers that get these GPUs.
fn files(tree: &Tree, config: &Config, kernel: Option<Version>, gpus: &[Wanted]) -> Files {
    let driver = &config.driver;
    let cdi = matches!(driver.inject, Inject::Auto | Inject::Cdi).then(|| {
        let directories: Vec<PathBuf> = driver.cdi_dirs.iter().map(|dir| tree.at(dir)).collect();
        let specifications = Specifications::load(&directories, None);
        let host = HostFacts { root: tree.at("/"), driver: kernel };
        let devices = specifications.devices(&host);
        // What creating a container of each would result in: a device may be well and no GPU's.
        let found =
            gpus.iter().map(|gpu| specifications.edits_for(std::slice::from_ref(gpu), &host));
        let (served, refused): (Vec<_>, Vec<_>) =
            found.filter_map(Result::transpose).partition(Result::is_ok);
        let unusable = specifications
            .unusable()
            .map(|(file, why)| format!("{} can't be used: {why}", tree.named(file).display()));
        let trouble = devices.iter().filter_map(|device| match &device.state {
            State::Ok | State::Overridden(_) => None,
            State::Conflict(with) => {
                Some(format!("{} is in {} as well", device.name, with.display()))
            }
            State::Stale(why) | State::Unsupported(why) => Some(why.clone()),
        });
        Cdi {
            usable: devices.iter().filter(|device| device.state == State::Ok).count(),
            trouble: trouble.chain(unusable).next(),
            served: served.len(),
            refused: refused
                .iter()
                .filter_map(|found| Some(found.as_ref().err()?.to_string()))
                .collect(),
        }
    });
    let nvidia_runtime = (driver.inject == Inject::NvidiaRuntime).then(|| {
        let name = driver.nvidia_runtime.clone();
        let file = tree.program(&name);
        (name, file)
    });
    Files { inject: driver.inject, cdi, nvidia_runtime }
}

/// NVIDIA's GPUs on the PCI bus.
fn on_bus(tree: &Tree) -> Vec<BusGpu> {
    let is = |path: &Path, file: &str, begins: &str| matches!(tree.read(path.join(file)), Observed::Present(text) if text.starts_with(begins));
    let devices = tree.list("/sys/bus/pci/devices").into_iter();
    let gpus =
        devices.filter(|path| is(path, "vendor", VENDOR) && is(path, "class", DISPLAY_CLASS));
    gpus.map(|path| BusGpu {
        bus_id: last(&path),
        driver: fs::read_link(tree.at(path.join("driver"))).ok().map(|link| last(&link)),
    })
    .collect()
}

fn last(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// The driver's nodes in `dev`, with the numbers they should have; `may_make` says whether a creation may
/// make one.
fn nodes(
    tree: &Tree,
    dev: &Path,
    (majors, may_make): (&[(String, u64)], bool),
    minors: &[u32],
) -> Vec<Node> {
    let uvm = majors.iter().find(|(name, _)| name == "nvidia-uvm").map(|(_, major)| *major);
    let is_loaded = |module: Module| module.major_in(majors).is_some();
    let fixed = [
        ("nvidiactl", Some(NVIDIA_MAJOR), 255, true, "cgpu nodes"),
        ("nvidia-uvm", uvm, 0, true, "cgpu nodes"),
        ("nvidia-uvm-tools", uvm, 1, false, "cgpu nodes"),
        ("nvidia-modeset", Some(NVIDIA_MAJOR), 254, false, "nvidia-modprobe -m"),
    ];
    let node = |name: &str, major, minor, needed, made_by: String| {
        let path = dev.join(name);
        let seen = seen(&tree.at(&path));
        let module = identity(name).map(|(module, _)| module);
        let is_made_on_demand = may_make && module.is_some_and(is_loaded);
        Node { path, major, minor, needed, is_made_on_demand, made_by, seen }
    };
    let fixed = fixed.into_iter().map(|(name, major, minor, needed, made_by)| {
        node(name, major, minor, needed, made_by.to_owned())
    });
    let gpus = minors.iter().map(|minor| {
        let made_by = "cgpu nodes".to_owned();
        node(&format!("nvidia{minor}"), Some(NVIDIA_MAJOR), u64::from(*minor), true, made_by)
    });
    fixed.chain(gpus).collect()
}

fn seen(path: &Path) -> Observed<NodeKind> {
    match fs::metadata(path) {
        Ok(meta) if meta.file_type().is_char_device() => Observed::Present(NodeKind::Device(
            major(meta.rdev()).into(),
            minor(meta.rdev()).into(),
        )),
        Ok(_) => Observed::Present(NodeKind::File),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Observed::Absent,
        Err(error) => Observed::Unreadable(error.to_string()),
    }
}
