//! What can be seen of a simulation: `sim/state`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::abi::{CHANNEL_CLASSES, UVM_INIT_FLAGS_DISABLE_HMM};
use crate::export::Exported;
use crate::shared::Shared;

/// All of it, at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The driver's version.
    pub driver: String,
    /// By index.
    pub gpus: Vec<GpuState>,
    /// By handle.
    pub clients: Vec<ClientState>,
    /// Open files of the devices.
    pub files: Vec<FileState>,
    /// How many they are.
    pub open_files: usize,
    /// Calls by kind, and by kind and class, command, function or number.
    pub calls: BTreeMap<String, u64>,
    /// Calls that a fault holds.
    pub hanging: u64,
    /// Faults, as they are written.
    pub faults: Vec<String>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuState {
    /// Its index, and the number of its node.
    pub index: usize,
    /// `GPU-…`.
    pub uuid: String,
    /// Bytes of its memory.
    pub total_bytes: u64,
    /// Bytes in use, managed memory included.
    pub used_bytes: u64,
    /// The most bytes that were in use, since the start or since that was forgotten.
    pub peak_bytes: u64,
    /// The rest.
    pub free_bytes: u64,
    /// Bytes of managed memory: pages of `nvidia-uvm` that were touched.
    pub managed_bytes: u64,
    /// Bytes that were freed and are in use, by a fault.
    pub lost_bytes: u64,
    /// Bytes of memory that only mappings and exports keep alive.
    pub orphan_bytes: u64,
    /// Bytes by process (by its number here), counted once for each process that refers
    /// to them.
    pub processes: BTreeMap<u32, u64>,
}

/// A client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientState {
    /// Its handle.
    pub handle: u32,
    /// The process that made it.
    pub process: u32,
    /// The longest path of that process's cgroups, when it made it.
    pub cgroup: String,
    /// The open file it belongs to.
    pub file: u64,
    /// Its objects, by handle.
    pub objects: Vec<ObjectState>,
}

/// An object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectState {
    /// Its handle.
    pub handle: u32,
    /// Its parent's.
    pub parent: u32,
    /// Its class.
    pub class: u32,
    /// The index of the GPU that has its memory.
    pub gpu: Option<usize>,
    /// Bytes of its memory.
    pub bytes: u64,
    /// A channel group's time slice, as it was asked for last.
    pub timeslice_us: u64,
    /// The compute preemption mode that a channel group's program has set.
    pub compute_mode: Option<u32>,
    /// Whether it's a channel that is taken off the GPU.
    pub disabled: bool,
    /// How many kernels of a channel group have ended.
    pub kernels: u64,
    /// For how many microseconds a channel group's kernels have run.
    pub busy_us: u64,
    /// Processes whose context switches an event buffer shows.
    pub switches: Vec<u32>,
}

/// An open file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// Its number here.
    pub file: u64,
    /// The node.
    pub node: String,
    /// Who opened it.
    pub process: u32,
    /// Of `nvidia-uvm`, after `UVM_INITIALIZE`.
    pub uvm: Option<UvmState>,
    /// Objects that were exported to it and are there.
    pub exported: usize,
}

/// An initialised file of `nvidia-uvm`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UvmState {
    /// The process it is bound to.
    pub process: u32,
    /// The flags it was initialised with.
    pub flags: u64,
    /// Whether `UVM_INIT_FLAGS_DISABLE_HMM` is among them.
    pub hmm_disabled: bool,
    /// GPUs that are registered.
    pub gpus: usize,
    /// External allocations that are mapped.
    pub mappings: usize,
    /// Bytes of managed memory.
    pub managed_bytes: u64,
}

impl State {
    pub(crate) fn of(sim: &Shared) -> Self {
        let (files, calls) = (sim.files(), sim.counts());
        let mut driver = sim.driver();
        let works = driver.works();
        let bytes_of = |id: &u64| driver.memories.get(id).map_or(0, |memory| memory.bytes);
        let gpu_of = |id: &u64| driver.memories.get(id).map(|memory| memory.gpu);
        let managed = driver.managed_bytes();
        let gpus = driver.gpus.iter().enumerate().map(|(index, gpu)| {
            let on = |id: &u64| driver.memories.get(id).is_some_and(|memory| memory.gpu == index);
            let mut processes = BTreeMap::<u32, BTreeMap<u64, u64>>::new();
            let mut held = BTreeMap::new();
            for client in driver.clients.values() {
                let ids = client.objects.values().filter_map(|object| object.memory);
                for id in ids.chain(client.lost.iter().copied()).filter(on) {
                    processes.entry(client.process).or_default().insert(id, bytes_of(&id));
                    held.insert(id, ());
                }
            }
            let lost = driver.clients.values().flat_map(|client| &client.lost).filter(|id| on(id));
            let orphans = driver.memories.keys().filter(|id| on(id) && !held.contains_key(*id));
            GpuState {
                index,
                uuid: gpu.uuid_text(),
                total_bytes: gpu.memory_bytes,
                used_bytes: driver.used_bytes(index),
                peak_bytes: driver.peak_bytes(index),
                free_bytes: driver.free_bytes(index),
                managed_bytes: if index == 0 { managed } else { 0 },
                lost_bytes: lost.map(bytes_of).sum(),
                orphan_bytes: orphans.map(bytes_of).sum(),
                processes: processes
                    .into_iter()
                    .map(|(pid, ids)| (pid, ids.values().sum()))
                    .collect(),
            }
        });
        let clients = driver.clients.iter().map(|(handle, client)| ClientState {
            handle: *handle,
            process: client.process,
            cgroup: client.cgroup.clone(),
            file: client.file,
            objects: client
                .objects
                .iter()
                .map(|(object_handle, object)| ObjectState {
                    handle: *object_handle,
                    parent: object.parent,
                    class: object.class,
                    gpu: object.memory.as_ref().and_then(gpu_of),
                    bytes: object.memory.as_ref().map_or(0, bytes_of),
                    timeslice_us: object.turn.timeslice_us,
                    compute_mode: object.turn.compute_mode,
                    disabled: CHANNEL_CLASSES.contains(&object.class) && !object.turn.is_on(),
                    kernels: works.get(&(*handle, *object_handle)).map_or(0, |work| work.0),
                    busy_us: works.get(&(*handle, *object_handle)).map_or(0, |work| work.1),
                    switches: driver.switches(*handle, *object_handle),
                })
                .collect(),
        });
        let files: Vec<FileState> = files
            .iter()
            .map(|(file, open)| FileState {
                file: *file,
                node: open.device.name(),
                process: open.process,
                exported: driver.exports.get(file).map_or(0, Exported::objects),
                uvm: driver.uvm.get(file).and_then(|uvm| {
                    let flags = uvm.flags?;
                    Some(UvmState {
                        process: uvm.process,
                        flags,
                        hmm_disabled: flags & UVM_INIT_FLAGS_DISABLE_HMM != 0,
                        gpus: uvm.gpus.len(),
                        mappings: uvm.memories().count(),
                        managed_bytes: uvm.managed.len() as u64 * 4096,
                    })
                }),
            })
            .collect();
        State {
            driver: sim.version.to_string(),
            gpus: gpus.collect(),
            clients: clients.collect(),
            open_files: files.len(),
            files,
            calls,
            hanging: sim.hanging(),
            faults: sim.faults(),
        }
    }
}
