//! Writes the container's status to its file ([`status_file`]), for commands that ask for the status of all containers.
//!
//! The monitor's first thread writes it: the audit's thread may hang in the driver.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::gate::launch::MonitorDir;
use crate::gate::status_file;
use crate::gate::wire::Status;
use crate::monitor::calls::{CallService, Parts};
use crate::monitor::daemon::status::status;
use crate::monitor::lock::Lock;
use crate::process::ProcessId;

/// The shortest time between two writes after changes.
const INTERVAL: Duration = Duration::from_millis(250);

/// Writes the status file.
#[derive(Debug)]
pub(crate) struct StatusWriter {
    parts: Arc<Parts>,
    calls: Arc<CallService>,
    path: PathBuf,
    last: Lock<Last>,
}

/// The last write.
#[derive(Debug, Default)]
struct Last {
    bytes: Vec<u8>,
    at: Option<Instant>,
    /// Whether the log was told that the file can't be written.
    has_failed: bool,
}

impl StatusWriter {
    pub(crate) fn new(parts: Arc<Parts>, calls: Arc<CallService>) -> Self {
        let path = MonitorDir::at(&parts.state.settings.place).status();
        StatusWriter { parts, calls, path, last: Lock::default() }
    }

    /// The container's status as it is now.
    pub(crate) fn status(&self) -> Status {
        if !self.calls.has_threads() {
            // No thread follows the shares before the first call.
            self.parts.slices.read_shares();
        }
        status(&self.parts)
    }

    /// In how long the file is to be written; `None` if nothing has changed.
    pub(crate) fn due_in(&self) -> Option<Duration> {
        let is_changed = self.parts.state.has_status_change();
        is_changed.then(|| {
            let since = self.last.lock().at.map(|at| at.elapsed());
            since.map_or(Duration::ZERO, |since| INTERVAL.saturating_sub(since))
        })
    }

    /// Writes the file if it is time.
    pub(crate) fn write_if_due(&self) {
        if self.due_in().is_some_and(|left| left.is_zero()) {
            self.write_now();
        }
    }

    /// Writes the file if the status has changed.
    pub(crate) fn write_now(&self) {
        let mut last = self.last.lock();
        self.parts.state.take_status_change();
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
