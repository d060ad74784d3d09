//! GPUs of a host, as they are known: [`Inventory`], [`Gpu`], [`MigDevice`]. Pure.
//!
//! A reader of an inventory needs no driver and no file. GPUs are ordered by index; index and UUID are unique; memory
//! is a multiple of 1 MiB.

use alloc::string::String;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::units::{bytes_to_mib, mib_to_bytes};

/// The GPUs of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inventory {
    gpus: Vec<Gpu>,
}

/// One physical GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "GpuEntry", try_from = "GpuEntry")]
pub struct Gpu {
    /// The driver's index: `nvidia-smi`'s order, which is by bus id.
    pub index: u32,
    /// `GPU-` and the 36 characters of a UUID, as NVML prints it.
    pub uuid: String,
    /// Minor number of `/dev/nvidiaN`; not always the index.
    pub minor: u32,
    /// PCI address as `domain:bus:device.function`; empty where unknown.
    pub bus_id: String,
    /// Marketing name, as `Tesla V100-SXM2-16GB`; empty where unknown.
    pub name: String,
    /// Total memory in bytes, a multiple of 1 MiB (what `nvidia-smi` shows).
    pub memory_bytes: u64,
    /// What the driver reserves of that for itself in bytes, a multiple of 1 MiB; 0 if it doesn't say.
    pub reserved_bytes: u64,
    /// Whether the driver can still reach it.
    pub state: GpuState,
    /// Whether MIG mode is on; then the GPU can be used through its MIG devices only.
    pub mig_enabled: bool,
    /// Its MIG devices.
    pub mig_devices: Vec<MigDevice>,
}

/// Whether a GPU can be given out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GpuState {
    /// It answers.
    #[default]
    Ok,
    /// It fell off the bus (NVML says `GPU_IS_LOST`): shown, never given out.
    Lost,
}

/// One MIG device (GPU instance with a compute instance) of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigDevice {
    /// NVML's index of the MIG device within its GPU.
    pub index: u32,
    /// `MIG-` and a UUID.
    pub uuid: String,
    /// Memory of the instance in MiB.
    pub memory_mib: u64,
    /// The GPU instance that it is of, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_instance: Option<u32>,
    /// The compute instance of that, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_instance: Option<u32>,
}

impl MigDevice {
    /// Its instances, GPU's and compute's, where they are known.
    #[must_use]
    pub fn instances(&self) -> Option<(u32, u32)> {
        // Drivers before 470 have them in the name: `MIG-GPU-…/1/0`.
        let in_name = || {
            let mut parts = self.uuid.rsplit('/');
            let (compute, gpu) = (parts.next()?, parts.next()?);
            Some((gpu.parse().ok()?, compute.parse().ok()?))
        };
        self.gpu_instance.zip(self.compute_instance).or_else(in_name)
    }
}

/// A GPU as inventory files and `cgpu gpus --format json` write it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuEntry {
    /// [`Gpu::index`].
    pub index: u32,
    /// [`Gpu::uuid`].
    pub uuid: String,
    /// [`Gpu::minor`]; the index where it is left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// [`Gpu::bus_id`].
    #[serde(default)]
    pub bus_id: String,
    /// [`Gpu::name`].
    #[serde(default)]
    pub name: String,
    /// Total memory in MiB.
    pub memory_mib: u64,
    /// What the driver reserves of that for itself, in MiB; 0 if it doesn't say.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory_reserved_mib: u64,
    /// [`Gpu::state`].
    #[serde(default)]
    pub state: GpuState,
    /// [`Gpu::mig_enabled`].
    #[serde(default)]
    pub mig_enabled: bool,
    /// [`Gpu::mig_devices`].
    #[serde(default)]
    pub mig_devices: Vec<MigDevice>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's form")]
fn is_zero(mib: &u64) -> bool {
    *mib == 0
}

/// Why a list of GPUs is no inventory.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum InventoryError {
    /// Two GPUs claim one index.
    #[error("two GPUs have index {index}")]
    DuplicateIndex {
        /// The index.
        index: u32,
    },
    /// Two GPUs claim one UUID.
    #[error("two GPUs have UUID {uuid}")]
    DuplicateUuid {
        /// The UUID.
        uuid: String,
    },
    /// The UUID does not begin with `GPU-`, has nothing behind it, or what no list of
    /// devices and no table could hold (a comma, a space, a control character).
    #[error("GPU {index}: UUID {uuid:?} is not GPU- and a UUID")]
    BadUuid {
        /// Index of the GPU.
        index: u32,
        /// What was found in the place of a UUID.
        uuid: String,
    },
    /// The memory is zero, or more MiB than bytes can count.
    #[error("GPU {index}: {memory_mib} MiB of memory is not possible")]
    BadMemory {
        /// Index of the GPU.
        index: u32,
        /// The memory in MiB.
        memory_mib: u64,
    },
}

impl TryFrom<GpuEntry> for Gpu {
    type Error = InventoryError;

