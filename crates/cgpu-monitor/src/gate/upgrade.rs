//! Has a newer program go on in each running monitor, with nothing lost: [`upgrade`].
//!
//! The new program is opened once: what is checked is what is executed. A monitor stops between two calls and gives a
//! snapshot of what it knows; the new program says whether it can go on with that; then the monitor executes it. Until
//! then the old program goes on if anything fails.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use thiserror::Error;

use super::client::{AskError, ask};
use super::fd_passing::{self, Wait};
use super::launch::MonitorDir;
use super::wire::{Answer, PROGRAM_SENT, Question, Status};
use cgpu_host::child::{Bounds, RunError, Stdout, run};

/// How long a monitor may take to stop, and the new program to begin: calls may have to be finished first.
const TIMEOUT: Duration = Duration::from_secs(15);

/// How long the new program may take to say whether it can go on.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest answer, in bytes.
const MOST_BYTES: usize = 4096;

/// Why a monitor was not updated.
#[derive(Debug, Error)]
pub enum UpgradeError {
    /// The directory of all monitors, or a file in it, can't be read.
    #[error("cannot read {path}: {source}; run this as root")]
    List {
        path: String,
        #[source]
        source: io::Error,
    },
    /// The new program can't be opened.
    #[error("cannot open {path}: {source}; install cgpu-monitor beside cgpu")]
    Program {
        path: String,
        #[source]
        source: io::Error,
    },
    /// The monitor does not answer.
    #[error(transparent)]
    Ask(#[from] AskError),
    /// The monitor's answer is not one of this version's.
    #[error("its monitor gives no answer that this version knows; look into cgpu's log")]
    NoAnswer,
    /// The monitor goes on as it is.
    #[error("{reason}; its monitor goes on as before, and nothing is lost")]
    Refused {
        /// What it said.
        reason: String,
    },
    /// The new program can't go on with this container.
    #[error(
        "the installed monitor can't go on with this container: {reason}; the one of before goes on, and nothing is \
         lost; create the container again to have the new one"
    )]
    Unfit {
        /// What it said.
        reason: String,
    },
    /// The new program has ended, or doesn't answer.
    #[error(
        "the new program doesn't answer: {source}; if the monitor is lost, the container's driver calls fail: create it \
         again"
    )]
    Lost {
        #[source]
        source: io::Error,
    },
}

/// What became of one monitor.
#[derive(Debug)]
pub struct Upgraded {
    pub short_id: String,
    /// The version that served before, and the version that serves now; `None` if the monitor has ended.
    pub versions: Result<Option<(String, String)>, UpgradeError>,
}

/// Has `program` go on in every monitor below `state_dir`, one after the other.
///
/// # Errors
///
/// Where the monitors can't be listed, or the program can't be opened. The error of a single monitor is in its
/// [`Upgraded`].
pub fn upgrade(state_dir: &Path, program: &Path) -> Result<Vec<Upgraded>, UpgradeError> {
    let all = MonitorDir::list(state_dir).map_err(|source| {
        let path = MonitorDir::all(state_dir).display().to_string();
        UpgradeError::List { path, source }
    })?;
    let opened = File::open(program).map_err(|source| {
        let path = program.display().to_string();
        UpgradeError::Program { path, source }
    })?;
    let upgraded = |place: &MonitorDir| Upgraded {
        versions: update(place, &opened),
        short_id: place.short_id(),
    };
    Ok(all.iter().map(upgraded).collect())
}

fn status(place: &MonitorDir) -> Result<Status, UpgradeError> {
    match ask(&place.control(), &Question::Status)? {
        Answer::Status(status) => Ok(*status),
        _ => Err(UpgradeError::NoAnswer),
    }
}

fn update(place: &MonitorDir, program: &File) -> Result<Option<(String, String)>, UpgradeError> {
    let process = place.process().map_err(|source| {
        let path = place.process_file().display().to_string();
        UpgradeError::List { path, source }
    })?;
    if process.is_none() {
        return Ok(None);
    }
    let before = status(place)?;
    hand_over(&place.control(), program)?;
    Ok(Some((before.version, status(place)?.version)))
}

