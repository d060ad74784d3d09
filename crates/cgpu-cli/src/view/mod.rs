//! The status that people read, as one model: [`Snapshot`].
//!
//! Owns what is shown of a host: its GPUs, its containers, their processes and usage, each with its
//! unit, and "unknown" (`None`) apart from zero. [`collect()`] asks once; tables, JSON,
//! metrics and the tree of files print what it found. Must not know how any of them prints.

mod assembly;
mod collector;
mod driver;

use serde::{Deserialize, Serialize};

pub use collector::{Processes, collect, collect_records, observe};
pub use driver::{Driver, DriverGpu, DriverProcess, DriverUsage};

use cgpu_core::calls::{Calls, Durations};
use cgpu_core::plan::{Caveats, Kind, PlannedGpu};

/// A host, as it was in one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The version of cgpu that made the snapshot.
    pub cgpu_version: String,
    /// The host's name.
    pub hostname: String,
    /// The version of NVIDIA's driver; `None` where no driver is loaded.
    pub driver_version: Option<String>,
    /// The GPUs, in the driver's order.
    pub gpus: Vec<GpuView>,
    /// The registered containers that are not gone, in the order of their runtime's root and id.
    pub containers: Vec<ContainerView>,
    /// What could not be read, a sentence each; the rest is here all the same.
    pub gaps: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuView {
    /// The driver's index.
    pub index: u32,
    /// `GPU-` and a UUID.
    pub uuid: String,
    /// PCI address as `domain:bus:device.function`; empty where unknown.
    pub bus_id: String,
    /// Marketing name; empty where unknown.
    pub name: String,
    /// Whether the driver has lost it.
    pub lost: bool,
    /// Its memory in bytes.
    pub memory_total_bytes: u64,
    /// What the driver keeps of that in bytes; 0 where it doesn't say.
    #[serde(default)]
    pub memory_reserved_bytes: u64,
    /// What quotas promise of that, in bytes; more than the total where `overcommit` allows that.
    pub memory_promised_bytes: u64,
    /// Memory in use in bytes: by the driver's report, else what the containers use where that is
    /// known of each.
    pub memory_used_bytes: Option<u64>,
    /// Per cent of the last second in which something ran on it.
    pub utilization_percent: Option<u32>,
    pub temperature_celsius: Option<u32>,
    pub power_watts: Option<f64>,
    /// The most that it may take, in watts.
    pub power_limit_watts: Option<f64>,
    /// How computing time is shared: 0 to 5; 5 leaves it to the driver.
    pub policy: Option<u32>,
    /// The most containers with a quota, and the sum of their weights.
    pub max_inst: Option<u32>,
    /// Per cent that containers of high priority may take.
    pub prio_ratio: Option<u32>,
    /// Containers with a quota on it.
    pub shared_containers: u32,
    /// Containers that have it unlimited, or whose quota isn't enforced.
    pub other_containers: u32,
    /// What is left of `max_inst` once the weights of its containers are taken off.
    pub free_weight: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContainerView {
    /// Its id, as its engine has it.
    pub id: String,
    /// 12 ASCII characters, unique among the registered containers.
    pub short_id: String,
    /// What its engine calls it: a name, or `namespace/pod/container`. Chosen by its creator: it
    /// can have any characters.
    pub name: Option<String>,
    /// Its runtime's root.
    pub root: String,
    /// The backend that enforces its quota.
    pub backend: Kind,
    /// How it has its GPUs.
    pub mode: Mode,
    /// Its state.
    pub state: State,
    /// Whether its quota is enforced now, by a backend that answers.
    pub enforced: bool,
    /// Its first process, the runtime that is making it, or the monitor of one that is leaked.
    pub pid: Option<i32>,
    /// Seconds since that process began.
    pub age_s: Option<u64>,
    /// Compute weight.
    pub weight: u32,
    /// Whether it has high priority.
    pub high_priority: bool,
    /// Its part of each of its GPUs, in its own order.
    pub shares: Vec<ShareView>,
    /// Its processes that use the driver, those with most memory first, as far as they are known.
    pub processes: Vec<ProcessView>,
    /// How many these are.
    pub process_count: Option<usize>,
    /// Its calls of the driver, by what became of them.
    pub calls: Option<Calls>,
    /// How long these took.
    pub durations: Option<Durations>,
    /// How often its monitor was updated.
    pub monitor_updates: Option<u64>,
    /// Programs of the host that have a way to the memory of a container which has ended.
    #[serde(default)]
    pub leaked_to: Vec<Program>,
    /// What keeps quotas from being enforced on it, or by it on others.
    #[serde(flatten)]
    pub caveats: Caveats,
}

/// A program of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    pub pid: i32,
    /// The kernel's name for it; empty where it isn't known. It chose that itself: it can have any characters.
    pub name: String,
}

