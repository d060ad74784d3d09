//! What NVIDIA's driver says of its GPUs now: [`Driver`], by NVML.
//!
//! Owns asking. The library is loaded once, in a thread of its own: a driver that hangs, as after a
//! GPU has fallen off the bus, blocks that thread and no reader. Must not know containers.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, SystemTime};

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use crate::nvml::{ProbeError, Session};

/// How old a sample of a process's use may be, in µs: the driver has some a second.
const SAMPLE_AGE_US: u64 = 2_000_000;

/// NVIDIA's driver, to be asked again and again.
#[derive(Debug)]
pub struct Driver {
    ask: Sender<()>,
    answers: Receiver<Result<Vec<DriverGpu>, ProbeError>>,
    /// Whether it was asked and has not answered yet.
    owes: bool,
}

/// What the driver says, as far as it does.
#[derive(Debug, Default, PartialEq)]
pub struct DriverUsage {
    /// Its GPUs; none where it doesn't answer.
    pub gpus: Vec<DriverGpu>,
    /// Why that is all, in a sentence.
    pub gap: Option<String>,
}

/// What the driver says of a GPU. What it doesn't is `None`.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct DriverGpu {
    pub index: u32,
    /// `GPU-` and a UUID.
    pub uuid: String,
    /// Memory in use in bytes, what the driver keeps for itself included.
    pub memory_used_bytes: Option<u64>,
    /// Per cent of the last second in which something ran on it.
    pub utilization_percent: Option<u32>,
    pub temperature_celsius: Option<u32>,
    pub power_watts: Option<f64>,
    /// The most that it may take, in watts.
    pub power_limit_watts: Option<f64>,
    /// Whether the driver reports how much of the GPU each process uses.
    pub reports_process_utilization: bool,
    /// Processes that have a context on it.
    pub processes: Vec<DriverProcess>,
}

/// What the driver says of a process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverProcess {
    /// Its number, as the host has it.
    pub pid: i32,
    /// Its memory in bytes.
    pub memory_used_bytes: Option<u64>,
    /// Per cent of the last second in which it ran on the GPU; `None` where it did nothing lately.
    pub utilization_percent: Option<u32>,
}

impl Driver {
    /// The driver whose libraries lie below `root`; nothing is loaded before the first question.
    #[must_use]
    pub fn new(root: PathBuf) -> Self {
        let (ask, questions) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        // Ends with the last question, or with the process: no thread waits for it.
        thread::spawn(move || {
            let mut session = None;
            for () in questions {
                let reported = match session.take().map_or_else(|| Session::open(&root), Ok) {
                    Ok(open) => {
                        let gpus = usage(&open);
                        session = Some(open);
                        gpus
                    }
                    Err(error) => Err(error),
                };
                if answer.send(reported).is_err() {
                    return;
                }
            }
        });
        Driver { ask, answers, owes: false }
    }

    /// What the driver says now, if it does within `timeout`.
    pub fn usage(&mut self, timeout: Duration) -> DriverUsage {
        // The answer to an earlier question is of then.
        if self.owes && self.answers.try_recv().is_ok() {
            self.owes = false;
        }
        if !self.owes && self.ask.send(()).is_err() {
            return DriverUsage::without("the thread that asks NVIDIA's driver has ended");
        }
        self.owes = true;
        let Ok(reported) = self.answers.recv_timeout(timeout) else {
            return DriverUsage::without(
                "NVIDIA's driver does not answer: utilisation, temperature and power are unknown; \
                 see whether `nvidia-smi` works",
            );
        };
        self.owes = false;
        match reported {
            Ok(gpus) => DriverUsage { gpus, gap: None },
            Err(error) => DriverUsage::without(&format!(
                "{error}: utilisation, temperature and power are unknown"
            )),
        }
    }
}

impl DriverUsage {
    fn without(gap: &str) -> Self {
        DriverUsage { gpus: Vec::new(), gap: Some(gap.to_owned()) }
    }
}

fn usage(session: &Session) -> Result<Vec<DriverGpu>, ProbeError> {
    let nvml = session.nvml();
    let count = nvml.device_count().map_err(|source| ProbeError::Count { source })?;
    // One that has no handle, or no UUID, is lost: the inventory says so.
    let of = |index| {
        let device = nvml.device_by_index(index).ok()?;
        Some(gpu(index, device.uuid().ok()?, &device))
    };
    Ok((0..count).filter_map(of).collect())
}

fn gpu(index: u32, uuid: String, device: &Device<'_>) -> DriverGpu {
    let since_us = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .ok()
        .and_then(|now| u64::try_from(now.as_micros()).ok())
        .unwrap_or_default()
        .saturating_sub(SAMPLE_AGE_US);
    let samples = match device.process_utilization_stats(since_us) {
        Ok(samples) => Some(samples),
        // Nothing ran lately.
        Err(NvmlError::NotFound) => Some(Vec::new()),
        Err(_) => None,
    };
    let mut latest: HashMap<u32, (u64, u32)> = HashMap::new();
    for sample in samples.iter().flatten() {
        let found = latest.entry(sample.pid).or_default();
        *found = (*found).max((sample.timestamp, sample.sm_util));
    }
    let mut running: Vec<ProcessInfo> = device.running_compute_processes().unwrap_or_default();
    // A process with both kinds of context has the same memory in both lists.
    for process in device.running_graphics_processes().unwrap_or_default() {
        if !running.iter().any(|other| other.pid == process.pid) {
            running.push(process);
        }
    }
    let process = |process: &ProcessInfo| {
        let memory_used_bytes = match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        Some(DriverProcess {
            pid: i32::try_from(process.pid).ok()?,
            memory_used_bytes,
            utilization_percent: latest.get(&process.pid).map(|(_, percent)| *percent),
        })
    };
    let watts = |milliwatts: u32| f64::from(milliwatts) / 1000.0;
    DriverGpu {
        index,
        uuid,
        memory_used_bytes: device.memory_info().ok().map(|memory| memory.used),
        utilization_percent: device.utilization_rates().ok().map(|rates| rates.gpu),
        temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok(),
        power_watts: device.power_usage().ok().map(watts),
        power_limit_watts: device.enforced_power_limit().ok().map(watts),
        reports_process_utilization: samples.is_some(),
        processes: running.iter().filter_map(process).collect(),
    }
}
