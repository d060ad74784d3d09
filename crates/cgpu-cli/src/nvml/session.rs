//! The GPUs as NVML, the driver's management library, reports them.
//!
//! Owns loading the library, asking it, and what becomes of a GPU that doesn't answer.
//! Must not be reached from the runtime, the hook or the monitor: NVML opens every GPU,
//! takes a second or more if no process keeps them open, and can hang with the driver.
//!
//! A GPU that fails any question is retained as lost, with what the kernel module still
//! knows of it, so that its index stays taken and a request for it is refused with the
//! reason. GPUs that NVML doesn't count (excluded, no device node) are not
//! shown: they have no index.

#![allow(
    unsafe_code,
    reason = "nvml-wrapper has no call for the instances of a MIG device, nor for memory before driver 510"
)]

use std::collections::HashSet;
use std::env::consts::ARCH;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};
use thiserror::Error;

use cgpu_core::gpu::{Gpu, GpuEntry, GpuState, Inventory, InventoryError, MigDevice};
use cgpu_core::units::{MIB, bytes_to_mib};
use cgpu_host::inventory::{KernelGpu, bus_id};

/// The name that drivers install for programs; the one without a number is for compilers.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// NVML's answer where all is well (`nvml.h`, `NVML_SUCCESS`).
const SUCCESS: u32 = 0;

/// Why NVML reported nothing.
#[derive(Debug, Error)]
pub enum ProbeError {
    /// The library isn't there, or doesn't load.
    #[error(
        "can't load {LIBRARY} under {}; install the NVIDIA driver's libraries there, or correct \
         root under [driver]",
        driver_root.display()
    )]
    NoLibrary {
        /// Where the driver's files are said to be.
        driver_root: PathBuf,
        /// What the loader said of the first one tried; `None` where there was none.
        #[source]
        source: Option<NvmlError>,
    },
    /// Library and kernel module are of different releases.
    #[error(
        "{} is not of the release of the loaded nvidia kernel module; reload the module, or \
         reboot",
        library.display()
    )]
    Mismatch {
        library: PathBuf,
        #[source]
        source: NvmlError,
    },
    /// The library loads and doesn't start.
    #[error(
        "{} can't be initialised; see whether `nvidia-smi` works, and the kernel's log",
        library.display()
    )]
    Init {
        library: PathBuf,
        #[source]
        source: NvmlError,
    },
    /// It can't even say how many GPUs there are.
    #[error("NVML can't count the GPUs; see whether `nvidia-smi` works, and the kernel's log")]
    Count {
        #[source]
        source: NvmlError,
    },
    /// What it says of one GPU contradicts what it says of another.
    #[error("NVML's list of GPUs makes no sense; see whether `nvidia-smi -L` shows the same")]
    Nonsense {
        #[source]
        source: InventoryError,
    },
}

/// NVML, initialised. GPUs that it has opened stay open until this is dropped.
#[derive(Debug)]
pub(crate) struct Session {
    nvml: Nvml,
}

/// What NVML reported of one index.
#[derive(Debug, Default)]
struct Answers {
    bus_id: Option<String>,
    uuid: Option<String>,
    minor: Option<u32>,
    name: Option<String>,
    /// Bytes in all, and those that the driver keeps for itself; 0 where it doesn't say.
    memory_bytes: Option<(u64, u64)>,
    mig_enabled: bool,
    mig_devices: Vec<MigDevice>,
    /// The first thing it could not tell.
    failure: Option<NvmlError>,
}

impl Session {
    /// Loads the library under `driver_root` and initialises it.
    ///
    /// # Errors
    ///
    /// Where none loads, or the one that does can't reach the driver.
    pub(crate) fn open(driver_root: &Path) -> Result<Self, ProbeError> {
        let mut first = None;
        for library in candidates(driver_root) {
            match Nvml::builder().lib_path(&library).init() {
                Ok(nvml) => return Ok(Session { nvml }),
                Err(error @ NvmlError::LibloadingError(_)) => first = first.or(Some(error)),
                Err(source @ NvmlError::LibRmVersionMismatch) => {
                    return Err(ProbeError::Mismatch { library: library.into(), source });
                }
                Err(source) => return Err(ProbeError::Init { library: library.into(), source }),
            }
        }
        Err(ProbeError::NoLibrary { driver_root: driver_root.to_owned(), source: first })
    }

