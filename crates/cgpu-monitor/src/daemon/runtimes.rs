//! The processes that create the container and execute programs in it: its launcher, the connections of its runtimes,
//! and whether the container is gone.
//!
//! The launcher is the process that becomes the runtime and creates the container. A process connects once for the
//! container and once for each `exec`, before it puts on the filter, and then sends its listener. The container is gone
//! when no process is behind a listener, no connection is open, and a listener has come or the launcher has exited.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use crate::gate::entry::{LISTENER_SENT, LISTENER_TAKEN};
use crate::gate::fd_passing::{self, Wait};
use cgpu_host::process::{ProcessId, pidfd};

/// Connections that wait for their listener at the same time.
const MOST_CONNECTIONS: usize = 256;

/// How long a container must look gone before it counts as gone: a connection that was made before may lie in the
/// socket's queue.
const GONE_AFTER: Duration = Duration::from_millis(300);

#[derive(Debug)]
pub(crate) struct Runtimes {
    launcher: Launcher,
    /// `None` for one that has ended, until [`Self::update`].
    connections: Vec<Option<OwnedFd>>,
    /// Whether a listener has ever come.
    had_listener: bool,
    /// Since when the container looks gone.
    unused_since: Option<Instant>,
}

#[derive(Debug)]
enum Launcher {
    Pidfd(OwnedFd, ProcessId),
    /// A process without a pidfd: it is checked on each tick.
    Polled(ProcessId),
    Ended,
}

/// Whether the descriptor is a seccomp listener. Another file would not report that its processes have exited.
fn is_listener(descriptor: &OwnedFd) -> bool {
    let link = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    std::fs::read_link(link).is_ok_and(|name| name == Path::new("anon_inode:seccomp notify"))
}

impl Runtimes {
    /// The runtimes of a container. `launcher` is `None` if it has exited; `connections` and `had_listener` are from
    /// before an update.
    pub(crate) fn new(
        launcher: Option<ProcessId>,
        connections: Vec<OwnedFd>,
        had_listener: bool,
    ) -> Self {
        let launcher = launcher.map_or(Launcher::Ended, |launcher| match pidfd(launcher.pid) {
            Ok(pidfd) if launcher.alive() => Launcher::Pidfd(pidfd, launcher),
            _ => Launcher::Polled(launcher),
        });
        let connections = connections.into_iter().map(Some).collect();
        Runtimes { launcher, connections, had_listener, unused_since: None }
    }

    /// The launcher; `None` if it has exited.
    pub(crate) fn launcher_process(&self) -> Option<ProcessId> {
        match self.launcher {
            Launcher::Pidfd(_, launcher) | Launcher::Polled(launcher) => Some(launcher),
            Launcher::Ended => None,
        }
    }

    /// Whether a listener has ever come.
    pub(crate) fn had_listener(&self) -> bool {
        self.had_listener
    }

    /// The launcher's pidfd, to wait for the launcher's end.
    pub(crate) fn launcher(&self) -> Option<BorrowedFd<'_>> {
        match &self.launcher {
            Launcher::Pidfd(pidfd, _) => Some(pidfd.as_fd()),
            _ => None,
        }
    }

    pub(crate) fn set_launcher_ended(&mut self) {
        self.launcher = Launcher::Ended;
    }

    pub(crate) fn connections(&self) -> impl Iterator<Item = (usize, BorrowedFd<'_>)> {
        let sockets = self.connections.iter().enumerate();
        sockets.filter_map(|(at, socket)| Some((at, socket.as_ref()?.as_fd())))
    }

    /// Retains a connection until its other end is closed. Closes the connection if too many are retained.
    pub(crate) fn add_connection(&mut self, socket: OwnedFd) {
        if self.connections.len() >= MOST_CONNECTIONS {
            warn!("an exec is refused: too many wait for the monitor already; start fewer at once");
            return;
        }
        self.connections.push(Some(socket));
    }

    /// Reads what has come on the connection at index `at`. Returns the listener if one came.
    pub(crate) fn receive_listener(&mut self, at: usize) -> Option<OwnedFd> {
        let connection = self.connections.get_mut(at)?;
        let mut buffer = [0; LISTENER_SENT.len()];
        loop {
            match fd_passing::receive(connection.as_ref()?, &mut buffer, Wait::Never) {
                Ok((_, Some(listener))) if is_listener(&listener) => {
                    self.had_listener = true;
                    return Some(listener);
                }
                Ok((_, Some(_))) => warn!("a descriptor is refused: it is no listener"),
                Ok((1.., None)) => {}
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return None,
                Ok((0, None)) | Err(_) => *connection = None,
            }
        }
    }

    /// Reports to the sender at index `at`, which waits for it, that the monitor holds its listener.
    pub(crate) fn acknowledge(&self, at: usize) {
        if let Some(Some(socket)) = self.connections.get(at)
            && let Err(error) = fd_passing::send(socket, LISTENER_TAKEN, None, Wait::Never)
        {
            debug!(%error, "the sender of a listener has not waited for the answer");
        }
    }

    /// Drops connections that have ended, and checks whether the launcher has ended.
    pub(crate) fn update(&mut self) {
        self.connections.retain(Option::is_some);
        if let Launcher::Polled(launcher) = &self.launcher
            && !launcher.alive()
        {
            self.launcher = Launcher::Ended;
        }
    }

    /// Whether the monitor has to check again without being woken.
    pub(crate) fn needs_ticks(&self) -> bool {
        matches!(self.launcher, Launcher::Polled(_)) || self.unused_since.is_some()
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
