//! The container's [`Status`], from the monitor's state, and in its file ([`status_file`]), for commands that ask for
//! the status of all containers. The monitor's first thread writes the file: the audit thread may hang in the driver.

use std::cmp::Reverse;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::calls::CallService;
use crate::compute::read_shares;
use crate::gate::launch::MonitorDir;
use crate::gate::status_file;
use crate::gate::wire::{GpuStatus, MOST_PROCESSES_REPORTED, ProcessStatus, Status};
use crate::shared::Monitor;
use crate::sync::Lock;
use cgpu_core::ledger::{Ledger, Process};
use cgpu_host::process::ProcessId;

/// The shortest time between two writes after changes.
const INTERVAL: Duration = Duration::from_millis(250);

pub(crate) fn status(monitor: &Monitor) -> Status {
    let state = monitor.state();
    let gpus = monitor.settings.gpus.iter().enumerate().map(|(gpu, settings)| {
        let usage = state.ledger.usage(gpu);
        GpuStatus {
            index: settings.index,
            uuid: settings.uuid.clone(),
            limit_bytes: usage.map_or(0, |usage| usage.limit_bytes),
            used_bytes: usage.map_or(0, |usage| usage.used_bytes),
            round: monitor.shares.round(gpu),
            share_refused: monitor.shares.failure(gpu),
        }
    });
    let gpus = gpus.collect();
    let mut processes = processes(&state.ledger);
    drop(state);
    let process_count = processes.len();
    processes.truncate(MOST_PROCESSES_REPORTED);
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        gpus,
        calls: monitor.counters.calls(),
        durations: monitor.counters.durations(),
        updates: monitor.updates,
        processes,
        process_count,
        end: Some(monitor.end()),
    }
}

/// The processes that hold a client, those with most memory first.
fn processes(ledger: &Ledger) -> Vec<ProcessStatus> {
    let status = |(process, used_bytes): (Process, _)| {
        let pid = process.pid().cast_signed();
        ProcessStatus { pid, used_bytes }
    };
    let mut processes: Vec<ProcessStatus> =
        ledger.used_by_process().into_iter().map(status).collect();
    // The sort is stable: of processes with as much memory, the earlier one stays first.
    processes.sort_by_key(|process| Reverse(process.used_bytes.iter().sum::<u64>()));
    processes
}

#[derive(Debug)]
pub(crate) struct StatusWriter {
    monitor: Arc<Monitor>,
    calls: Arc<CallService>,
    path: PathBuf,
    last: Lock<Last>,
}

#[derive(Debug, Default)]
struct Last {
    bytes: Vec<u8>,
    at: Option<Instant>,
    /// Whether it was logged that the file can't be written.
    has_failed: bool,
}

impl StatusWriter {
    pub(crate) fn new(monitor: Arc<Monitor>, calls: Arc<CallService>) -> Self {
        let path = MonitorDir::at(&monitor.settings.place).status();
        StatusWriter { monitor, calls, path, last: Lock::default() }
    }

    pub(crate) fn status(&self) -> Status {
        if !self.calls.has_threads() {
            // No thread follows the shares before the first call.
            read_shares(&self.monitor);
        }
        status(&self.monitor)
    }

    /// In how long the file is to be written; `None` if nothing has changed.
    pub(crate) fn due_in(&self) -> Option<Duration> {
        let is_changed = self.monitor.has_status_change();
        is_changed.then(|| {
            let since = self.last.lock().at.map(|at| at.elapsed());
            since.map_or(Duration::ZERO, |since| INTERVAL.saturating_sub(since))
        })
    }

    pub(crate) fn write_if_due(&self) {
        if self.due_in().is_some_and(|left| left.is_zero()) {
            self.write_now();
        }
    }

    /// Writes the file if the status has changed.
    pub(crate) fn write_now(&self) {
        let mut last = self.last.lock();
        self.monitor.take_status_change();
        last.at = Some(Instant::now());
        let status = self.status();
        let Some(bytes) = ProcessId::own().and_then(|own| status_file::encode(own, &status).ok())
        else {
            return;
        };
        if bytes == last.bytes {
            return;
        }
        match status_file::replace(&self.path, &bytes) {
            Ok(()) => last.bytes = bytes,
            // The directory of a container that has exited is removed.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                if !std::mem::replace(&mut last.has_failed, true) {
                    tracing::warn!(%error, path = %self.path.display(), "the status file can't be written; commands ask the monitor instead");
                }
            }
        }
    }
}