    /// The library, for questions of others.
    pub(crate) fn nvml(&self) -> &Nvml {
        &self.nvml
    }

    /// The GPUs that NVML counts, completed from the kernel module's list.
    ///
    /// # Errors
    ///
    /// Where NVML can't count them, or contradicts itself.
    pub(super) fn list(&self, kernel: &[KernelGpu]) -> Result<Inventory, ProbeError> {
        let count = self.nvml.device_count().map_err(|source| ProbeError::Count { source })?;
        let answers = (0..count).map(|index| self.ask(index)).collect();
        settle(answers, kernel).map_err(|source| ProbeError::Nonsense { source })
    }

    fn ask(&self, index: u32) -> Answers {
        let device = match self.nvml.device_by_index(index) {
            Ok(device) => device,
            Err(error) => return Answers { failure: Some(error), ..Answers::default() },
        };
        let mut failure = None;
        let pci = or_failure(&mut failure, device.pci_info());
        let mig_enabled = or_failure(&mut failure, is_mig_enabled(&device)).unwrap_or(false);
        Answers {
            bus_id: pci.map(|pci| bus_id::normalise(&pci.bus_id)),
            uuid: or_failure(&mut failure, device.uuid()),
            minor: or_failure(&mut failure, device.minor_number()),
            // No GPU is worse for having no name.
            name: device.name().ok(),
            memory_bytes: or_failure(&mut failure, memory(&self.nvml, &device)),
            mig_enabled,
            mig_devices: match mig_enabled {
                true => mig_devices(&self.nvml, index, &device),
                false => Vec::new(),
            },
            failure,
        }
    }
}

/// Bytes of a GPU's memory in all, and those that the driver keeps for itself.
fn memory(nvml: &Nvml, device: &Device<'_>) -> Result<(u64, u64), NvmlError> {
    match device.memory_info() {
        Ok(memory) => Ok((memory.total, memory.reserved)),
        // Of drivers before 510, which have the question's first form alone.
        Err(NvmlError::FailedToLoadSymbol(symbol)) => {
            total(nvml, device).map(|total| (total, 0)).ok_or(NvmlError::FailedToLoadSymbol(symbol))
        }
        Err(error) => Err(error),
    }
}

/// The same in all, by the question's first form.
fn total(nvml: &Nvml, device: &Device<'_>) -> Option<u64> {
    let ask = nvml.lib().nvmlDeviceGetMemoryInfo.as_ref().ok()?;
    // SAFETY: the handle is used here only, while `nvml`, which it is of, lives.
    let handle = unsafe { device.handle() };
    // `nvmlMemory_t`: in all, free, used.
    let mut memory = [0_u64; 3];
    // SAFETY: the function is of the library that the handle is of, and writes three numbers.
    let answer = unsafe { ask(handle, memory.as_mut_ptr().cast()) };
    (answer == SUCCESS).then_some(memory[0])
}

/// The libraries to try, best first.
fn candidates(driver_root: &Path) -> Vec<OsString> {
    let mut candidates = Vec::new();
    if driver_root == Path::new("/") {
        // The loader knows the host's configuration; the directories are for hosts that
        // keep the driver where the loader doesn't look.
        candidates.push(OsString::from(LIBRARY));
    }
    let directories = [
        format!("usr/lib/{ARCH}-linux-gnu"),
        format!("usr/lib/{ARCH}-linux-gnu/nvidia/current"),
        "usr/lib64".to_owned(),
        "usr/lib".to_owned(),
        format!("lib/{ARCH}-linux-gnu"),
        "lib64".to_owned(),
        "lib".to_owned(),
        "usr/local/nvidia/lib64".to_owned(),
        "home/kubernetes/bin/nvidia/lib64".to_owned(),
    ];
    let files = directories.iter().map(|directory| driver_root.join(directory).join(LIBRARY));
    candidates.extend(files.filter(|file| file.exists()).map(OsString::from));
    candidates
}

/// The answer, with the first failure remembered.
fn or_failure<T>(failure: &mut Option<NvmlError>, answer: Result<T, NvmlError>) -> Option<T> {
    match answer {
        Ok(answer) => Some(answer),
        Err(error) => {
            failure.get_or_insert(error);
            None
        }
    }
}

