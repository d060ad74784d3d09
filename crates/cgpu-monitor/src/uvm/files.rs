//! The retained files of nvidia-uvm: how they are distinguished and found. [`crate::uvm::retained_files`] says why they
//! are retained, and how long.

use std::cmp::Ordering;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering as AtomicOrdering};
use std::time::Instant;

use crate::caller::{compare_files, has_file};
use crate::node::Device;
use crate::sync::Lock;

/// The most files times ranges of files: for each range that is mapped, all other files are asked whether it is
/// theirs.
pub(crate) const MOST_QUESTIONS: usize = 1 << 19;

/// The retained files, and when the container's processes are searched for them.
#[derive(Debug, Default)]
pub(crate) struct UvmFiles {
    /// In the kernel's order of files.
    pub(crate) files: Lock<Vec<Arc<UvmFile>>>,
    pub(crate) scan_times: Lock<ScanTimes>,
    /// Held by the call that is next to initialize a file, until the state has that initialization.
    pub(crate) init_turn: Lock<()>,
    /// Whether the state may have an initialization that is in progress.
    pub(crate) may_be_in_progress: AtomicBool,
}

/// When the container's processes are searched for files.
#[derive(Debug, Default)]
pub(crate) struct ScanTimes {
    /// No search for a tick or a death begins before this time. A search for a call that would be refused waits for it
    /// too, but not long.
    pub(crate) soonest: Option<Instant>,
    /// When a tick may search next.
    pub(crate) next: Option<Instant>,
    /// Whether a process has died since the last search.
    pub(crate) died: bool,
}

/// A retained file of nvidia-uvm.
#[derive(Debug)]
pub(crate) struct UvmFile {
    pub(crate) number: u32,
    pub(crate) device: Device,
    /// The thread and descriptor that were last seen to have the file.
    pub(crate) seen: Lock<(u32, i32)>,
    /// Whether the file was released: a call that still has this value must have the file retained again.
    pub(crate) let_go: AtomicBool,
    /// Whether the file gets no GPU any more: it had managed memory bypassing the gate, or its creator has exited.
    denied_gpus: AtomicBool,
    /// Whether the file's GPUs are unregistered for good.
    ended: AtomicBool,
}

impl UvmFile {
    pub(crate) fn new(number: u32, device: Device, seen: (u32, i32)) -> Self {
        let [let_go, denied_gpus, ended] = [false; 3].map(AtomicBool::new);
        UvmFile { number, device, seen: Lock::new(seen), let_go, denied_gpus, ended }
    }

    /// Notes that the file's GPUs are unregistered for good.
    pub(crate) fn set_ended(&self) {
        self.ended.store(true, AtomicOrdering::Relaxed);
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(AtomicOrdering::Relaxed)
    }

    pub(crate) fn deny_gpus(&self) {
        self.denied_gpus.store(true, AtomicOrdering::Relaxed);
    }

    pub(crate) fn is_denied_gpus(&self) -> bool {
        self.denied_gpus.load(AtomicOrdering::Relaxed)
    }

    pub(crate) fn is_let_go(&self) -> bool {
        self.let_go.load(AtomicOrdering::Relaxed)
    }

    /// Whether the thread and descriptor of `place` name the file; `None` if that can't be determined.
    pub(crate) fn is_at(&self, place: (u32, i32)) -> Option<bool> {
        has_file(place, &self.device)
    }
}

impl UvmFiles {
    /// No files. `is_in_progress`: whether the state has an initialization that is in progress.
    pub(crate) fn new(is_in_progress: bool) -> Self {
        UvmFiles { may_be_in_progress: AtomicBool::new(is_in_progress), ..UvmFiles::default() }
    }

    /// The retained file that `device` is; `None` if it isn't retained, or that can't be determined.
    pub(crate) fn find(&self, device: &Device) -> Option<Arc<UvmFile>> {
        let files = self.files.lock();
        let at = position(&files, device)?.ok()?;
        files.get(at).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<UvmFile>> {
        self.files.lock().clone()
    }
}

/// The index at which `device` is among `files` (`Ok`), or would be inserted (`Err`). `None` if that can't be
/// determined.
pub(crate) fn position(files: &[Arc<UvmFile>], device: &Device) -> Option<Result<usize, usize>> {
    let own = std::process::id();
    let mut known = true;
    let found = files.binary_search_by(|file| {
        let order = compare_files((own, file.device.descriptor()), (own, device.descriptor()));
        order.unwrap_or_else(|_| {
            known = false;
            Ordering::Equal
        })
    });
    known.then_some(found)
}
