//! Starts a container's monitor: its directory, its sockets, its process.
//!
//! A monitor takes a while to start, so [`start_monitor`] runs before the monitor's settings are known, and the
//! settings are sent afterwards. The sockets listen before any process can know of them, so the runtime, which connects
//! next, always finds a listening socket. This module owns the layout of a monitor's directory:
//!
//! ```text
//! STATE_DIR/gate/SHORT_ID/entry      the process that becomes the runtime brings its listener here
//! STATE_DIR/gate/SHORT_ID/control    the socket for questions, see `wire`
//! STATE_DIR/gate/SHORT_ID/process    the monitor's pid and start time
//! STATE_DIR/gate/SHORT_ID/status     the container's status, see `status_file`
//! STATE_DIR/gate/SHORT_ID/lost       an event says that the monitor is lost
//! STATE_DIR/gate/SHORT_ID/seen       a check has found out what the lost monitor left
//! STATE_DIR/gate/SHORT_ID/channels.UUID   the container's channels on a GPU, while the monitor takes turns on it
//! ```
#![allow(unsafe_code, reason = "fork, and what a child does before exec")]

use std::cell::Cell;
use std::ffi::CString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, clone};
use nix::unistd::{ForkResult, fork};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with, socketpair,
};
use rustix::process::{Pid, WaitOptions, setsid, waitpid};
use thiserror::Error;

use super::fd_passing::{self, Wait};
use super::settings::{Settings, SettingsError};
use cgpu_host::events::{Event, MONITOR_KILLED};
use cgpu_host::process::ProcessId;

/// The longest path of a socket, in bytes (`sun_path`, unix(7), without the closing zero).
const LONGEST_SOCKET: usize = 107;

/// Connections that wait to be accepted; further ones are refused. The host may allow fewer (listen(2)).
const BACKLOG: i32 = 4096;

/// The message that goes to the monitor with its settings.
const SETTINGS_SENT: &[u8] = b"{}";

/// The stack of the process that becomes a monitor, in bytes.
const STACK: usize = 16 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MonitorDir {
    dir: PathBuf,
}

/// Why a monitor can't be started.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// A file or directory can't be made or removed.
    #[error("cannot start the monitor: {action} {}: {source}; make state_dir writable for root", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// A path that is too long for a socket.
    #[error(
        "cannot start the monitor: {} is longer than a socket's path may be; set state_dir to a shorter path",
        path.display()
    )]
    TooLong { path: PathBuf },
    /// The settings can't be written.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The monitor's process can't be started.
    #[error("cannot start the monitor {}: {source}; see that it can be executed, and that the host has memory and processes left", program.display())]
    Process {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The monitor has ended before it got its settings.
    #[error(
        "the monitor {} has ended as soon as it was started; see that it is cgpu's, of the same \
         version as the rest, and that the host has memory and processes left",
        program.display()
    )]
    Ended { program: PathBuf },
}

impl MonitorDir {
    /// The directory that holds the directories of all monitors.
    #[must_use]
    pub fn all(state_dir: &Path) -> PathBuf {
        state_dir.join("gate")
    }

    /// The directory of the monitor of the container with this short id.
    #[must_use]
    pub fn of(state_dir: &Path, short_id: &str) -> Self {
        MonitorDir { dir: Self::all(state_dir).join(short_id) }
    }

    /// The directory of each monitor, in the order of their short ids.
    ///
    /// # Errors
    ///
    /// Where the directories can't be listed.
    pub fn list(state_dir: &Path) -> io::Result<Vec<Self>> {
        let entries = match fs::read_dir(Self::all(state_dir)) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut all: Vec<_> =
            entries.map(|entry| Ok(Self::at(&entry?.path()))).collect::<io::Result<_>>()?;
        all.sort_by(|one, other| one.dir.cmp(&other.dir));
        Ok(all)
    }

