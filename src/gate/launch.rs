//! Starts a container's monitor: its directory, its sockets, its keeper.
//!
//! A keeper takes a while to start, so it is [recruited](start_keeper) before all is known that it
//! needs to know, and told that then. The sockets listen before anybody can know of them, so
//! that the runtime, which comes next, always finds somebody. Owns the directory's layout:
//!
//! ```text
//! STATE_DIR/gate/SHORT_ID/entry      whoever becomes the runtime connects here, with its
//!                                    listener
//! STATE_DIR/gate/SHORT_ID/listener   or instead: the runtime does, as its bundle says
//! STATE_DIR/gate/SHORT_ID/control    questions, see `wire`
//! STATE_DIR/gate/SHORT_ID/keeper     the keeper's pid and its start
//! STATE_DIR/gate/SHORT_ID/figures    how things stand, see `figures`
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
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{ForkResult, Pid, fork, setsid};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with, socketpair,
};
use thiserror::Error;

use super::passing::{self, Wait};
use super::settings::{Settings, SettingsError};
use crate::process::ProcessId;

/// The longest path of a socket (`sun_path`, unix(7)), with its end.
const LONGEST_SOCKET: usize = 107;

/// Connections that wait to be taken; more are refused. The host may allow fewer (listen(2)).
const BACKLOG: i32 = 4096;

/// What comes with a keeper's settings.
const SETTINGS_SENT: &[u8] = b"{}";

/// The stack of the process that becomes a keeper, in bytes.
const STACK: usize = 16 << 10;

/// A monitor's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MonitorDir {
    dir: PathBuf,
}

/// Why a monitor can't be started.
#[derive(Debug, Error)]
pub enum LaunchError {
    /// A file.
    #[error("cannot start the monitor: {action} {}: {source}; make state_dir writable for root", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// A path that no socket can have.
    #[error(
        "cannot start the monitor: {} is longer than a socket's path may be; set state_dir to a shorter path",
        path.display()
    )]
    TooLong {
        /// The path.
        path: PathBuf,
    },
    /// Its settings.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Its process.
    #[error("cannot start the monitor {}: {source}; see that it can be executed, and that the host has memory and processes left", program.display())]
    Process {
        /// The program.
        program: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is there no more.
    #[error(
        "the monitor {} has ended as soon as it was started; see that it is cgpu's, of the same \
         version as the rest, and that the host has memory and processes left",
        program.display()
    )]
    Ended {
        /// The program.
        program: PathBuf,
    },
}

impl MonitorDir {
    /// The directory of all monitors.
    #[must_use]
    pub fn all(state_dir: &Path) -> PathBuf {
        state_dir.join("gate")
    }

    /// That of the container with that short id.
    #[must_use]
    pub fn of(state_dir: &Path, short_id: &str) -> Self {
        MonitorDir { dir: Self::all(state_dir).join(short_id) }
    }

    /// Each that is there, in the order of their short ids.
    ///
    /// # Errors
    ///
    /// Where it can't be seen which there are.
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

