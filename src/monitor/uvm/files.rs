//! Files of UVM's that are kept: told apart, found and counted. Why they are kept, and how long, says
//! [`sweep`](crate::monitor::uvm::kept_files).

use std::cmp::Ordering;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering as AtomicOrdering};
use std::time::Instant;

use crate::monitor::caller::target::{compare_files, has_file};
use crate::monitor::lock::Lock;
use crate::monitor::node::device::Device;

/// How many ranges of files times files there may be: for each range that is mapped, all other
/// files are asked whether it's theirs.
pub(crate) const MOST_QUESTIONS: usize = 1 << 19;

/// The files.
#[derive(Debug, Default)]
pub(crate) struct UvmFiles {
    /// In the kernel's order of files.
    pub(crate) files: Lock<Vec<Arc<UvmFile>>>,
    pub(crate) looks: Lock<Looks>,
}

/// When files are looked for.
#[derive(Debug, Default)]
pub(crate) struct Looks {
    /// Not sooner, whatever happens.
    pub(crate) soonest: Option<Instant>,
    /// At a tick.
    pub(crate) next: Option<Instant>,
    /// Whether a process died since.
    pub(crate) died: bool,
}

/// A file of UVM's that is kept.
#[derive(Debug)]
pub(crate) struct UvmFile {
    pub(crate) number: u32,
    pub(crate) device: Device,
    /// Who was last seen to have it: process and descriptor.
    pub(crate) seen: Lock<(u32, i32)>,
    /// It was let go: who finds it has to have it kept again.
    pub(crate) let_go: AtomicBool,
    /// It had managed memory past the monitor, or its maker is over, and gets no GPU.
    condemned: AtomicBool,
    /// And has none any more.
    ended: AtomicBool,
}

impl UvmFile {
    pub(crate) fn new(number: u32, device: Device, seen: (u32, i32)) -> Self {
        let [let_go, condemned, ended] = [false; 3].map(AtomicBool::new);
        UvmFile { number, device, seen: Lock::new(seen), let_go, condemned, ended }
    }

    /// Its GPUs are unregistered for good.
    pub(crate) fn set_ended(&self) {
        self.ended.store(true, AtomicOrdering::Relaxed);
    }

    pub(crate) fn is_ended(&self) -> bool {
        self.ended.load(AtomicOrdering::Relaxed)
    }

    pub(crate) fn condemn(&self) {
        self.condemned.store(true, AtomicOrdering::Relaxed);
    }

    pub(crate) fn is_condemned(&self) -> bool {
        self.condemned.load(AtomicOrdering::Relaxed)
    }

    pub(crate) fn is_let_go(&self) -> bool {
        self.let_go.load(AtomicOrdering::Relaxed)
    }

    /// Whether a process has it by that descriptor; `None` where that can't be told.
    pub(crate) fn is_at(&self, place: (u32, i32)) -> Option<bool> {
        has_file(place, &self.device)
    }
}

impl UvmFiles {
    /// The file that `device` is, where it is kept.
    pub(crate) fn find(&self, device: &Device) -> Option<Arc<UvmFile>> {
        let files = self.files.lock();
        let at = place(&files, device)?.ok()?;
        files.get(at).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<UvmFile>> {
        self.files.lock().clone()
    }
}

/// Where among the files it is, or would be; `None` where that can't be told.
pub(crate) fn place(files: &[Arc<UvmFile>], device: &Device) -> Option<Result<usize, usize>> {
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
