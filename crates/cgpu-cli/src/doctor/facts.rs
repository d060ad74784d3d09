//! What is known of a host: plain values, that a test can make up.
//!
//! Owns no judgement: what is good or bad of them is `judge`'s matter. Must not know where
//! they come from.

use std::path::PathBuf;

pub use crate::engines::{Flaw, Kind as EngineKind, Observed};
use cgpu_core::plan::Kind;
use cgpu_host::config::Inject;
use nvrm::Version;

/// A host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    pub driver: Driver,
    /// The kernel and the backend that isolates.
    pub isolation: Isolation,
    /// The real runtimes, in the order in which they are preferred.
    pub runtimes: Vec<Runtime>,
    /// Engines, whether they are there or not.
    pub engines: Vec<Engine>,
    /// Hook files that name `cgpu-hook`.
    pub hooks: Vec<HookFile>,
    /// NVIDIA's container toolkit.
    pub toolkit: Toolkit,
    /// Where our DRA driver's claims are recorded, if it has run here.
    pub claims: Option<PathBuf>,
    /// Ourselves.
    pub own: Own,
}

/// How the driver's files come into containers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// What is configured.
    pub inject: Inject,
    /// What CDI specifications are worth, where they are asked.
    pub cdi: Option<Cdi>,
    /// NVIDIA's runtime, where it is configured: its name, and its file if it is there.
    pub nvidia_runtime: Option<(String, Option<PathBuf>)>,
}

/// What CDI specifications are worth.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cdi {
    /// How many devices of NVIDIA's can be had.
    pub usable: usize,
    /// Why the first can't that can't, or why a file can't be used.
    pub trouble: Option<String>,
    /// How many of the host's GPUs a container creation finds in them.
    pub served: usize,
    /// Why it doesn't find the others, each.
    pub refused: Vec<String>,
}

/// A library of the driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Library {
    /// The driver's version that it belongs to.
    pub version: Version,
    pub path: PathBuf,
}

/// NVIDIA's driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// `/proc/driver/nvidia/version`.
    pub version_path: PathBuf,
    /// Its first line.
    pub banner: Observed<String>,
    /// NVIDIA's GPUs on the PCI bus, whichever driver they have.
    pub on_bus: Vec<BusGpu>,
    /// The GPUs that the driver has, by their minor numbers if it reports them; why not.
    pub gpus: Result<Vec<Option<u32>>, String>,
    /// Kernel modules and whether each is loaded.
    pub modules: Vec<(&'static str, bool)>,
    pub nodes: Vec<Node>,
    /// Where its files are.
    pub root: PathBuf,
    /// The newest of its libraries there.
    pub library: Option<Library>,
    /// How its files come into containers.
    pub files: Files,
    /// Whether the GPUs are listed in a file.
    pub gpus_from_file: bool,
    /// Whether a source other than the kernel reports it: `[driver] proc_root` leads elsewhere, to a
    /// simulated one.
    pub made_up: bool,
}

/// A GPU on the PCI bus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BusGpu {
    pub bus_id: String,
    /// The kernel's driver that has it.
    pub driver: Option<String>,
}

/// A device node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    pub path: PathBuf,
    /// The major number that the kernel gave; `None` where it gave none.
    pub major: Option<u64>,
    /// The minor number it should have.
    pub minor: u64,
    /// Whether no container with a GPU can be without it.
    pub needed: bool,
    /// Whether a container's creation makes it if it is missing.
    pub is_made_on_demand: bool,
    /// The command that makes it.
    pub made_by: String,
    /// What is there.
    pub seen: Observed<NodeKind>,
}

/// What lies where a node is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeKind {
    /// A character device, with its numbers.
    Device(u64, u64),
    /// Something else.
    File,
}

/// The kernel and the backend that isolates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Isolation {
    /// The kernel's version.
    pub kernel: String,
    /// Whether the gate can work on it, by its version and what its filters may do.
    pub ability: Result<(), String>,
    /// It knows the listener's flag.
    pub listener: bool,
    /// Its notifications are laid out as the gate knows them.
    pub layout: Result<(), String>,
    /// An interrupted call waits until it is answered.
    pub killable_wait: bool,
    /// How its cgroups are mounted.
    pub cgroups: Cgroups,
    /// The backend that the configuration means here.
    pub backend: Kind,
    /// Why that one.
    pub why: &'static str,
    /// Whether it works here.
    pub usable: Result<(), String>,
}