/// Has the program go on in the monitor that listens at `socket`.
fn hand_over(socket: &Path, program: &File) -> Result<(), UpgradeError> {
    let silent = |source| AskError::Silent { socket: socket.display().to_string(), source };
    let stream = begin(socket).map_err(silent)?;
    let (answer, snapshot) = receive(&stream).map_err(silent)?;
    match (answer, snapshot) {
        (Some(Answer::Snapshot), Some(snapshot)) => check(program, snapshot)?,
        (Some(Answer::Refused { reason }), _) => return Err(UpgradeError::Refused { reason }),
        _ => return Err(UpgradeError::NoAnswer),
    }
    let lost = |source| UpgradeError::Lost { source };
    fd_passing::send(&stream, PROGRAM_SENT, Some(program.as_fd()), Wait::Always)
        .map_err(|errno| lost(errno.into()))?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).map_err(lost)?;
    match serde_json::from_str(&line) {
        Ok(Answer::Done) => Ok(()),
        Ok(Answer::Refused { reason }) => Err(UpgradeError::Refused { reason }),
        Ok(_) => Err(UpgradeError::NoAnswer),
        Err(_) => Err(lost(io::ErrorKind::UnexpectedEof.into())),
    }
}

fn begin(socket: &Path) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.write_all((serde_json::to_string(&Question::Update)? + "\n").as_bytes())?;
    Ok(stream)
}

/// The monitor's answer, and the descriptor that comes with it.
fn receive(stream: &UnixStream) -> io::Result<(Option<Answer>, Option<OwnedFd>)> {
    let mut buffer = [0; MOST_BYTES];
    let (length, descriptor) = fd_passing::receive(stream, &mut buffer, Wait::Always)?;
    Ok((serde_json::from_slice(buffer.get(..length).unwrap_or_default()).ok(), descriptor))
}

/// Has the program say whether it can go on with a snapshot.
fn check(program: &File, snapshot: OwnedFd) -> Result<(), UpgradeError> {
    let unfit = |reason: String| UpgradeError::Unfit { reason };
    // The child's own directory of descriptors: the number is the same there, and is closed at its exec.
    let path = format!("/proc/self/fd/{}", program.as_raw_fd());
    let mut command = Command::new(path);
    command.arg("check");
    let bounds = Bounds {
        variables: &[],
        stdin: snapshot.into(),
        stdout: Stdout::To(Stdio::null()),
        limit: CHECK_TIMEOUT,
    };
    let ended = run(command, bounds).map_err(|error| match error {
        RunError::TooSlow { .. } => {
            unfit("it takes too long to read what the monitor knows".to_owned())
        }
        error => unfit(error.to_string()),
    })?;
    let Some(status) = ended.status else {
        return Err(unfit(io::Error::from(Errno::ECHILD).to_string()));
    };
    let said = String::from_utf8_lossy(&ended.stderr);
    let said = said.trim().trim_start_matches("cgpu-monitor: ");
    match status.success() {
        true => Ok(()),
        false if said.is_empty() => Err(unfit(status.to_string())),
        false => Err(unfit(said.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The reason is the end of the program's standard error, or else its status.
    #[test]
    fn unfit_program_gives_its_reason() {
        let check = |program: &str| {
            let snapshot = File::open("/dev/null").unwrap().into();
            check(&File::open(program).unwrap(), snapshot).map_err(|error| error.to_string())
        };
        assert_eq!(check("/bin/true"), Ok(()));
        let unfit = "the installed monitor can't go on with this container: ";
        let silent = check("/bin/false").unwrap_err();
        assert!(
            silent.starts_with(&format!("{unfit}exit status: 1; the one of before")),
            "{silent}"
        );
        // It has no file of this name to print.
        let loud = check("/bin/cat").unwrap_err();
        assert!(loud.contains("check: No such file or directory; the one of before"), "{loud}");
        let missing = check("/dev/null").unwrap_err();
        assert!(missing.contains("Permission denied (os error 13); the one"), "{missing}");
    }
}