/// A container's part of a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShareView {
    /// Which GPU, and how much of it is reserved.
    #[serde(flatten)]
    pub gpu: PlannedGpu,
    /// Memory in use in bytes.
    pub memory_used_bytes: Option<u64>,
    /// The quota in bytes that its monitor enforces; `None` if unknown. It differs from what is reserved
    /// if root has changed the monitor alone.
    #[serde(default)]
    pub memory_enforced_bytes: Option<u64>,
    /// Per cent of the last second in which something of the container ran on it.
    pub utilization_percent: Option<u32>,
    /// The part of its computing time that the container has while all on it have work, from 0 to 1;
    /// `None` where it is the driver's to divide.
    #[serde(default)]
    pub compute_share: Option<f64>,
    /// The part of its computing time that the container had lately, from 0 to 1; `None` if
    /// unknown. The driver samples five times a second which processes are on a GPU, for as long as it remembers
    /// (14 s on an H100), so it is some hundredths off.
    #[serde(default)]
    pub compute_held: Option<f64>,
}

impl ShareView {
    /// The quota in bytes that holds: the monitor's, else what is reserved. `None` if it has the whole GPU.
    #[must_use]
    pub fn limit_bytes(&self) -> Option<u64> {
        self.gpu.memory_limit_bytes.map(|reserved| self.memory_enforced_bytes.unwrap_or(reserved))
    }

    /// The part of the computing time that is its own, as people read it: `33%`.
    #[must_use]
    pub fn compute_per_cent(&self) -> Option<String> {
        self.compute_share.map(per_cent)
    }

    /// The part that it had lately, as people read it.
    #[must_use]
    pub fn held_per_cent(&self) -> Option<String> {
        self.compute_held.map(per_cent)
    }
}

fn per_cent(part: f64) -> String {
    match part * 100.0 {
        part if part > 0.0 && part < 1.0 => "<1%".to_owned(),
        part => format!("{part:.0}%"),
    }
}

/// A process of a container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessView {
    /// Its number, as the host has it.
    pub pid: i32,
    /// What it is called. Chosen by itself: it can have any characters.
    pub name: Option<String>,
    /// Index of a GPU, and its memory there in bytes.
    pub memory: Vec<(u32, u64)>,
}

/// How a container has its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Under a quota.
    Shared,
    /// As a whole.
    Whole,
    /// As a part that nothing holds it to.
    Unenforced,
}

impl Mode {
    /// The word that people read.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Mode::Shared => "shared",
            Mode::Whole => "whole",
            Mode::Unenforced => "unenforced",
        }
    }
}

/// How a container stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Its runtime is making it.
    Reserved,
    /// It was made and not started yet.
    Created,
    /// It runs.
    Active,
    /// It runs, and its monitor did not answer in time.
    Silent,
    /// Its monitor has ended: its driver calls fail.
    Closed,
    /// It has ended, and its quota stays reserved: a program of the host has a way to its memory.
    Leaked,
}

impl State {
    /// The word that people read.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            State::Reserved => "reserved",
            State::Created => "created",
            State::Active => "active",
            State::Silent => "silent",
            State::Closed => "closed",
            State::Leaked => "leaked",
        }
    }
}
