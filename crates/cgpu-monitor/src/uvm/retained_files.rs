//! Retains the files of nvidia-uvm that have GPUs, ranges or mapped memory.
//!
//! UVM keeps memory mapped until it is unmapped or the file is closed, whichever process has the file by then: the file
//! may be inherited, sent, or hidden in a socket's queue. Nothing reports that a file is closed, and only an open
//! descriptor distinguishes one file from another. So the monitor retains each file open, as it retains exports: from
//! the file's initialization on, or from the first call that gives it a GPU, a range or a mapping. When no process of
//! the container is found with the file, the monitor unregisters its GPUs, which ends all mappings even if a descriptor
//! is hidden, and releases the file. When the file's creator has exited, its GPUs are unregistered, too. The ledger has
//! what is mapped where; the state has the ranges of each file.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering as AtomicOrdering;
use std::time::{Duration, Instant};

use crate::gate::settings::NodeKind;
use crate::node::Device;
use crate::processes::open_files;
use crate::shared::Monitor;
use crate::state::{MOST_FILES, Occasion};
use crate::uvm::file_creators::is_orphaned;
use crate::uvm::files::{MOST_QUESTIONS, UvmFile, position};
use crate::uvm::queries::unregister_gpu;
use nvrm::number::{NV_ERR_ILLEGAL_ACTION, NV_ERR_INVALID_DEVICE, NV_OK};

/// How often the container's processes are searched for files that aren't where they were last seen.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);

/// After a search, ticks and deaths begin no search for this many times as long as the search took. A call that would
/// be refused waits for that time too, but no longer than [`TIMEOUT`].
const REST: u32 = 4;

/// The longest wait, of a call that would be refused, for the time when a search may begin.
const TIMEOUT: Duration = Duration::from_millis(200);

/// How many searches in a row must not find a file: a process that had the file may have forked, and ended, during one
/// search.
const CHECKS: usize = 2;

/// Retains the file that `device` is, and returns it. The thread and descriptor of `seen` have the file. `None` if too
/// many files or ranges are retained, or the file can't be retained or distinguished from others.
pub(crate) fn keep_uvm_file(
    monitor: &Monitor,
    device: &Device,
    seen: (u32, i32),
) -> Option<Arc<UvmFile>> {
    if monitor.uvm_files.files.lock().len() >= MOST_FILES {
        scan_files(monitor, Occasion::Refusal);
    }
    if let Some(file) = monitor.uvm_files.find(device) {
        return Some(file);
    }
    let copy = device.as_fd().try_clone_to_owned().ok()?;
    let copy = Device::of(&monitor.settings.nodes, copy)?;
    let (known, ranges) = {
        let state = monitor.state();
        (state.ledger.files(), state.ranges.of_files())
    };
    let mut files = monitor.uvm_files.files.lock();
    let at = match position(&files, device)? {
        Ok(at) => return files.get(at).cloned(),
        Err(_) if files.len() >= MOST_FILES => return None,
        Err(at) => at,
    };
    if (files.len() + 1) * ranges > MOST_QUESTIONS {
        return None;
    }
    let is_free =
        |number: &u32| !known.contains(number) && files.iter().all(|file| file.number != *number);
    let number = std::iter::repeat_with(|| monitor.counters.next_file()).find(is_free)?;
    let file = Arc::new(UvmFile::new(number, copy, seen));
    files.insert(at, Arc::clone(&file));
    Some(file)
}

/// Whether the files may have one more range.
pub(crate) fn has_capacity_for_range(monitor: &Monitor) -> bool {
    let files = monitor.uvm_files.files.lock().len();
    files * (monitor.state().ranges.of_files() + 1) <= MOST_QUESTIONS
}

/// Retains a file from before an update.
pub(crate) fn resume_file(monitor: &Monitor, number: u32, file: OwnedFd) {
    let Some(device) = Device::of(&monitor.settings.nodes, file) else { return };
    let mut files = monitor.uvm_files.files.lock();
    if let Some(Err(at)) = position(&files, &device) {
        files.insert(at, Arc::new(UvmFile::new(number, device, (0, 0))));
    }
}

