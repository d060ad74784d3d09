//! What the files say, and how a write is done: the host behind the tree.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use cgpu::admission::Admission;
use cgpu::admission::AdmissionError;

use cgpu::backend::Obstacle;
use cgpu::host::Host;
use cgpu_cli::view::{Processes, collect_records, observe};
use cgpu_core::gpu::Gpu;
use cgpu_core::plan::{Change, ChangeError, GpuChangeError, GpuRules};
use cgpu_core::units::mib_to_bytes;
use cgpu_host::inventory;
use cgpu_host::registry::{Record, RegistryError};
use fuser::Errno;
use rustix::fs::major;
use tracing::{info, warn};

use crate::containers::{Records, Registered};
use crate::node::Node;
use crate::write_request::{Senseless, WriteRequest, request};

/// Major number of NVIDIA's nodes, if none can be inspected (`nv-linux.h`).
const MAJOR: u64 = 195;

/// The host that the tree shows.
#[derive(Debug)]
pub(crate) struct Shown {
    host: Host,
    registered: Registered,
}

impl Shown {
    pub(crate) fn new(host: Host) -> Self {
        Shown { host, registered: Registered::default() }
    }

    /// The GPUs that are known, by index.
    pub(crate) fn gpus(&self) -> Vec<u32> {
        self.known_gpus().into_iter().map(|gpu| gpu.index).collect()
    }

    fn known_gpus(&self) -> Vec<Gpu> {
        let known = inventory::cached(&self.host.inventory_settings()).ok().flatten();
        known.map(|known| known.gpus().to_vec()).unwrap_or_default()
    }

    /// The short ids of the containers with a quota on the GPU with that index, whichever backend enforces
    /// it.
    pub(crate) fn containers(&self, gpu: u32) -> Vec<String> {
        let records = self.records().unwrap_or_else(|_| [].into());
        let on_it = records.iter().filter(|record| has_quota(record, gpu));
        on_it.map(|record| record.short_id.clone()).collect()
    }

    fn records(&self) -> Result<Records, RegistryError> {
        self.registered.now(&self.host)
    }

    /// Whether the node is there.
    pub(crate) fn exists(&self, node: &Node) -> bool {
        match node {
            Node::Root | Node::RootFile(_) => true,
            Node::Gpu(gpu) | Node::GpuFile(gpu, _) => self.gpus().contains(gpu),
            Node::Container(gpu, id) | Node::ContainerFile(gpu, id, _) => {
                self.record(id).is_ok_and(|record| has_quota(&record, *gpu))
            }
        }
    }

    /// What a file says.
    ///
    /// # Errors
    ///
    /// If it isn't there any more, or what it says is unknown.
    pub(crate) fn read(&self, node: &Node) -> Result<String, Errno> {
        let text = match node {
            Node::Root | Node::Gpu(_) | Node::Container(..) => return Err(Errno::EISDIR),
            // What a write of 1 to `upgrade` brings to every container.
            Node::RootFile("version" | "upgrade") => env!("CARGO_PKG_VERSION").to_owned(),
            Node::RootFile("default_memsize") => {
                let mib = self.host.default_memory_mib().map_err(|_| Errno::EIO)?;
                mib_to_bytes(mib).unwrap_or(u64::MAX).to_string()
            }
            Node::RootFile("major") => self.major().to_string(),
            Node::RootFile(_) => return Err(Errno::EACCES),
            Node::GpuFile(index, "free_weight") => self.free_weight(*index)?.to_string(),
            Node::GpuFile(index, name) => {
                let rules = self.rules(*index)?;
                let value = match *name {
                    "policy" => rules.policy,
                    "max_inst" => rules.max_inst,
                    _ => rules.prio_ratio,
                };
                value.to_string()
            }
            Node::ContainerFile(index, id, "meminfo") => self.meminfo(*index, id)?,
            Node::ContainerFile(index, id, name) => {
                let record = self.record(id).map_err(|(errno, _)| errno)?;
                let part = record.plan.gpus.iter().find(|gpu| gpu.index == *index);
                let quota = part.and_then(|gpu| gpu.memory_limit_bytes).ok_or(Errno::ENOENT)?;
                match *name {
                    "id" => record.key.id,
                    "memsize" => quota.to_string(),
                    "weight" => record.plan.weight.to_string(),
                    _ => u8::from(record.plan.high_priority).to_string(),
                }
            }
        };
        Ok(text + "\n")
    }