    /// The short id of the monitor's container.
    #[must_use]
    pub fn short_id(&self) -> String {
        self.dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The monitor's directory at this path.
    #[must_use]
    pub fn at(dir: &Path) -> Self {
        MonitorDir { dir: dir.to_owned() }
    }

    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Removes the directory with its files; does nothing where it is missing.
    ///
    /// # Errors
    ///
    /// Where the directory can't be removed.
    pub fn remove(&self) -> io::Result<()> {
        for _ in 0..3 {
            match fs::remove_dir_all(&self.dir) {
                // The monitor has written a file meanwhile: try again.
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => return Ok(()),
            }
        }
        Err(io::ErrorKind::DirectoryNotEmpty.into())
    }

    /// The socket for a process that goes behind the gate before it becomes a runtime.
    #[must_use]
    pub fn entry(&self) -> PathBuf {
        self.dir.join("entry")
    }

    /// The control socket, for questions.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.dir.join("control")
    }

    /// The file with the monitor's pid and start.
    #[must_use]
    pub fn process_file(&self) -> PathBuf {
        self.dir.join("process")
    }

    /// Writes the file that names the monitor's process. Where that fails, the container shows as closed.
    pub(crate) fn write_process(&self, own: ProcessId) {
        let _ = fs::write(self.process_file(), format!("{} {}\n", own.pid, own.start_ticks));
    }

    /// Whether the monitor has exited, its directory is there, and no check has found out what it left.
    pub fn is_lost_and_not_seen(&self) -> bool {
        // A container creation asks this of all its neighbours, whose monitors mostly live: for those, only this first
        // check runs.
        matches!(self.process(), Ok(None))
            && self.process_file().exists()
            && !self.dir.join("seen").exists()
    }

    /// Reports, unless it was reported before, that the monitor was killed. Then has `check` find out once what the
    /// monitor left, and reports the event of that, too.
    ///
    /// # Errors
    ///
    /// The error of `check`: then another process may check.
    pub fn handle_closed<E>(
        &self,
        report: impl Fn(Event),
        check: impl FnOnce() -> Result<Option<Event>, E>,
    ) -> Result<(), E> {
        if self.mark_lost() {
            report(Event::monitor_lost(MONITOR_KILLED));
        }
        let found = check()?;
        if File::create_new(self.dir.join("seen")).is_ok() {
            found.into_iter().for_each(report);
        }
        Ok(())
    }

    /// Notes that an event says that the monitor is lost. `false` if that was noted before, or can't be.
    #[must_use]
    pub fn mark_lost(&self) -> bool {
        File::create_new(self.dir.join("lost")).is_ok()
    }

    /// The file with the container's status.
    #[must_use]
    pub fn status(&self) -> PathBuf {
        self.dir.join("status")
    }

    /// The file that lists the channels of the monitor's container on the GPU with that UUID, while the monitor takes
    /// turns on that GPU.
    #[must_use]
    pub fn channels(&self, uuid: &str) -> PathBuf {
        self.dir.join(format!("channels.{uuid}"))
    }