/// How cgroups are mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cgroups {
    /// The unified hierarchy.
    V2,
    /// Hierarchies by controller.
    V1,
    /// Both.
    Hybrid,
    /// None where they usually are.
    Nowhere,
}

/// A candidate for the real runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runtime {
    /// As it is configured.
    pub name: String,
    /// Where it is.
    pub path: Option<PathBuf>,
    /// What its `--version` prints; why that is nothing.
    pub version: Result<String, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Engine {
    pub kind: EngineKind,
    /// Its program, where it is installed.
    pub program: Option<PathBuf>,
    /// Its configuration's files that are there.
    pub files: Vec<EngineFile>,
    /// Of containerd: the file that switches off the plugin by which Kubernetes talks to it.
    pub cri_disabled_by: Option<PathBuf>,
    /// Of containerd: whether pods get the devices that a device plugin names by CDI, where that is known.
    pub gives_cdi_devices: Option<bool>,
}

/// A file of an engine's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineFile {
    pub path: PathBuf,
    /// The runtimes in it that are `cgpu-runtime`; why it can't be read.
    pub handlers: Result<Vec<Handler>, String>,
}

/// A runtime of an engine that is `cgpu-runtime`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handler {
    /// What the engine calls it.
    pub name: String,
    pub program: PathBuf,
    /// Whether that is there and executable.
    pub executable: bool,
    /// The runtime below, where the program's path says which it is.
    pub lower: Option<PathBuf>,
    /// Why the engine doesn't see it, or not all of it.
    pub flaw: Option<Flaw>,
}

/// A file of a hooks directory that names `cgpu-hook`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookFile {
    pub path: PathBuf,
    /// Its stages, the hook's program, and whether that is executable; why it can't be read.
    pub hook: Result<Hook, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hook {
    /// When it is called.
    pub stages: Vec<String>,
    /// What is called.
    pub program: PathBuf,
    /// Whether that is there and executable.
    pub executable: bool,
}

/// NVIDIA's container toolkit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Toolkit {
    /// Its programs that are there.
    pub programs: Vec<PathBuf>,
    /// CDI specifications.
    pub cdi: Vec<PathBuf>,
}

/// Ourselves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Own {
    /// Whether we are the host's root.
    pub root: bool,
    /// Where our programs should be.
    pub directory: PathBuf,
    /// Those that aren't there.
    pub missing: Vec<&'static str>,
    /// The configuration's file, where there is one; what is wrong with it.
    pub config: Result<Option<PathBuf>, String>,
    pub state_dir: PathBuf,
    /// Its mode's permission bits.
    pub state: Observed<u32>,
    /// The log's file; empty for none.
    pub log: PathBuf,
    /// Whether it can be written; why not.
    pub log_open: Result<(), String>,
    /// What is registered; why it can't be read.
    pub records: Result<Records, String>,
    /// What the latest bundles were warned of, each once, the latest last; why it can't be read.
    pub warned: Result<Vec<String>, String>,
    /// The same of allocations that the driver refused though they fit in the quota.
    pub short: Result<Vec<String>, String>,
    /// The GPUs that are known.
    pub divisible: Vec<Divisible>,
}

/// What of a GPU's memory quotas share, in MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Divisible {
    pub index: u32,
    /// All of its memory.
    pub total_mib: u64,
    /// What the driver reserves of that; 0 if unknown.
    pub reserved_mib: u64,
}

/// Registered containers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Records {
    /// All of them.
    pub total: usize,
    /// Those whose container is gone.
    pub stale: usize,
    /// Ids of those whose monitor has ended.
    pub closed: Vec<String>,
    /// Those that were made a while ago and never started.
    pub unstarted: Vec<Unstarted>,
    /// Short ids of containers without a record that a monitor serves.
    pub unregistered: Vec<String>,
    /// How many monitors without a record left something.
    pub leftovers: usize,
}

/// A container that was made and never started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unstarted {
    pub id: String,
    /// Since when, in seconds.
    pub age_s: u64,
    /// The command that removes it.
    pub deletion: String,
}