fn is_mig_enabled(device: &Device<'_>) -> Result<bool, NvmlError> {
    match device.mig_mode() {
        Ok(mode) => Ok(mode.current == 1),
        // GPUs before Ampere, and libraries from before MIG.
        Err(
            NvmlError::NotSupported
            | NvmlError::FunctionNotFound
            | NvmlError::FailedToLoadSymbol(_),
        ) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The instances that the MIG device `mig` is of, GPU's and compute's, as far as NVML reports them.
fn instances(nvml: &Nvml, mig: &Device<'_>) -> (Option<u32>, Option<u32>) {
    let library = nvml.lib();
    let (mut gpu, mut compute) = (0, 0);
    // SAFETY: the handle is used here only, while `nvml`, which it is of, lives.
    let handle = unsafe { mig.handle() };
    let reported_gpu = library.nvmlDeviceGetGpuInstanceId.as_ref().is_ok_and(|ask| {
        // SAFETY: the function is of the library that the handle is of, and writes one number.
        let answer = unsafe { ask(handle, &raw mut gpu) };
        answer == SUCCESS
    });
    let reported_compute = library.nvmlDeviceGetComputeInstanceId.as_ref().is_ok_and(|ask| {
        // SAFETY: the function is of the library that the handle is of, and writes one number.
        let answer = unsafe { ask(handle, &raw mut compute) };
        answer == SUCCESS
    });
    (reported_gpu.then_some(gpu), reported_compute.then_some(compute))
}

/// The MIG devices of `device`, GPU `index`. One that can't be described is left out,
/// which is logged: no container could be given it anyway.
fn mig_devices(nvml: &Nvml, index: u32, device: &Device<'_>) -> Vec<MigDevice> {
    let describe = |mig_index| {
        let mig = device.mig_device_by_index(mig_index)?;
        let memory_mib = bytes_to_mib(mig.memory_info()?.total);
        let (uuid, (gpu_instance, compute_instance)) = (mig.uuid()?, instances(nvml, &mig));
        Ok(MigDevice { index: mig_index, uuid, memory_mib, gpu_instance, compute_instance })
    };
    let places = device.mig_device_count().unwrap_or_else(|error| {
        tracing::warn!("GPU {index}: NVML can't count its MIG devices: {error}");
        0
    });
    let mut devices = Vec::new();
    for mig_index in 0..places {
        match describe(mig_index) {
            Ok(device) => devices.push(device),
            // The count is of places, not of devices.
            Err(NvmlError::NotFound) => {}
            Err(error) => {
                tracing::warn!("GPU {index}: MIG device {mig_index} is left out: {error}");
            }
        }
    }
    devices
}

/// The inventory that NVML's answers resolve to, one for each index, with the kernel
/// module's list for what is missing.
fn settle(mut answers: Vec<Answers>, kernel: &[KernelGpu]) -> Result<Inventory, InventoryError> {
    place(&mut answers, kernel);
    let mut gpus = Vec::new();
    for (index, answers) in (0..).zip(answers) {
        let known = kernel.iter().find(|gpu| Some(&gpu.bus_id) == answers.bus_id.as_ref());
        let bus_id = answers.bus_id.unwrap_or_default();
        let uuid = answers.uuid.or_else(|| known?.uuid.clone());
        if let Some(failure) = &answers.failure {
            tracing::warn!("GPU {index} ({bus_id}) is taken for lost: {failure}");
        }
        gpus.push(Gpu::try_from(GpuEntry {
            index,
            uuid: uuid.unwrap_or_else(|| stand_in(index, &bus_id)),
            minor: answers.minor.or_else(|| known?.minor),
            bus_id,
            name: answers.name.unwrap_or_default(),
            memory_mib: answers.memory_bytes.map_or(0, |(total, _)| bytes_to_mib(total)),
            // Rounded up: the last part of a MiB can't be reserved either.
            memory_reserved_mib: answers
                .memory_bytes
                .map_or(0, |(_, retained)| retained.div_ceil(MIB)),
            state: if answers.failure.is_some() { GpuState::Lost } else { GpuState::Ok },
            mig_enabled: answers.mig_enabled,
            mig_devices: answers.mig_devices,
        })?);
    }
    Inventory::new(gpus)
}

/// What stands for the UUID of a lost GPU whose UUID is unknown: no GPU's, so
/// no container can ask for it by accident, and people can find the card.
fn stand_in(index: u32, bus_id: &str) -> String {
    if bus_id.is_empty() {
        format!("GPU-unknown-index-{index}")
    } else {
        format!("GPU-unknown-{bus_id}")
    }
}

/// Gives those that NVML had no handle for the bus ids that are left over.
///
/// NVML counts by bus id, and excluded GPUs not at all. If more or fewer are left than
/// are missing, they can't be matched, and none is given.
fn place(answers: &mut [Answers], kernel: &[KernelGpu]) {
    let taken: HashSet<String> = answers.iter().filter_map(|a| a.bus_id.clone()).collect();
    let left: Vec<&KernelGpu> = kernel
        .iter()
        .filter(|gpu| gpu.excluded != Some(true) && !taken.contains(&gpu.bus_id))
        .collect();
    let missing: Vec<&mut Answers> =
        answers.iter_mut().filter(|answers| answers.bus_id.is_none()).collect();
    if left.len() == missing.len() {
        for (answers, gpu) in missing.into_iter().zip(left) {
            answers.bus_id = Some(gpu.bus_id.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kernel(bus_id: &str, uuid: Option<&str>, minor: u32) -> KernelGpu {
        KernelGpu {
            bus_id: bus_id.to_owned(),
            uuid: uuid.map(str::to_owned),
            minor: Some(minor),
            excluded: Some(false),
        }
    }

    fn answering(bus_id: &str, uuid: &str, minor: u32) -> Answers {
        Answers {
            bus_id: Some(bus_id.to_owned()),
            uuid: Some(uuid.to_owned()),
            minor: Some(minor),
            memory_bytes: Some(((16130 << 20) + 1, (511 << 20) + 1)),
            ..Answers::default()
        }
    }

    fn silent() -> Answers {
        Answers { failure: Some(NvmlError::GpuLost), ..Answers::default() }
    }

    /// A lost GPU is found in the kernel's list by elimination of the GPUs that answer.
    #[test]
    fn lost_gpu_is_identified_by_elimination() {
        let list = [
            kernel("0000:00:07.0", Some("GPU-a"), 2),
            kernel("0000:00:08.0", Some("GPU-b"), 1),
            kernel("0000:00:09.0", Some("GPU-c"), 0),
        ];
        let answers = vec![
            answering("0000:00:07.0", "GPU-a", 2),
            silent(),
            answering("0000:00:09.0", "GPU-c", 0),
        ];
        let inventory = settle(answers, &list).unwrap();
        let lost = &inventory.gpus()[1];
        assert_eq!((lost.state, &*lost.uuid, lost.minor), (GpuState::Lost, "GPU-b", 1));
        assert_eq!(lost.bus_id, "0000:00:08.0");
        assert_eq!(inventory.gpus()[0].memory_bytes, 16130 << 20);
        assert_eq!(inventory.gpus()[0].reserved_bytes, 512 << 20);
    }

    #[test]
    fn excluded_gpu_is_not_mistaken_for_lost() {
        let mut list =
            [kernel("0000:00:07.0", Some("GPU-a"), 0), kernel("0000:00:08.0", Some("GPU-b"), 1)];
        list[0].excluded = Some(true);
        let inventory = settle(vec![silent()], &list).unwrap();
        assert_eq!(inventory.gpus()[0].uuid, "GPU-b");
    }

    /// A lost GPU that can't be identified is named after its bus id, or after its index if the bus
    /// id is unknown, too.
    #[test]
    fn unidentified_lost_gpu_is_named_by_its_position() {
        let list = [kernel("0000:00:07.0", None, 0), kernel("0000:00:08.0", Some("GPU-b"), 1)];
        let inventory = settle(vec![silent()], &list).unwrap();
        assert_eq!(inventory.gpus()[0].uuid, "GPU-unknown-index-0", "one of two: which?");
        let inventory = settle(vec![silent()], &list[..1]).unwrap();
        assert_eq!(inventory.gpus()[0].uuid, "GPU-unknown-0000:00:07.0");
    }

    #[test]
    fn two_gpus_of_one_uuid_are_nonsense() {
        let answers =
            vec![answering("0000:00:07.0", "GPU-a", 0), answering("0000:00:08.0", "GPU-a", 1)];
        let error = settle(answers, &[]).unwrap_err();
        assert_eq!(error.to_string(), "two GPUs have UUID GPU-a");
    }

    /// The dynamic loader's search is used only if the driver is the host's own.
    #[test]
    fn loader_search_is_used_only_for_host_driver() {
        assert_eq!(candidates(Path::new("/"))[0], LIBRARY);
        assert!(candidates(Path::new("/nonexistent")).is_empty());
    }
}