/// Ends the mappings of files that no process of the container has open any more, and lets these files go.
pub(crate) fn scan_files(monitor: &Monitor, occasion: Occasion) {
    let files = monitor.uvm_files.all();
    if files.is_empty() {
        return;
    }
    // One thread searches at a time. A call that would be refused waits for the search that goes on.
    let times = match occasion {
        Occasion::Refusal => Some(monitor.uvm_files.scan_times.lock()),
        Occasion::Tick | Occasion::Death => monitor.uvm_files.scan_times.try_lock(),
    };
    let Some(mut times) = times else { return };
    times.died |= occasion == Occasion::Death;
    let due = match occasion {
        Occasion::Refusal => None,
        Occasion::Tick | Occasion::Death if times.died => times.soonest,
        Occasion::Tick | Occasion::Death => times.next,
    };
    if due.is_some_and(|due| Instant::now() < due) {
        return;
    }
    times.died = false;
    let mut missed: Vec<_> = files.into_iter().filter(|file| needs_search(file)).collect();
    if !missed.is_empty() {
        let wait = times.soonest.map(|at| at.saturating_duration_since(Instant::now()));
        std::thread::sleep(wait.unwrap_or_default().min(TIMEOUT));
    }
    let begun = Instant::now();
    for _ in 0..CHECKS {
        if missed.is_empty() {
            break;
        }
        let Some(open) = open_files(monitor, NodeKind::Uvm) else {
            missed.clear();
            break;
        };
        missed.retain(|file| {
            let found = open.iter().find(|place| file.is_at(**place) != Some(false));
            if let Some(found) = found {
                *file.seen.lock() = *found;
            }
            found.is_none()
        });
    }
    let (now, rest) = (Instant::now(), begun.elapsed() * REST);
    (times.soonest, times.next) = (Some(now + rest), Some(now + SCAN_INTERVAL.max(rest)));
    // The lock is held until the files are ended: another call may be about to be refused for what they keep.
    end_files(monitor, &missed);
    drop(times);
}

/// Whether processes have to be searched for the file: it isn't known to be where it was last seen.
fn needs_search(file: &UvmFile) -> bool {
    let seen = *file.seen.lock();
    file.is_at(seen) != Some(true)
}

fn forget_file(monitor: &Monitor, file: &UvmFile) {
    file.let_go.store(true, AtomicOrdering::Relaxed);
    monitor.uvm_files.files.lock().retain(|retained| retained.number != file.number);
}

/// Has UVM end all mappings of a file, whichever process has it open, and forgets the file. `None` if a call that holds
/// the RM lock hangs.
fn end_file(monitor: &Monitor, file: &UvmFile) -> Option<()> {
    let _rm_lock = monitor.rm_lock.enter_for_monitor()?;
    if file.is_let_go() {
        return Some(());
    }
    let ended = unregister_gpus(monitor, &file.device);
    if !ended {
        if monitor.log.limit.take_line() {
            tracing::warn!("a file of nvidia-uvm can't be ended: its memory stays charged");
        }
        return Some(());
    }
    monitor.state().close_file(file.number);
    forget_file(monitor, file);
    Some(())
}

/// Unregisters each GPU of a file, registered or not. `false` where a GPU may still be registered.
pub(crate) fn unregister_gpus(monitor: &Monitor, device: &Device) -> bool {
    // A file maps nothing on a GPU that isn't registered, and nothing at all where the file isn't initialized.
    let is_ended =
        |status| matches!(status, Some(NV_OK | NV_ERR_INVALID_DEVICE | NV_ERR_ILLEGAL_ACTION));
    // Each GPU is unregistered, even where another one can't be.
    monitor
        .uuids
        .iter()
        .filter(|uuid| !is_ended(unregister_gpu(&monitor.release, device, uuid)))
        .count()
        == 0
}

/// Ends the files whose creator has exited, whichever process has them open.
///
/// A process that has such a file could still bring managed memory to a GPU, and has no other use for the file: it is
/// bound to its creator's address space. Files for several processes are bound to none, and keep none alive.
pub(crate) fn end_orphaned_files(monitor: &Monitor) {
    for file in monitor.uvm_files.all() {
        let is_bound = monitor.state().creators.is_bound(file.number);
        if is_bound && is_orphaned(monitor, &file) {
            // The file stays orphaned, so it gets no GPU any more.
            file.deny_gpus();
            let _ = end_file(monitor, &file);
        }
    }
}

/// Ends these files, one after another, until a call that holds the RM lock hangs.
pub(crate) fn end_files(monitor: &Monitor, files: &[Arc<UvmFile>]) {
    let _ = files.iter().try_for_each(|file| end_file(monitor, file));
}
