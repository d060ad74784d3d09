//! What all threads of a simulation share: the driver, its files, counts and faults.
//!
//! Invariant: no lock is held while a caller's memory is copied or while a call hangs.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use crate::abi::{Abi, Version};
use crate::driver::Driver;
use crate::fault::{Action, CallFault, Fault, Kind, Lies};
use crate::in_memory::FindFile;
use crate::object::{File, Nodes, Uvm};
use crate::spec::Gpu;
use crate::tree::Device;

/// An open file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenFile {
    pub(crate) device: Device,
    /// Who opened it.
    pub(crate) process: u32,
}

/// A simulation.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) version: Version,
    pub(crate) abi: Abi,
    driver: Mutex<Driver>,
    files: Mutex<BTreeMap<File, OpenFile>>,
    counts: Mutex<BTreeMap<String, u64>>,
    faults: Mutex<Vec<CallFault>>,
    cleared: Condvar,
    /// How often faults were cleared.
    clears: AtomicU64,
    faulty: AtomicBool,
    hanging: AtomicU64,
    opened: AtomicU64,
    nodes: OnceLock<Nodes>,
    /// Who looks up descriptors, where our files are not behind a mount.
    find_file: OnceLock<FindFile>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(version: Version, gpus: Vec<Gpu>) -> Self {
        Shared {
            abi: Abi::of(&version),
            version,
            driver: Mutex::new(Driver::new(gpus)),
            files: Mutex::default(),
            counts: Mutex::default(),
            faults: Mutex::default(),
            cleared: Condvar::new(),
            clears: AtomicU64::new(0),
            faulty: AtomicBool::new(false),
            hanging: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            nodes: OnceLock::new(),
            find_file: OnceLock::new(),
        }
    }

    pub(crate) fn driver(&self) -> MutexGuard<'_, Driver> {
        lock(&self.driver)
    }

    /// Where our files are; unknown until the mount serves.
    pub(crate) fn nodes(&self) -> &Nodes {
        static NOWHERE: Nodes = Nodes { device: 0, gpus: Vec::new() };
        self.nodes.get().unwrap_or(&NOWHERE)
    }

    pub(crate) fn set_nodes(&self, nodes: Nodes) {
        self.nodes.get_or_init(|| nodes);
    }

    pub(crate) fn set_find_file(&self, find: FindFile) {
        self.find_file.get_or_init(|| find);
    }

    pub(crate) fn find_file(&self) -> Option<FindFile> {
        self.find_file.get().copied()
    }

    pub(crate) fn open(&self, device: Device, process: u32) -> File {
        let file = self.opened.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.files).insert(file, OpenFile { device, process });
        if device == Device::Uvm {
            self.driver().uvm.insert(file, Uvm::default());
        }
        file
    }

    /// From where to where an open file has managed pages.
    pub(crate) fn managed_pages(&self, file: File) -> Option<(u64, u64)> {
        self.driver().managed_pages(file)
    }

    /// The last descriptor went.
    pub(crate) fn close(&self, file: File) {
        self.driver().close(file);
        lock(&self.files).remove(&file);
    }

    pub(crate) fn device_of(&self, file: File) -> Option<Device> {
        lock(&self.files).get(&file).map(|open| open.device)
    }

    pub(crate) fn files(&self) -> BTreeMap<File, OpenFile> {
        lock(&self.files).clone()
    }

    pub(crate) fn count(&self, kind: Kind, what: u32) {
        let mut counts = lock(&self.counts);
        *counts.entry(kind.name().to_owned()).or_default() += 1;
        // Handles of freed objects are no kind.
        if kind != Kind::Free {
            *counts.entry(format!("{}:{what:#x}", kind.name())).or_default() += 1;
        }
    }

    pub(crate) fn counts(&self) -> BTreeMap<String, u64> {
        lock(&self.counts).clone()
    }

    /// Whether a call may be held up.
    pub(crate) fn is_faulty(&self) -> bool {
        self.faulty.load(Ordering::Acquire)
    }

    pub(crate) fn hanging(&self) -> u64 {
        self.hanging.load(Ordering::Acquire)
    }

    pub(crate) fn faults(&self) -> Vec<String> {
        lock(&self.faults).iter().map(|fault| Fault::Call(fault.clone()).to_string()).collect()
    }

    pub(crate) fn add(&self, fault: Fault) {
        match fault {
            Fault::Clear => {
                self.driver().lies = Lies::default();
                lock(&self.faults).clear();
                self.faulty.store(false, Ordering::Release);
                self.clears.fetch_add(1, Ordering::AcqRel);
                self.cleared.notify_all();
            }
            Fault::Call(fault) => {
                lock(&self.faults).push(fault);
                self.faulty.store(true, Ordering::Release);
            }
            Fault::Round { bytes } => self.driver().lies.round_bytes = bytes,
            Fault::Grown { bytes } => {
                self.driver().lies.grown_bytes = usize::try_from(bytes).unwrap_or(0);
            }
            Fault::Group { bytes } => self.driver().lies.group_bytes = bytes,
            Fault::Busy { pids } => self.driver().lies.busy = pids,
            Fault::FbInfo { index, value } => self.driver().lies.fb_info.push((index, value)),
        }
    }

    /// What a call meets; delays and hangs are over when it returns.
    pub(crate) fn meet(&self, kind: Kind, what: u32) -> Option<Action> {
        if !self.is_faulty() {
            return None;
        }
        let mut faults = lock(&self.faults);
        let at = faults.iter().position(|fault| fault.meets(kind, what))?;
        let fault = faults.get_mut(at)?;
        let action = fault.action;
        if let Some(times) = &mut fault.times {
            *times = times.saturating_sub(1);
            if *times == 0 {
                faults.remove(at);
            }
        }
        match action {
            Action::Delay { ms } => {
                drop(faults);
                std::thread::sleep(Duration::from_millis(ms));
            }
            Action::Hang => {
                let before = self.clears.load(Ordering::Acquire);
                self.hanging.fetch_add(1, Ordering::AcqRel);
                while self.clears.load(Ordering::Acquire) == before {
                    faults = self.cleared.wait(faults).unwrap_or_else(PoisonError::into_inner);
                }
                self.hanging.fetch_sub(1, Ordering::AcqRel);
            }
            Action::Late { .. }
            | Action::Status(_)
            | Action::Errno(_)
            | Action::Lose
            | Action::Swap { .. } => {}
        }
        Some(action)
    }
}
