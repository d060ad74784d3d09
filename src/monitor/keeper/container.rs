//! What the keeper knows of the container: its launcher, its runtimes' connections, and whether it is gone.
//!
//! The launcher is the runtime process that makes the container. A runtime connects once for the container and once
//! for each `exec`, and sends its listener at once or later: crun connects while it creates. The container is gone
//! when no process is behind a listener, no connection is open, and a listener has come or the launcher has ended.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Deserialize;
use tracing::{debug, warn};

use crate::gate::enter::{LISTENER_SENT, LISTENER_TAKEN};
use crate::gate::passing::{self, Wait};
use crate::process::{ProcessId, pidfd};

/// Connections that wait for their listener at the same time.
const MOST_CONNECTIONS: usize = 256;

/// Bytes that are kept of the texts of all runtimes together; annotations may be long.
const MOST_TEXT: usize = 4 << 20;

/// How long a reservation is kept before its runtime comes.
const RESERVATION_TIMEOUT: Duration = Duration::from_secs(120);

/// How long a container must look gone before it counts as gone: a connection that was made before may lie in the
/// socket's queue.
const GONE_AFTER: Duration = Duration::from_millis(300);

#[derive(Debug)]
pub(crate) struct Container {
    launcher: Launcher,
    connections: Vec<Connection>,
    /// Whether a listener has ever come.
    had_listener: bool,
    /// The container's id and bundle, from a runtime's text.
    names: Option<ContainerNames>,
    /// Since when the container looks gone.
    unused_since: Option<Instant>,
}

#[derive(Debug)]
enum Launcher {
    Pidfd(OwnedFd),
    /// A process without a pidfd: it is looked at on each tick.
    Polled(ProcessId),
    /// A launcher that is not known: it counts as ended at this time, or when a listener comes.
    Unknown(Instant),
    Ended,
}

#[derive(Debug)]
struct Connection {
    socket: Option<OwnedFd>,
    /// The bytes that the runtime has sent.
    text: Vec<u8>,
}

/// What the keeper reads of a runtime's text (`ContainerProcessState` of the OCI runtime specification).
#[derive(Debug, Deserialize)]
struct RuntimeMessage {
    state: ContainerNames,
}

/// The names of a container.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct ContainerNames {
    /// The container's id.
    pub(crate) id: String,
    /// The container's bundle.
    pub(crate) bundle: PathBuf,
}

/// Whether the descriptor is a seccomp listener. Of another file, no worker would report that its processes ended.
fn is_listener(descriptor: &OwnedFd) -> bool {
    let link = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    std::fs::read_link(link).is_ok_and(|name| name == Path::new("anon_inode:seccomp notify"))
}

impl Container {
    pub(crate) fn new(launcher: Option<ProcessId>, is_reserved: bool) -> Self {
        let launcher = match launcher {
            Some(launcher) => match pidfd(launcher.pid) {
                Ok(pidfd) if launcher.alive() => Launcher::Pidfd(pidfd),
                _ => Launcher::Polled(launcher),
            },
            None if is_reserved => Launcher::Unknown(Instant::now() + RESERVATION_TIMEOUT),
            None => Launcher::Ended,
        };
        let connections = Vec::new();
        Container { launcher, connections, had_listener: false, names: None, unused_since: None }
    }

    /// The launcher's pidfd, to wait for the launcher's end.
    pub(crate) fn launcher(&self) -> Option<BorrowedFd<'_>> {
        match &self.launcher {
            Launcher::Pidfd(pidfd) => Some(pidfd.as_fd()),
            _ => None,
        }
    }

    pub(crate) fn set_launcher_ended(&mut self) {
        self.launcher = Launcher::Ended;
    }

    pub(crate) fn connections(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>)> {
        let sockets = self.connections.iter().enumerate();
        sockets.filter_map(|(at, one)| Some((at, one.socket.as_ref()?.as_fd())))
    }

    /// Keeps a connection until its other end is closed. Closes the connection where too many are kept.
    pub(crate) fn add_connection(&mut self, socket: OwnedFd) {
        if self.connections.len() >= MOST_CONNECTIONS {
            warn!("an exec is refused: too many wait for the monitor already; start fewer at once");
            return;
        }
        self.connections.push(Connection { socket: Some(socket), text: Vec::new() });
    }

    /// Reads what has come on the connection at place `at`. Returns the listener where one came.
    pub(crate) fn receive_listener(&mut self, at: usize) -> Option<OwnedFd> {
        let kept: usize = self.connections.iter().map(|connection| connection.text.len()).sum();
        let mut room = MOST_TEXT.saturating_sub(kept);
        let connection = self.connections.get_mut(at)?;
        let mut buffer = [0; 8 << 10];
        loop {
            let received = passing::receive(connection.socket.as_ref()?, &mut buffer, Wait::Never);
            if let Ok((length, _)) = &received
                && *length <= room
            {
                room -= length;
                connection.text.extend_from_slice(buffer.get(..*length).unwrap_or_default());
            }
            match received {
                Ok((_, Some(listener))) if is_listener(&listener) => {
                    self.had_listener = true;
                    return Some(listener);
                }
                Ok((_, Some(_))) => warn!("a descriptor is refused: it is no listener"),
                Ok((1.., None)) => {}
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return None,
                Ok((0, None)) | Err(_) => {
                    connection.socket = None;
                    let said = serde_json::from_slice(&connection.text).ok();
                    self.names = self.names.take().or(said.map(|said: RuntimeMessage| said.state));
                    return None;
                }
            }
        }
    }

    /// Tells the sender at place `at` that the keeper holds its listener, where the sender waits for that.
    pub(crate) fn acknowledge(&self, at: usize) {
        if let Some(Connection { socket: Some(socket), text }) = self.connections.get(at)
            && text == LISTENER_SENT
            && let Err(error) = passing::send(socket, LISTENER_TAKEN, None, Wait::Never)
        {
            debug!(%error, "who brought a listener doesn't wait until it's held");
        }
    }

    /// The container's id and bundle; `None` where no runtime has named them.
    pub(crate) fn names(&self) -> Option<&ContainerNames> {
        self.names.as_ref()
    }

    /// Drops connections that have ended, and looks whether the launcher has ended.
    pub(crate) fn update(&mut self) {
        self.connections.retain(|connection| connection.socket.is_some());
        match &self.launcher {
            Launcher::Polled(launcher) if !launcher.alive() => self.launcher = Launcher::Ended,
            Launcher::Unknown(until) if self.had_listener || Instant::now() >= *until => {
                self.launcher = Launcher::Ended;
            }
            _ => {}
        }
    }

    /// Whether the keeper has to look again without being woken.
    pub(crate) fn needs_ticks(&self) -> bool {
        matches!(self.launcher, Launcher::Polled(_) | Launcher::Unknown(_))
            || self.unused_since.is_some()
    }

    /// Whether the container is gone; remembers since when. `has_listeners`: whether a listener is served.
    pub(crate) fn check_gone(&mut self, has_listeners: bool) -> bool {
        let ended = matches!(self.launcher, Launcher::Ended);
        if has_listeners || !self.connections.is_empty() || !(ended || self.had_listener) {
            self.unused_since = None;
            return false;
        }
        let since = *self.unused_since.get_or_insert_with(Instant::now);
        since.elapsed() >= GONE_AFTER
    }
}