    fn try_from(entry: GpuEntry) -> Result<Self, InventoryError> {
        let GpuEntry { index, uuid, minor, memory_mib, .. } = entry;
        let sound = |tail: &str| {
            !tail.is_empty() && tail.bytes().all(|b| b.is_ascii_graphic() && b != b',')
        };
        if !uuid.strip_prefix("GPU-").is_some_and(sound) {
            return Err(InventoryError::BadUuid { index, uuid });
        }
        let memory_bytes = match (memory_mib, entry.state) {
            // Nothing can be asked of a GPU that is lost, its memory neither.
            (0, GpuState::Ok) => None,
            _ => mib_to_bytes(memory_mib),
        };
        Ok(Gpu {
            index,
            uuid,
            minor: minor.unwrap_or(index),
            bus_id: entry.bus_id,
            name: entry.name,
            memory_bytes: memory_bytes.ok_or(InventoryError::BadMemory { index, memory_mib })?,
            reserved_bytes: mib_to_bytes(entry.memory_reserved_mib.min(memory_mib)).unwrap_or(0),
            state: entry.state,
            mig_enabled: entry.mig_enabled,
            mig_devices: entry.mig_devices,
        })
    }
}

impl From<Gpu> for GpuEntry {
    fn from(gpu: Gpu) -> Self {
        GpuEntry {
            index: gpu.index,
            uuid: gpu.uuid,
            minor: Some(gpu.minor),
            bus_id: gpu.bus_id,
            name: gpu.name,
            memory_mib: bytes_to_mib(gpu.memory_bytes),
            memory_reserved_mib: bytes_to_mib(gpu.reserved_bytes),
            state: gpu.state,
            mig_enabled: gpu.mig_enabled,
            mig_devices: gpu.mig_devices,
        }
    }
}

impl Gpu {
    /// Its memory in bytes but for what the driver reserves.
    #[must_use]
    pub fn divisible_bytes(&self) -> u64 {
        self.memory_bytes.saturating_sub(self.reserved_bytes)
    }
}

impl Inventory {
    /// An inventory of `gpus`, put into the order of their indices.
    ///
    /// # Errors
    ///
    /// Where two GPUs share an index or a UUID.
    pub fn new(mut gpus: Vec<Gpu>) -> Result<Self, InventoryError> {
        gpus.sort_by_key(|gpu| gpu.index);
        for pair in gpus.windows(2) {
            if pair[0].index == pair[1].index {
                return Err(InventoryError::DuplicateIndex { index: pair[0].index });
            }
        }
        let mut uuids: Vec<String> = gpus.iter().map(|gpu| gpu.uuid.to_ascii_lowercase()).collect();
        uuids.sort_unstable();
        if let Some(pair) = uuids.windows(2).find(|pair| pair[0] == pair[1]) {
            let twin = gpus.iter().find(|gpu| gpu.uuid.eq_ignore_ascii_case(&pair[0]));
            let uuid = twin.map_or_else(|| pair[0].clone(), |gpu| gpu.uuid.clone());
            return Err(InventoryError::DuplicateUuid { uuid });
        }
        Ok(Inventory { gpus })
    }

    /// The same, with at least `mib` MiB of each GPU reserved.
    #[must_use]
    pub fn reserving(mut self, mib: u64) -> Self {
        let bytes = mib_to_bytes(mib).unwrap_or(u64::MAX);
        for gpu in &mut self.gpus {
            gpu.reserved_bytes = gpu.reserved_bytes.max(bytes).min(gpu.memory_bytes);
        }
        self
    }

    /// The GPUs, by index.
    #[must_use]
    pub fn gpus(&self) -> &[Gpu] {
        &self.gpus
    }

    /// The GPU of that index.
    #[must_use]
    pub fn by_index(&self, index: u32) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.index == index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: u32, uuid: &str) -> Gpu {
        let entry = format!(r#"{{"index":{index},"uuid":"{uuid}","memory_mib":16130}}"#);
        serde_json::from_str(&entry).unwrap()
    }

    #[test]
    fn orders_gpus_by_index() {
        let inventory = Inventory::new(vec![gpu(2, "GPU-c"), gpu(0, "GPU-a")]).unwrap();
        assert_eq!(inventory.gpus()[0].uuid, "GPU-a");
        assert_eq!(inventory.by_index(2).unwrap().uuid, "GPU-c");
        assert_eq!(inventory.by_index(1), None);
    }

    /// Two GPUs of one UUID are refused, whatever their case and order.
    #[test]
    fn refuses_two_gpus_of_one_uuid() {
        let gpus = vec![gpu(0, "GPU-A"), gpu(1, "GPU-B"), gpu(2, "GPU-a")];
        let error = Inventory::new(gpus).unwrap_err();
        assert_eq!(error.to_string(), "two GPUs have UUID GPU-A");
    }

    #[test]
    fn refuses_uuid_that_device_lists_cannot_hold() {
        for uuid in ["GPU-", "MIG-1", "GPU-a,b", "GPU-a b", "GPU-a\\n"] {
            let entry = format!(r#"{{"index":3,"uuid":"{uuid}","memory_mib":1}}"#);
            let error = serde_json::from_str::<Gpu>(&entry).unwrap_err().to_string();
            assert!(error.starts_with("GPU 3: UUID ") && error.contains("is not GPU-"), "{error}");
        }
    }

    #[test]
    fn only_a_lost_gpu_may_lack_memory() {
        let entry = r#"{"index":0,"uuid":"GPU-a","memory_mib":0,"state":"lost"}"#;
        assert_eq!(serde_json::from_str::<Gpu>(entry).unwrap().state, GpuState::Lost);
        let error = serde_json::from_str::<Gpu>(&entry.replace("lost", "ok")).unwrap_err();
        assert!(error.to_string().starts_with("GPU 0: 0 MiB of memory is not possible"));
    }
}
