//! A running dockerd: the configuration that it has applied, and its reload while containers run.
//!
//! Owns dockerd's socket, its signal and the order of the steps. The file's contents are
//! [`super::daemon_json`]'s.
//!
//! A reload changes only what the file names. dockerd 20.10 (`daemon/reload.go`) retains its
//! default runtime if the file names none, and dereferences nil if that runtime was removed
//! from the list. So it first reads a file that names everything, then the file gets its final
//! text. A signal is no answer: dockerd reports the reload as an event, and
//! only then the file is changed again.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::Pid;
use serde_json::Value;
use thiserror::Error;

use super::daemon_json::{self, RunningConfig};
use crate::engines::config_file::{self, ReadError};
use crate::engines::config_text::EditError;
use crate::engines::file_change::{self, Backup, Change, WriteError};
use crate::engines::service::{self, Init, RestartError, RuntimeChange};

/// dockerd's default socket.
const SOCKET: &str = "/var/run/docker.sock";

/// dockerd's default file of its process id.
const PID_FILE: &str = "/var/run/docker.pid";

const TIMEOUT: Duration = Duration::from_secs(10);

const ANSWER_BYTES_MAX: u64 = 4 << 20;

/// Why dockerd hasn't applied its file.
#[derive(Debug, Error)]
pub enum DockerdError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("{} {source}", path.display())]
    Edit {
        path: PathBuf,
        #[source]
        source: EditError,
    },
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("docker doesn't answer at {}: {source}; where it runs, restart it", socket.display())]
    NoAnswer {
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("docker's answer at {} isn't understood: {answer}; restart docker", socket.display())]
    UnexpectedAnswer { socket: PathBuf, answer: String },
    #[error(transparent)]
    Restart(#[from] RestartError),
    #[error(
        "no dockerd has the process id in {PID_FILE}, and no systemd runs here; restart docker"
    )]
    NoProcess,
    #[error("dockerd (process {pid}) can't be signalled to reload: {source}; run this as root")]
    Signal {
        pid: i32,
        #[source]
        source: nix::Error,
    },
    #[error(
        "docker reported no reload of {} within {} s, and {state}; see what docker's log says of it",
        path.display(),
        TIMEOUT.as_secs()
    )]
    NotTaken {
        path: PathBuf,
        /// What became of the file.
        state: &'static str,
    },
    /// It has reloaded, and has another configuration.
    #[error("docker has reloaded and doesn't use {}; does it read another file?", path.display())]
    OtherFile { path: PathBuf },
}

impl DockerdError {
    /// Whether no process listens on the socket.
    fn is_not_listening(&self) -> bool {
        use io::ErrorKind::{ConnectionRefused, NotFound};
        matches!(self, DockerdError::NoAnswer { source, .. }
            if [ConnectionRefused, NotFound].contains(&source.kind()))
    }
}

#[derive(Debug)]
pub enum Outcome {
    Applied,
    /// No process listens; the file is written.
    NotRunning(DockerdError),
}

/// Makes `change` of dockerd's file at `file` and reloads dockerd; containers run on.
/// Without a change dockerd reloads the file as it is.
///
/// # Errors
///
/// If the file can't be written, or dockerd doesn't reload it. A file that would have removed a
/// runtime from dockerd is then restored.
pub fn apply(file: &Path, change: Option<&Change>) -> Result<Outcome, DockerdError> {
    let edit_error = |source| DockerdError::Edit { path: file.to_owned(), source };
    let before = config_file::read(file, file)?;
    let text = before.as_ref().map(|before| before.text.clone());
    let after = change.map_or(text.clone(), |change| change.after.clone());
    let after = after.unwrap_or_default();
    let hosts = daemon_json::hosts(text.as_deref().unwrap_or_default()).map_err(edit_error)?;
    let dockerd = Dockerd { socket: socket(&hosts) };
    let running = match dockerd.running_config() {
        Ok(running) => running,
        // A dockerd that doesn't run reads the file when it starts.
        Err(error) if error.is_not_listening() => {
            change.map(file_change::write).transpose()?;
            return Ok(Outcome::NotRunning(error));
        }
        Err(error) => return Err(error),
    };
    if daemon_json::lacks_runtime(&after, &running).map_err(edit_error)? {
        change.map(file_change::write).transpose()?;
        return Ok(Outcome::Applied);
    }
    match daemon_json::reload_text(&after, &running).map_err(edit_error)? {
        None => {
            change.map(file_change::write).transpose()?;
            dockerd.reload(file, "it is written")?;
        }
        Some(reload_text) => {
            let step = |before, after| Change {
                path: file.to_owned(),
                at: file.to_owned(),
                before,
                after,
                backup: Backup::Keep,
            };
            config_file::check(file, file, before.as_ref())?;
            file_change::write(&step(before, Some(reload_text)))?;
            let reloaded = dockerd.reload(file, "it is as it was");
            let now = config_file::read(file, file)?;
            // The text for the reload is temporary: the former text is restored first, so
            // that the change is made as planned.
            file_change::write(&step(now, text))?;
            reloaded?;
            change.map(file_change::write).transpose()?;
        }
    }
    match daemon_json::is_applied(&after, &dockerd.running_config()?).map_err(edit_error)? {
        true => Ok(Outcome::Applied),
        false => Err(DockerdError::OtherFile { path: file.to_owned() }),
    }
}