    /// The monitor's process; `None` where no monitor is alive.
    ///
    /// # Errors
    ///
    /// Where the file that names the monitor can't be read: the monitor may then be alive.
    pub fn process(&self) -> io::Result<Option<ProcessId>> {
        let text = match fs::read_to_string(self.process_file()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        let named = || {
            let (pid, start) = text.trim().split_once(' ')?;
            Some(ProcessId { pid: pid.parse().ok()?, start_ticks: start.parse().ok()? })
        };
        Ok(named().filter(|monitor| monitor.alive()))
    }
}

/// A monitor without settings. It ends if this is dropped, or this process ends, before the settings are sent.
#[derive(Debug)]
pub struct StartedMonitor {
    program: PathBuf,
    /// The process that was started. It ends as soon as it has forked the monitor (see [`detach`]).
    child: Pid,
    /// The sockets to which runtimes and control connections come; `None` once the monitor alone holds them. If this
    /// process held them too, a program that connects after the monitor's end would wait for ever.
    sockets: Option<[OwnedFd; 2]>,
    /// The socket on which the monitor waits for its settings.
    settings_socket: OwnedFd,
}

/// Starts a monitor: runs `program`, which is `cgpu-monitor`.
///
/// The child has this process's memory until it executes the program: only a process with one thread may call this.
///
/// # Errors
///
/// Where the process can't be started.
pub fn start_monitor(program: &Path) -> Result<StartedMonitor, LaunchError> {
    let failed = |source| LaunchError::Process { program: program.to_owned(), source };
    let refused = |errno: rustix::io::Errno| failed(errno.into());
    let name =
        CString::new(program.as_os_str().as_bytes()).map_err(|error| failed(error.into()))?;
    let socket = || {
        let stream =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        stream.map_err(refused)
    };
    let sockets = [socket()?, socket()?];
    let pair = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (settings_socket, monitor_end) =
        socketpair(pair.0, pair.1, pair.2, None).map_err(refused)?;
    let [listener, control] = &sockets;
    let given = [listener, control, &monitor_end].map(AsRawFd::as_raw_fd);
    let child = spawn_monitor(&name, given).map_err(|errno| failed(errno.into()))?;
    Ok(StartedMonitor {
        program: program.to_owned(),
        child,
        sockets: Some(sockets),
        settings_socket,
    })
}

impl Drop for StartedMonitor {
    fn drop(&mut self) {
        // A child that has not ended yet is left to whichever process inherits it.
        let _ = waitpid(Some(self.child), WaitOptions::NOHANG);
    }
}

impl StartedMonitor {
    /// Gives the monitor its `settings` and the directory `place`, in which it takes listeners. Removes what an earlier
    /// monitor left there.
    ///
    /// # Errors
    ///
    /// Where a file can't be made, or the monitor has ended. The directory may be there then, without a monitor.
    pub fn start_serving(
        &mut self,
        place: &MonitorDir,
        settings: &Settings,
    ) -> Result<(), LaunchError> {
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |source| LaunchError::File { action, path, source }
        };
        place.remove().map_err(failed("cannot remove", &place.dir))?;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&place.dir)
            .map_err(failed("cannot make", &place.dir))?;
        let open = |socket: &OwnedFd, path: &Path| {
            if path.as_os_str().len() > LONGEST_SOCKET {
                return Err(LaunchError::TooLong { path: path.to_owned() });
            }
            SocketAddrUnix::new(path)
                .and_then(|address| bind(socket, &address))
                .and_then(|()| listen(socket, BACKLOG))
                .map_err(|errno| failed("cannot make", path)(errno.into()))
        };
        if let Some([listener, control]) = self.sockets.take() {
            open(&listener, &place.entry())?;
            open(&control, &place.control())?;
        }
        let memory = memfd_create("cgpu-settings", MemfdFlags::CLOEXEC)
            .map_err(|errno| SettingsError::from(io::Error::from(errno)))?;
        let file = File::from(memory);
        settings.write(&file)?;
        let sent = fd_passing::send(
            &self.settings_socket,
            SETTINGS_SENT,
            Some(file.as_fd()),
            Wait::Always,
        );
        sent.map_err(|_| LaunchError::Ended { program: self.program.clone() })
    }
}

/// Waits, in a monitor that has just started, for its settings. `None` where the launcher has closed the socket without
/// sending any. Fails where the settings can't be received.
pub(crate) fn receive_settings(settings_socket: &OwnedFd) -> io::Result<Option<File>> {
    let mut buffer = [0; SETTINGS_SENT.len()];
    match fd_passing::receive(settings_socket, &mut buffer, Wait::Always)? {
        (0, None) => Ok(None),
        (_, Some(settings)) => Ok(Some(settings.into())),
        (_, None) => Err(io::Error::other("the launcher's message has no settings file")),
    }
}

