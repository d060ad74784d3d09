//! Puts a new worker in the place of each running worker, with nothing lost: [`upgrade`].

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use thiserror::Error;

use super::client::{AskError, ask};
use super::launch::MonitorDir;
use super::wire::{Answer, Question, Status};

/// How long a new worker may take to answer: the old worker may first finish its calls.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Why a worker was not replaced.
#[derive(Debug, Error)]
pub enum UpgradeError {
    /// The directory of all monitors, or a file in it, can't be read.
    #[error("cannot read {path}: {source}; run this as root")]
    List {
        /// The file or directory.
        path: String,
        /// The error of the file.
        #[source]
        source: io::Error,
    },
    /// The worker does not answer.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The worker's answer is not a status.
    #[error("its worker does not tell its status; look into cgpu's log")]
    NoStatus,
    /// The signal to the keeper fails.
    #[error("its keeper can't be told: {source}; run this as root")]
    Signal {
        /// The error of the system call.
        #[source]
        source: nix::errno::Errno,
    },
    /// No new worker came in time.
    #[error("no new worker has come within {} s; look into cgpu's log", TIMEOUT.as_secs())]
    Late,
    /// A new worker came, but of the program that the container began with: the installed program could not begin.
    #[error(
        "the installed monitor can't go on with this container, and the one of before goes on ({version}), nothing is \
         lost; look into cgpu's log, and create the container again to have the new one"
    )]
    FellBack {
        /// The version that serves.
        version: String,
    },
}

/// What became of one monitor.
#[derive(Debug)]
pub struct Upgraded {
    /// The container's short id.
    pub short_id: String,
    /// The version that served before, and the version that serves now; `None` where the keeper has ended, so that
    /// there is no worker.
    pub versions: Result<Option<(String, String)>, UpgradeError>,
}

/// Replaces the worker of every monitor below `state_dir`, one after the other.
///
/// # Errors
///
/// Where the monitors can't be listed. The error of a single monitor is in its [`Upgraded`].
pub fn upgrade(state_dir: &Path) -> Result<Vec<Upgraded>, UpgradeError> {
    let all = MonitorDir::list(state_dir).map_err(|source| {
        let path = MonitorDir::all(state_dir).display().to_string();
        UpgradeError::List { path, source }
    })?;
    let upgraded = |place: &MonitorDir| Upgraded {
        versions: replace_worker(place),
        short_id: place.short_id(),
    };
    Ok(all.iter().map(upgraded).collect())
}

fn status(place: &MonitorDir) -> Result<Status, UpgradeError> {
    match ask(&place.control(), &Question::Status)? {
        Answer::Status(status) => Ok(*status),
        _ => Err(UpgradeError::NoStatus),
    }
}

fn replace_worker(place: &MonitorDir) -> Result<Option<(String, String)>, UpgradeError> {
    let keeper = place.keeper().map_err(|source| {
        let path = place.keeper_file().display().to_string();
        UpgradeError::List { path, source }
    })?;
    let Some(keeper) = keeper else { return Ok(None) };
    let before = status(place)?;
    kill(Pid::from_raw(keeper.pid), Signal::SIGHUP)
        .map_err(|source| UpgradeError::Signal { source })?;
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        // Between the two workers, nobody may answer.
        if let Ok(after) = status(place)
            && after.worker_pid != before.worker_pid
        {
            return match is_installed(after.worker_pid) {
                true => Ok(Some((before.version, after.version))),
                false => Err(UpgradeError::FellBack { version: after.version }),
            };
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(UpgradeError::Late)
}

/// Whether the worker runs a program that is still at its path. The keeper falls back to its own program, whose file
/// a newer one has replaced: `/proc/PID/exe` then ends in "(deleted)" (proc_pid_exe(5)).
fn is_installed(worker_pid: u32) -> bool {
    let program = std::fs::read_link(format!("/proc/{worker_pid}/exe")).unwrap_or_default();
    !program.to_string_lossy().ends_with(" (deleted)")
}