    /// The short id of its container.
    #[must_use]
    pub fn short_id(&self) -> String {
        self.dir.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The one in that directory.
    #[must_use]
    pub fn at(dir: &Path) -> Self {
        MonitorDir { dir: dir.to_owned() }
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Removes it, if it's there, with what is in it.
    ///
    /// # Errors
    ///
    /// Where it can't be removed.
    pub fn remove(&self) -> io::Result<()> {
        for _ in 0..3 {
            match fs::remove_dir_all(&self.dir) {
                // Its worker writes there.
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => return Ok(()),
            }
        }
        Err(io::ErrorKind::DirectoryNotEmpty.into())
    }

    /// The socket for those who become a runtime.
    #[must_use]
    pub fn entry(&self) -> PathBuf {
        self.dir.join("entry")
    }

    /// Whether it's the bundle that says who listens.
    #[must_use]
    pub fn is_by_bundle(&self) -> bool {
        fs::symlink_metadata(self.listener()).is_ok()
    }

    /// The socket for runtimes whose bundle names it.
    #[must_use]
    pub fn listener(&self) -> PathBuf {
        self.dir.join("listener")
    }

    /// The socket for questions.
    #[must_use]
    pub fn control(&self) -> PathBuf {
        self.dir.join("control")
    }

    /// The file that names the keeper.
    #[must_use]
    pub fn keeper_file(&self) -> PathBuf {
        self.dir.join("keeper")
    }

    /// The file that says how things stand.
    #[must_use]
    pub fn figures(&self) -> PathBuf {
        self.dir.join("figures")
    }

    /// The file that says which channels its container has on the GPU with that UUID, while its monitor takes
    /// turns there.
    #[must_use]
    pub fn channels(&self, uuid: &str) -> PathBuf {
        self.dir.join(format!("channels.{uuid}"))
    }

    /// The keeper, if it lives.
    ///
    /// # Errors
    ///
    /// Where the file that names it can't be read: then it may live.
    pub fn keeper(&self) -> io::Result<Option<ProcessId>> {
        let text = match fs::read_to_string(self.keeper_file()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        let named = || {
            let (pid, start) = text.trim().split_once(' ')?;
            Some(ProcessId { pid: pid.parse().ok()?, start_ticks: start.parse().ok()? })
        };
        Ok(named().filter(|keeper| keeper.alive()))
    }
}

/// A keeper that nobody has told yet whose it is. Where nobody does before this is dropped, or
/// this process ends, it ends.
#[derive(Debug)]
pub struct StartedKeeper {
    program: PathBuf,
    /// What was started; it is over as soon as the keeper is nobody's child.
    child: Pid,
    /// What runtimes will connect to, and who has questions; until it has these for itself, so that
    /// nobody waits for one that has ended.
    sockets: Option<[OwnedFd; 2]>,
    /// Where it waits for its settings.
    settings_socket: OwnedFd,
}

/// Starts a keeper: `program`, which is `cgpu-monitor`.
///
/// Its children have its memory for a moment, so that only a process with one thread may call it.
///
/// # Errors
///
/// Where it can't be started.
pub fn start_keeper(program: &Path) -> Result<StartedKeeper, LaunchError> {
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
    let (settings_socket, its) = socketpair(pair.0, pair.1, pair.2, None).map_err(refused)?;
    let [listener, control] = &sockets;
    let given = [listener, control, &its].map(AsRawFd::as_raw_fd);
    let child = spawn_keeper(&name, given).map_err(|errno| failed(errno.into()))?;
    Ok(StartedKeeper {
        program: program.to_owned(),
        child,
        sockets: Some(sockets),
        settings_socket,
    })
}

impl Drop for StartedKeeper {
    fn drop(&mut self) {
        // One that takes longer is left to whoever comes after this process.
        let _ = waitpid(self.child, Some(WaitPidFlag::WNOHANG));
    }
}

impl StartedKeeper {
    /// Makes it the keeper of `settings` in `place`, which takes listeners at `socket`; what an
    /// earlier one left there goes.
    ///
    /// # Errors
    ///
    /// Where that can't be, or it has ended; then the directory may be there, and nobody in it.
    pub fn start_serving(
        &mut self,
        place: &MonitorDir,
        socket: &Path,
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
            open(&listener, socket)?;
            open(&control, &place.control())?;
        }
        let memory = memfd_create("cgpu-settings", MemfdFlags::CLOEXEC)
            .map_err(|errno| SettingsError::from(io::Error::from(errno)))?;
        let file = File::from(memory);
        settings.write(&file)?;
        let told =
            passing::send(&self.settings_socket, SETTINGS_SENT, Some(file.as_fd()), Wait::Always);
        told.map_err(|_| LaunchError::Ended { program: self.program.clone() })
    }
}

/// What a keeper waits for, which has been started before there was anything to tell it: its
/// settings. `None` where there won't be any.
///
/// # Errors
///
/// Where it can't be told.
pub(crate) fn receive_settings(settings_socket: &OwnedFd) -> io::Result<Option<File>> {
    let mut buffer = [0; SETTINGS_SENT.len()];
    match passing::receive(settings_socket, &mut buffer, Wait::Always)? {
        (0, None) => Ok(None),
        (_, Some(settings)) => Ok(Some(settings.into())),
        (_, None) => Err(io::Error::other("told nothing")),
    }
}

/// Starts `program keep` with `given` as 3, 4 and 5. It [`detach`]es itself.
fn spawn_keeper(program: &CString, given: [RawFd; 3]) -> nix::Result<Pid> {
    let words = [program.as_ptr(), c"keep".as_ptr(), std::ptr::null()];
    let environment = [std::ptr::null()];
    let failed = Cell::new(None);
    // SAFETY: plain system calls on numbers and on strings that live until the exec. The sockets
    // are moved up first, since they may lie in each other's way.
    let mut become_keeper = || unsafe {
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
    // On the heap: what isn't touched isn't there.
    let mut stack = vec![0; STACK];
    // Nothing is copied for it: its memory is ours until it has become another program.
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK;
    // SAFETY: this process has one thread (see `start_keeper`), which waits until the child is gone
    // from this memory: the child runs alone in it, on a stack of its own, which what we run there
    // needs little of.
    let child =
        unsafe { clone(Box::new(&mut become_keeper), &mut stack, flags, Some(libc::SIGCHLD)) }?;
    match failed.get() {
        None => Ok(child),
        Some(errno) => {
            let _ = waitpid(child, None); // nobody's to wait for, where SIGCHLD is ignored
            Err(errno)
        }
    }
}

/// Goes on as nobody's child, in a session of its own; who started this process is told that it
/// has ended. To be called before there is a second thread.
///
/// It's here that a keeper is parted from its launcher, not there: a launcher that starts it as the
/// child of a child is woken where the keeper has just been put, and waits for a processor that is
/// busy.
///
/// # Errors
///
/// Where there can't be another process.
pub(crate) fn detach() -> io::Result<()> {
    // SAFETY: there is one thread, so that nothing is locked for ever in the child.
    match unsafe { fork() }? {
        // Nothing is to be written or removed: what there is is the child's, too.
        // SAFETY: it ends this process, and calls nothing before.
        ForkResult::Parent { .. } => unsafe { libc::_exit(0) },
        ForkResult::Child => {
            setsid()?;
            Ok(())
        }
    }
}