    /// A GPU's settings.
    fn rules(&self, index: u32) -> Result<GpuRules, Errno> {
        let gpus = self.known_gpus();
        let gpu = gpus.iter().find(|gpu| gpu.index == index).ok_or(Errno::ENOENT)?;
        let registry = self.host.check_registry().map_err(|_| Errno::EIO)?;
        Admission::of(&self.host.chosen_again())
            .gpu_rules(&registry, index, &gpu.uuid)
            .map_err(|_| Errno::EIO)
    }

    /// The weight that no container has: as `cgpu ps` shows it.
    fn free_weight(&self, index: u32) -> Result<u32, Errno> {
        let on_it: Vec<Record> = self.records().map_err(|_| Errno::EIO)?.to_vec();
        let on_it = on_it.into_iter().filter(|record| has_quota(record, index)).collect();
        let seen =
            collect_records(&self.host.chosen_again(), on_it, &[], Processes::Numbered, None);
        let seen = seen.map_err(|_| Errno::EIO)?;
        let gpu = seen.gpus.iter().find(|gpu| gpu.index == index).ok_or(Errno::ENOENT)?;
        gpu.free_weight.ok_or(Errno::EIO)
    }

    /// Free memory of a container's quota on a GPU, and its processes.
    fn meminfo(&self, index: u32, short_id: &str) -> Result<String, Errno> {
        let record = self.record(short_id).map_err(|(errno, _)| errno)?;
        let observed = observe(&self.host, &record).map_err(|_| Errno::EIO)?;
        let observed = observed.ok_or(Errno::ENODATA)?;
        // Else its monitor doesn't answer.
        let instances = observed.instances.ok_or(Errno::ETIMEDOUT)?;
        let instance = instances.iter().find(|instance| instance.gpu_index == index);
        let instance = instance.ok_or(Errno::ENOENT)?;
        let used = instance.memory_used_bytes.ok_or(Errno::ENODATA)?;
        let mut text = format!("Free: {}", instance.memory_limit_bytes.saturating_sub(used));
        for (pid, bytes) in instance.processes.iter().filter(|(_, bytes)| *bytes > 0) {
            text += &format!("\nPID: {pid} Mem: {bytes}");
        }
        Ok(text)
    }

    fn major(&self) -> u64 {
        let node = self.host.driver_nodes().dev.join("nvidiactl");
        let device = fs::metadata(node).map(|meta| meta.rdev()).unwrap_or_default();
        if device == 0 { MAJOR } else { major(device).into() }
    }

    /// Does what `bytes` written to the file of `node` request; applied when it returns.
    ///
    /// # Errors
    ///
    /// As a file of a kernel says it; the log has the reason.
    pub(crate) fn write(&self, node: &Node, bytes: &[u8]) -> Result<(), Errno> {
        let (errno, reason) = match request(node, bytes) {
            Ok(request) => match self.grant(&request) {
                Ok(()) => return Ok(()),
                Err(refused) => refused,
            },
            Err(Senseless::ReadOnly) => (Errno::EACCES, "it is for reading".to_owned()),
            Err(Senseless::Invalid(why)) => (Errno::EINVAL, why),
        };
        warn!(file = ?node, reason, "a write to the tree is refused");
        Err(errno)
    }