/// Starts `program serve` with `given` as descriptors 3, 4 and 5. The program calls [`detach`] itself.
fn spawn_monitor(program: &CString, given: [RawFd; 3]) -> nix::Result<Pid> {
    let words = [program.as_ptr(), c"serve".as_ptr(), std::ptr::null()];
    let environment = [std::ptr::null()];
    let failed = Cell::new(None);
    // SAFETY: plain system calls on numbers and on strings that live until the exec. The descriptors are first
    // duplicated to numbers from 16 up: one of them may have a number that another one is to get.
    let mut become_monitor = || unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        let high = given.map(|from| libc::fcntl(from, libc::F_DUPFD, 16));
        for (from, to) in [null, null, null, high[0], high[1], high[2]].iter().zip(0..) {
            libc::dup2(*from, to);
        }
        libc::close_range(6, libc::c_uint::MAX, 0);
        libc::chdir(c"/".as_ptr());
        libc::execve(program.as_ptr(), words.as_ptr(), environment.as_ptr());
        failed.set(Some(Errno::last()));
        libc::_exit(1)
    };
    // On the heap: pages that are never touched take no memory.
    let mut stack = vec![0; STACK];
    // `CLONE_VM`: nothing is copied for the child, which uses this process's memory until it executes the program.
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK;
    // SAFETY: this process has one thread (see `start_monitor`), which waits until the child has left this memory. The
    // child runs alone in the memory, on a stack of its own, and `become_monitor` needs little of it.
    let child =
        unsafe { clone(Box::new(&mut become_monitor), &mut stack, flags, Some(libc::SIGCHLD)) }?;
    let child = Pid::from_raw(child.as_raw()).ok_or(Errno::ESRCH)?;
    match failed.get() {
        None => Ok(child),
        Some(errno) => {
            let _ = waitpid(Some(child), WaitOptions::empty()); // fails where SIGCHLD is ignored: nothing is left to reap
            Err(errno)
        }
    }
}

/// Forks: the child goes on in a new session, and the launcher need not wait for it; this process ends. Call this
/// before there is a second thread.
///
/// The monitor forks here and not in its launcher. A launcher that starts the monitor as a grandchild is woken on the
/// processor on which the monitor has just been put, and waits for that busy processor. Fails where the process can't
/// be forked.
pub(crate) fn detach() -> io::Result<()> {
    // SAFETY: there is one thread, so no lock stays locked for ever in the child.
    match unsafe { fork() }? {
        // SAFETY: `_exit` ends this process and runs nothing first: buffers and files belong to the child, too.
        ForkResult::Parent { .. } => unsafe { libc::_exit(0) },
        ForkResult::Child => {
            setsid()?;
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use cgpu_host::events::Kind;

    /// The loss of a monitor is reported once, and is checked until one check succeeds.
    #[test]
    fn monitor_loss_is_reported_once_and_rechecked() {
        let dir = tempfile::tempdir().unwrap();
        let place = MonitorDir::at(dir.path());
        // A process that was: no process has this number.
        place.write_process(ProcessId { pid: i32::MAX, start_ticks: 1 });
        let reported = RefCell::new(Vec::new());
        let check = |found: Result<Option<Event>, ()>| {
            place.handle_closed(|event| reported.borrow_mut().push(event.kind), || found)
        };
        assert!(place.is_lost_and_not_seen());
        assert_eq!(check(Err(())), Err(()));
        assert!(place.is_lost_and_not_seen(), "the next one looks again");
        assert_eq!(check(Ok(Some(Event::ended_for_leak()))), Ok(()));
        assert!(!place.is_lost_and_not_seen());
        assert_eq!(check(Ok(Some(Event::ended_for_leak()))), Ok(()));
        assert_eq!(reported.take(), [Kind::MonitorLost, Kind::Leaked]);
    }
}