/// What applies a change to docker, and what that does to containers: the rest of a sentence.
pub(in crate::engines) fn next_step(done: RuntimeChange, init: Init) -> String {
    match (done, init) {
        (RuntimeChange::Added, Init::Systemd) => {
            "`systemctl reload docker`, so that docker reads it; containers run on".to_owned()
        }
        (RuntimeChange::Added, Init::Other) => {
            "`kill -HUP $(cat /var/run/docker.pid)`, so that docker reads it; containers run on"
                .to_owned()
        }
        // dockerd 20.10 panics at a reload if its default runtime was removed from the file, and
        // retains the runtimes if the file has no list of them.
        (RuntimeChange::Removed, init) => {
            let command = match init {
                Init::Systemd => "`systemctl restart docker`",
                Init::Other => "stop dockerd and start it as you started it",
            };
            format!(
                "{command}, so that docker forgets it; a reload may crash docker, and containers \
                 stop with it unless live-restore is on. `cgpu setup docker --remove --restart` \
                 has docker forget it while containers run on"
            )
        }
    }
}

/// The socket of the dockerd whose file names `hosts`.
fn socket(hosts: &[String]) -> PathBuf {
    let environment = std::env::var("DOCKER_HOST").ok();
    let mut hosts = hosts.iter().chain(&environment);
    let socket = hosts.find_map(|host| host.strip_prefix("unix://"));
    socket.unwrap_or(SOCKET).into()
}

struct Dockerd {
    socket: PathBuf,
}

impl Dockerd {
    fn running_config(&self) -> Result<RunningConfig, DockerdError> {
        let mut answer = self.ask("/info")?;
        let mut body = String::new();
        answer.read_to_string(&mut body).map_err(|source| self.no_answer(source))?;
        let info: Value =
            serde_json::from_str(&body).map_err(|why| self.unexpected(&why.to_string()))?;
        let default = info["DefaultRuntime"].as_str();
        let runtimes = info["Runtimes"].as_object();
        let (Some(default), Some(runtimes)) = (default, runtimes) else {
            return Err(self.unexpected("it has no DefaultRuntime or no Runtimes"));
        };
        Ok(RunningConfig {
            default: default.to_owned(),
            runtimes: runtimes.keys().cloned().collect(),
        })
    }

    /// Reloads it, and waits until it reports that.
    fn reload(&self, file: &Path, state: &'static str) -> Result<(), DockerdError> {
        let not_taken = || DockerdError::NotTaken { path: file.to_owned(), state };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // Events since now: those before dockerd registers this listener count too.
        let filters = "%7B%22type%22%3A%5B%22daemon%22%5D%2C%22event%22%3A%5B%22reload%22%5D%7D";
        let events =
            format!("/events?since={}.{:09}&filters={filters}", now.as_secs(), now.subsec_nanos());
        let mut events = self.ask(&events)?;
        self.signal()?;
        let mut event = String::new();
        match events.read_line(&mut event) {
            Ok(length) if length > 0 => Ok(()),
            _ => Err(not_taken()),
        }
    }

    /// The signal that `systemctl reload docker` sends too.
    fn signal(&self) -> Result<(), DockerdError> {
        let listener = self.connect().ok().and_then(|stream| {
            getsockopt(&stream, PeerCredentials).ok().map(|credentials| credentials.pid())
        });
        let Some(pid) = listener.filter(|pid| is_dockerd(*pid)) else {
            // systemd has dockerd's socket, or a file names the process.
            if Init::here() == Init::Systemd {
                return Ok(service::systemctl("reload", "docker")?);
            }
            let pid = fs::read_to_string(PID_FILE).ok().and_then(|pid| pid.trim().parse().ok());
            return hang_up(pid.filter(|pid| is_dockerd(*pid)).ok_or(DockerdError::NoProcess)?);
        };
        hang_up(pid)
    }

    fn connect(&self) -> Result<UnixStream, DockerdError> {
        UnixStream::connect(&self.socket).map_err(|source| self.no_answer(source))
    }

    /// The body of the answer to a GET. In version 1.0 of HTTP that is all up to the end.
    fn ask(&self, path: &str) -> Result<impl BufRead + use<>, DockerdError> {
        let fail = |source| self.no_answer(source);
        let mut stream = self.connect()?;
        write!(stream, "GET {path} HTTP/1.0\r\n\r\n").map_err(fail)?;
        let until = Instant::now() + TIMEOUT;
        let mut answer = BufReader::new(DeadlineReader { stream, until }.take(ANSWER_BYTES_MAX));
        let mut status = String::new();
        answer.read_line(&mut status).map_err(fail)?;
        if status.split_whitespace().nth(1) != Some("200") {
            return Err(self.unexpected(status.trim()));
        }
        let mut header = String::new();
        while header != "\r\n" {
            header.clear();
            if answer.read_line(&mut header).map_err(fail)? == 0 {
                return Err(self.unexpected("it ends early"));
            }
        }
        Ok(answer)
    }

    fn no_answer(&self, source: io::Error) -> DockerdError {
        DockerdError::NoAnswer { socket: self.socket.clone(), source }
    }

    fn unexpected(&self, answer: &str) -> DockerdError {
        DockerdError::UnexpectedAnswer { socket: self.socket.clone(), answer: answer.to_owned() }
    }
}

/// A stream that is read until a deadline.
struct DeadlineReader {
    stream: UnixStream,
    until: Instant,
}

impl Read for DeadlineReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buffer)
    }
}

fn is_dockerd(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "dockerd")
}

fn hang_up(pid: i32) -> Result<(), DockerdError> {
    kill(Pid::from_raw(pid), Signal::SIGHUP).map_err(|source| DockerdError::Signal { pid, source })
}
