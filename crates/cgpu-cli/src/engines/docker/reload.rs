//! A running dockerd: what it has in force, and having it read its file while containers run.
//!
//! Owns dockerd's socket, its signal and the order of the steps. What a file says is known
//! by [`super::daemon_json`].
//!
//! A reload changes only what the file names. dockerd 20.10 (`daemon/reload.go`) keeps its
//! default runtime where the file names none, and dereferences nil where that runtime is gone
//! from the list. So it first reads a file that spells out everything, then the file gets the
//! text that it is to keep. A signal is no answer: dockerd reports the reload as an event, and
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

use super::daemon_json::{self, InForce};
use crate::engines::config_file::{self, ReadError};
use crate::engines::config_text::EditError;
use crate::engines::file_change::{self, Backup, Change, WriteError};
use crate::engines::service::{self, Done, Init, RestartError};

/// Where dockerd listens unless it is told.
const SOCKET: &str = "/var/run/docker.sock";

/// Where it writes its process id unless it is told.
const PID_FILE: &str = "/var/run/docker.pid";

/// How long dockerd may take for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Most bytes of an answer.
const ANSWER_BYTES_MAX: u64 = 4 << 20;

/// Why dockerd doesn't have what its file says.
#[derive(Debug, Error)]
pub enum DockerdError {
    /// The file isn't to be edited.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Its text isn't understood.
    #[error("{} {source}", path.display())]
    Edit {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: EditError,
    },
    /// It can't be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// dockerd doesn't answer.
    #[error("docker doesn't answer at {}: {source}; where it runs, restart it", socket.display())]
    NoAnswer {
        /// Its socket.
        socket: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It answers something else.
    #[error("docker's answer at {} isn't understood: {said}; restart docker", socket.display())]
    Odd {
        /// Its socket.
        socket: PathBuf,
        /// What it said.
        said: String,
    },
    /// systemctl doesn't reload it.
    #[error(transparent)]
    Restart(#[from] RestartError),
    /// Nobody knows its process.
    #[error(
        "no dockerd has the process id in {PID_FILE}, and no systemd runs here; restart docker"
    )]
    NoProcess,
    /// It can't be signalled.
    #[error("dockerd (process {pid}) can't be told to reload: {source}; run this as root")]
    Signal {
        /// Its process id.
        pid: i32,
        /// Why.
        #[source]
        source: nix::Error,
    },
    /// It reported no reload.
    #[error(
        "docker reported no reload of {} within {} s, and {state}; see what docker's log says of it",
        path.display(),
        PATIENCE.as_secs()
    )]
    NotTaken {
        /// The file.
        path: PathBuf,
        /// What became of the file.
        state: &'static str,
    },
    /// It has reloaded, and has something else in force.
    #[error("docker has reloaded and doesn't use {}; does it read another file?", path.display())]
    OtherFile {
        /// The file.
        path: PathBuf,
    },
}

impl DockerdError {
    /// Whether nobody listens.
    fn is_of_nobody(&self) -> bool {
        use io::ErrorKind::{ConnectionRefused, NotFound};
        matches!(self, DockerdError::NoAnswer { source, .. }
            if [ConnectionRefused, NotFound].contains(&source.kind()))
    }
}

/// What became of dockerd.
#[derive(Debug)]
pub enum Outcome {
    /// It has the file in force.
    InForce,
    /// It doesn't answer; the file is written.
    Silent(DockerdError),
}