    fn grant(&self, request: &WriteRequest) -> Result<(), (Errno, String)> {
        match request {
            WriteRequest::Gpu(gpu, change) => {
                let set =
                    Admission::of(&self.host.chosen_again()).set_gpu(&gpu.to_string(), *change);
                set.map(drop).map_err(|error| (errno(&error), error.to_string()))
            }
            WriteRequest::DefaultMemory(mib) => {
                let set = Admission::of(&self.host.chosen_again()).set_default_memory(*mib);
                set.map_err(|error| (errno(&error), error.to_string()))
            }
            WriteRequest::Container(short_id, change) => {
                let record = self.record(short_id)?;
                let is_so = match change {
                    Change::Weight(weight) => record.plan.weight == *weight,
                    Change::HighPriority(high) => record.plan.high_priority == *high,
                    Change::MemoryLimit { .. } => false,
                };
                if is_so {
                    return Ok(());
                }
                let set = Admission::of(&self.host.chosen_again()).set_of(&record.key, *change);
                set.map(drop).map_err(|error| (errno(&error), error.to_string()))
            }
            // Our instances are made by container creations, and end with their containers.
            WriteRequest::Create(gpu, _) if !self.gpus().contains(gpu) => {
                Err((Errno::EINVAL, format!("this host has no GPU {gpu}")))
            }
            WriteRequest::Create(gpu, id) if self.containers(*gpu).contains(id) => Ok(()),
            WriteRequest::Create(..) => Err((
                Errno::ENOENT,
                "a container gets its part of a GPU when it is created, by its variables"
                    .to_owned(),
            )),
            WriteRequest::Destroy(short_id) => {
                let collected = Admission::of(&self.host.chosen_again()).collect();
                collected.map_err(|error| (Errno::EIO, error.to_string()))?;
                match self.record(short_id) {
                    Err(_) => Ok(()),
                    Ok(_) => Err((Errno::EBUSY, "it is there, and keeps its quota".to_owned())),
                }
            }
            WriteRequest::Upgrade => {
                let mut reported = Vec::new();
                let done = cgpu_cli::commands::upgrade_monitors::run(&self.host, &mut reported);
                let reported = String::from_utf8_lossy(&reported).trim().replace('\n', ", ");
                info!(reported, "monitors upgraded");
                done.map_err(|error| (Errno::EIO, error.to_string()))
            }
        }
    }

    /// The container with that short id.
    fn record(&self, short_id: &str) -> Result<Record, (Errno, String)> {
        let records = self.records().map_err(|error| (Errno::EIO, error.to_string()))?;
        let found = records.iter().find(|record| record.short_id == short_id).cloned();
        let gone = || (Errno::ENOENT, format!("no container has the short id {short_id}"));
        found.ok_or_else(gone)
    }
}

fn has_quota(record: &Record, gpu: u32) -> bool {
    let mut gpus = record.plan.gpus.iter();
    gpus.any(|planned| planned.index == gpu && planned.memory_limit_bytes.is_some())
}

/// How a kernel's file would say it.
fn errno(error: &AdmissionError) -> Errno {
    match error {
        AdmissionError::Refused(_) => Errno::ENOSPC,
        AdmissionError::GpuChange(GpuChangeError::Occupied { .. }) => Errno::EBUSY,
        AdmissionError::GpuChange(GpuChangeError::NotHeld { .. }) => Errno::EPERM,
        AdmissionError::GpuChange(_) => Errno::EINVAL,
        AdmissionError::Change(ChangeError::BadSize { .. } | ChangeError::BadWeight { .. }) => {
            Errno::EINVAL
        }
        AdmissionError::Change(_)
        | AdmissionError::NoSuchGpu { .. }
        | AdmissionError::Registry(RegistryError::Unknown { .. }) => Errno::ENOENT,
        AdmissionError::Backend(error) => match error.obstacle() {
            Obstacle::InUse => Errno::EBUSY,
            Obstacle::NotHeld => Errno::EPERM,
            Obstacle::Failure => Errno::EIO,
        },
        _ => Errno::EIO,
    }
}

/// A reader or writer that FUSE reports.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caller {
    /// Its number in our pid namespace; 0 where it has none there.
    pub(crate) pid: u32,
    pub(crate) uid: u32,
}

impl Caller {
    /// Whether it is the host's root: none of a container, which has mounts of its own whatever else of
    /// the host's it was given.
    pub(crate) fn is_hosts_root(self) -> bool {
        let same = |name: &str| -> io::Result<bool> {
            let theirs = fs::read_link(format!("/proc/{}/ns/{name}", self.pid))?;
            Ok(theirs == fs::read_link(format!("/proc/self/ns/{name}"))?)
        };
        self.uid == 0
            && self.pid != 0
            && ["mnt", "pid", "user"].iter().all(|name| same(name).unwrap_or(false))
    }
}
