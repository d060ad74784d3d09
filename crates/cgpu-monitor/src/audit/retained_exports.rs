//! Retains the files that memory was exported to, and has the driver free that memory.
//!
//! The driver retains exported memory while the file is open, wherever its descriptor went, and nothing reports when
//! the last descriptor is closed. So the monitor keeps the file open, too, and can determine at an import which memory
//! the file has. If no object names the memory any more, and no process of the container is found with the file, the
//! monitor clears the file: the driver frees the memory, even if a descriptor of the file is hidden. The monitor also
//! clears all files when the container has ended. Memory is put into a file and taken out of it under the [RM
//! lock](crate::state::RmLock).

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::caller::has_file;
use crate::driver::{Exported, free_pins, own_client};
use crate::gate::settings::NodeKind;
use crate::node::{Device, Failure};
use crate::processes::open_files;
use crate::shared::Monitor;
use crate::state::{ContainerState, UnderRmLock};
use cgpu_core::ledger::{Entry, Hold};
use nvrm::export;
use nvrm::number::{NV_ERR_INVALID_PARAMETER, NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD};

/// How often the container's processes are searched for the retained files.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);

/// How many searches in a row must not find a file before it is cleared: a descriptor may be in transit from one
/// process to another.
const MISSES: u32 = 3;

/// How often the processes are searched for a call that would be refused otherwise.
const REFUSAL_SCAN: Duration = Duration::from_millis(300);

/// Retains a file from before an update.
pub(crate) fn resume_export(monitor: &Monitor, number: u64, file: OwnedFd) {
    if let Some(file) = Device::of(&monitor.settings.nodes, file) {
        monitor.exports.keep(number, Arc::new(file));
    }
}

/// Releases the holds of the places of a file for which `is_cleared` is true: nothing is in these places any more.
pub(crate) fn forget_places(monitor: &Monitor, file: u64, is_cleared: impl Fn(u32) -> bool) {
    let mut state = monitor.state();
    let places: Vec<u32> = state.ledger.exported(file).filter(|at| is_cleared(*at)).collect();
    for index in places {
        state.enter(Entry::Release { hold: Hold::Export { file, index } });
    }
}

/// Forgets a file in which nothing is any more.
pub(crate) fn forget_export(monitor: &Monitor, number: u64) {
    monitor.exports.files.lock().remove(&number);
    forget_places(monitor, number, |_| true);
}

/// Has the driver free the memory in the places of a file for which `is_wanted` is true, whichever processes have the
/// file open. `false` if the driver did not: the memory stays charged.
pub(crate) fn clear_export(
    monitor: &Monitor,
    exported: &Exported,
    is_wanted: impl Fn(u32) -> bool,
) -> bool {
    let places: Vec<u32> = {
        let state = monitor.state();
        state.ledger.exported(exported.number).filter(|at| is_wanted(*at)).collect()
    };
    if places.is_empty() {
        return true;
    }
    let Some(own) = own_client(monitor) else { return false };
    let rm = own.rm();
    for (first, count) in export::clearings(&places) {
        let mut params = export::clear(exported.file.descriptor(), first, count);
        let command = NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD;
        match rm.control(own.client, own.client, command, &mut params) {
            // The driver answers so if nothing was ever exported to the file.
            Ok(()) | Err(Failure::Status(NV_ERR_INVALID_PARAMETER)) => {}
            Err(error) => {
                if monitor.log.limit.take_line() {
                    tracing::warn!(?error, "an export can't be taken back: it stays charged");
                }
                return false;
            }
        }
    }
    forget_places(monitor, exported.number, |place| places.contains(&place));
    true
}

/// Clears all files: the container has ended.
pub(crate) fn clear_exports(monitor: &Monitor) {
    let files: Vec<(u64, Arc<Device>)> = {
        let files = monitor.exports.files.lock();
        files.iter().map(|(number, export)| (*number, Arc::clone(&export.file))).collect()
    };
    // The files are cleared even if a call hangs while it holds the RM lock: no process waits for that call any more.
    let _rm_lock = monitor.rm_lock.enter_for_monitor();
    for (number, file) in files {
        if clear_export(monitor, &Exported { number, file }, |_| true) {
            forget_export(monitor, number);
        }
    }
}

/// Frees exported memory that no object names and whose file no process has, if a search is due.
pub(crate) fn scan_exports(monitor: &Monitor) {
    find_exports(monitor, SCAN_INTERVAL);
}

/// Scans sooner, for a call that would be refused. Waits while another scan may let a file be cleared.
pub(crate) fn scan_exports_for_refusal(monitor: &Monitor) {
    for _ in 0..=MISSES {
        if !find_exports(monitor, REFUSAL_SCAN) {
            return;
        }
        std::thread::sleep(REFUSAL_SCAN);
    }
}

/// Searches the container's processes for files that are empty or have unnamed memory, at most once each `pause`.
/// Clears files that were missed [`MISSES`] times. `true` if another search may let a file be cleared.
fn find_exports(monitor: &Monitor, pause: Duration) -> bool {
    let unnamed: Vec<(u64, Arc<Device>)> = {
        let state = monitor.state();
        let files = monitor.exports.files.lock();
        let files = files.iter().filter(|(number, _)| is_unnamed(&state, **number));
        files.map(|(number, export)| (*number, Arc::clone(&export.file))).collect()
    };
    if unnamed.is_empty() {
        return false;
    }
    {
        let mut scanned = monitor.exports.scanned.lock();
        if scanned.is_some_and(|scanned| scanned.elapsed() < pause) {
            return true;
        }
        *scanned = Some(Instant::now());
    }
    let Some(open) = open_files(monitor, NodeKind::Control) else { return false };
    let mut missed = false;
    for (number, file) in unnamed {
        let found = open.iter().any(|place| has_file(*place, &file) != Some(false));
        let mut files = monitor.exports.files.lock();
        let Some(export) = files.get_mut(&number) else { continue };
        export.misses = if found { 0 } else { export.misses + 1 };
        if export.misses < MISSES {
            missed |= !found;
            continue;
        }
        drop(files);
        let Some(rm_lock) = monitor.rm_lock.enter_for_monitor() else { break };
        clear_unnamed(monitor, &rm_lock, &Exported { number, file });
    }
    missed
}

/// Clears the places of a file whose memory no object names, and forgets the file if it is empty then.
fn clear_unnamed(monitor: &Monitor, rm_lock: &UnderRmLock<'_>, exported: &Exported) {
    let number = exported.number;
    let unnamed: Vec<u32> = {
        let state = monitor.state();
        unnamed(&state, number).collect()
    };
    let done = clear_export(monitor, exported, |place| unnamed.contains(&place));
    let state = monitor.state();
    let is_empty = state.ledger.exported(number).next().is_none();
    drop(state);
    if done && is_empty {
        forget_export(monitor, number);
    }
    free_pins(monitor, rm_lock);
}

/// The places of a file whose memory no object names any more.
fn unnamed(state: &ContainerState, file: u64) -> impl Iterator<Item = u32> {
    let is_last = move |index: &u32| state.ledger.is_unnamed(Hold::Export { file, index: *index });
    state.ledger.exported(file).filter(is_last)
}

/// Whether a file is empty, or has memory that no object names any more.
fn is_unnamed(state: &ContainerState, file: u64) -> bool {
    state.ledger.exported(file).next().is_none() || unnamed(state, file).next().is_some()
}