/// Makes `change` of dockerd's file at `file`, and has dockerd take it; containers run on.
/// Without a change dockerd takes the file as it is.
///
/// # Errors
///
/// Where the file can't be written, or dockerd doesn't take it. A file that would have had
/// dockerd forget a runtime is then as it was.
pub fn apply(file: &Path, change: Option<&Change>) -> Result<Outcome, DockerdError> {
    let edit_error = |source| DockerdError::Edit { path: file.to_owned(), source };
    let before = config_file::read(file, file)?;
    let text = before.as_ref().map(|before| before.text.clone());
    let after = change.map_or(text.clone(), |change| change.after.clone());
    let after = after.unwrap_or_default();
    let hosts = daemon_json::hosts(text.as_deref().unwrap_or_default()).map_err(edit_error)?;
    let dockerd = Dockerd { socket: socket(&hosts) };
    let in_force = match dockerd.in_force() {
        Ok(in_force) => in_force,
        // One that doesn't run reads the file when it starts.
        Err(silence) if silence.is_of_nobody() => {
            change.map(file_change::write).transpose()?;
            return Ok(Outcome::Silent(silence));
        }
        Err(error) => return Err(error),
    };
    if daemon_json::has_forgotten(&after, &in_force).map_err(edit_error)? {
        change.map(file_change::write).transpose()?;
        return Ok(Outcome::InForce);
    }
    match daemon_json::spelled_out(&after, &in_force).map_err(edit_error)? {
        None => {
            change.map(file_change::write).transpose()?;
            dockerd.reload(file, "it is written")?;
        }
        Some(spelled) => {
            let step = |before, after| Change {
                path: file.to_owned(),
                at: file.to_owned(),
                before,
                after,
                backup: Backup::Keep,
            };
            config_file::check(file, file, before.as_ref())?;
            file_change::write(&step(before, Some(spelled)))?;
            let reloaded = dockerd.reload(file, "it is as it was");
            let now = config_file::read(file, file)?;
            // The text that dockerd was told is nobody's: what was there comes back first, so
            // that the change is made as it was planned.
            file_change::write(&step(now, text))?;
            reloaded?;
            change.map(file_change::write).transpose()?;
        }
    }
    match daemon_json::is_in_force(&after, &dockerd.in_force()?).map_err(edit_error)? {
        true => Ok(Outcome::InForce),
        false => Err(DockerdError::OtherFile { path: file.to_owned() }),
    }
}

/// What applies a change to docker, and what that does to containers: the rest of a sentence.
pub(in crate::engines) fn next_step(done: Done, init: Init) -> String {
    match (done, init) {
        (Done::Added, Init::Systemd) => {
            "`systemctl reload docker`, so that docker reads it; containers run on".to_owned()
        }
        (Done::Added, Init::Other) => {
            "`kill -HUP $(cat /var/run/docker.pid)`, so that docker reads it; containers run on"
                .to_owned()
        }
        // dockerd 20.10 panics at a reload where its default runtime is gone from the file, and
        // keeps the runtimes where the file has no list of them.
        (Done::Removed, init) => {
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
    let told = std::env::var("DOCKER_HOST").ok();
    let mut hosts = hosts.iter().chain(&told);
    let socket = hosts.find_map(|host| host.strip_prefix("unix://"));
    socket.unwrap_or(SOCKET).into()
}

/// A dockerd, by its socket.
struct Dockerd {
    socket: PathBuf,
}

impl Dockerd {
    /// What it has in force.
    fn in_force(&self) -> Result<InForce, DockerdError> {
        let mut answer = self.ask("/info")?;
        let mut body = String::new();
        answer.read_to_string(&mut body).map_err(|source| self.no_answer(source))?;
        let info: Value = serde_json::from_str(&body).map_err(|why| self.odd(&why.to_string()))?;
        let default = info["DefaultRuntime"].as_str();
        let runtimes = info["Runtimes"].as_object();
        let (Some(default), Some(runtimes)) = (default, runtimes) else {
            return Err(self.odd("it has no DefaultRuntime or no Runtimes"));
        };
        Ok(InForce { default: default.to_owned(), runtimes: runtimes.keys().cloned().collect() })
    }

    /// Has it read its file, and waits until it reports that.
    fn reload(&self, file: &Path, state: &'static str) -> Result<(), DockerdError> {
        let not_taken = || DockerdError::NotTaken { path: file.to_owned(), state };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // Events since now: the ones before dockerd has us on its list count too.
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
            // systemd listens for dockerd, or a file names it.
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
        let until = Instant::now() + PATIENCE;
        let mut answer = BufReader::new(Patient { stream, until }.take(ANSWER_BYTES_MAX));
        let mut status = String::new();
        answer.read_line(&mut status).map_err(fail)?;
        if status.split_whitespace().nth(1) != Some("200") {
            return Err(self.odd(status.trim()));
        }
        let mut header = String::new();
        while header != "\r\n" {
            header.clear();
            if answer.read_line(&mut header).map_err(fail)? == 0 {
                return Err(self.odd("it ends early"));
            }
        }
        Ok(answer)
    }

    fn no_answer(&self, source: io::Error) -> DockerdError {
        DockerdError::NoAnswer { socket: self.socket.clone(), source }
    }

    fn odd(&self, said: &str) -> DockerdError {
        DockerdError::Odd { socket: self.socket.clone(), said: said.to_owned() }
    }
}

/// A stream that is read until some time.
struct Patient {
    stream: UnixStream,
    until: Instant,
}

impl Read for Patient {
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
