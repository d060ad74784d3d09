//! Starts a container's monitor: its directory, its sockets, its keeper.
//!
//! The sockets listen before anybody can know of them, so that the runtime, which comes
//! next, always finds somebody. Owns the directory's layout:
//!
//! ```text
//! STATE_DIR/gate/SHORT_ID/entry      whoever becomes the runtime connects here, with its
//!                                    listener
//! STATE_DIR/gate/SHORT_ID/listener   or instead: the runtime does, as its bundle says
//! STATE_DIR/gate/SHORT_ID/control    questions, see `wire`
//! STATE_DIR/gate/SHORT_ID/keeper     the keeper's pid and its start
//! ```
#![allow(unsafe_code, reason = "vfork and what a child does before exec")]

use std::cell::Cell;
use std::ffi::CString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, clone};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use rustix::fs::{MemfdFlags, memfd_create};
use thiserror::Error;

use super::settings::{Settings, SettingsError};
use crate::process::ProcessId;

/// The longest path of a socket (`sun_path`, unix(7)), with its end.
const LONGEST_SOCKET: usize = 107;

/// The stack of each process between ours and the keeper, in bytes.
const STACK: usize = 16 << 10;

/// A monitor's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
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
}

impl Place {
    /// The directory of all monitors.
    #[must_use]
    pub fn all(state_dir: &Path) -> PathBuf {
        state_dir.join("gate")
    }

    /// That of the container with that short id.
    #[must_use]
    pub fn of(state_dir: &Path, short_id: &str) -> Self {
        Place { dir: Self::all(state_dir).join(short_id) }
    }

    /// The one in that directory.
    #[must_use]
    pub fn at(dir: &Path) -> Self {
        Place { dir: dir.to_owned() }
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
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

    /// The keeper, if it lives.
    #[must_use]
    pub fn keeper(&self) -> Option<ProcessId> {
        let text = fs::read_to_string(self.keeper_file()).ok()?;
        let (pid, start) = text.trim().split_once(' ')?;
        let keeper = ProcessId { pid: pid.parse().ok()?, start_ticks: start.parse().ok()? };
        keeper.alive().then_some(keeper)
    }
}

/// Starts the keeper of `settings` in `place`, which takes listeners at `socket`; what an
/// earlier one left there goes.
///
/// Its children have its memory for a moment, so that only a process with one thread may call it.
///
/// # Errors
///
/// Where it can't be started; then the directory may be there, and nobody in it.
pub fn launch(place: &Place, socket: &Path, settings: &Settings) -> Result<(), LaunchError> {
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| LaunchError::File { action, path, source }
    };
    match fs::remove_dir_all(&place.dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(failed("cannot remove", &place.dir)(error));
        }
        _ => {}
    }
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&place.dir)
        .map_err(failed("cannot make", &place.dir))?;
    let bind = |path: PathBuf| -> Result<OwnedFd, LaunchError> {
        if path.as_os_str().len() > LONGEST_SOCKET {
            return Err(LaunchError::TooLong { path });
        }
        let socket = UnixListener::bind(&path).map_err(failed("cannot make", &path))?;
        Ok(socket.into())
    };
    let listener = bind(socket.to_owned())?;
    let control = bind(place.control())?;
    let memory = memfd_create("cgpu-settings", MemfdFlags::CLOEXEC)
        .map_err(|errno| SettingsError::from(io::Error::from(errno)))?;
    let file = File::from(memory);
    settings.write(&file)?;
    let process = |source| LaunchError::Process { program: settings.monitor.clone(), source };
    let name = CString::new(settings.monitor.as_os_str().as_bytes())
        .map_err(|error| process(error.into()))?;
    start(&name, [listener.as_raw_fd(), control.as_raw_fd(), file.as_raw_fd()])
        .map_err(|errno| process(errno.into()))
}

/// Starts `program keep` with `given` as 3, 4 and 5, as nobody's child.
fn start(program: &CString, given: [RawFd; 3]) -> nix::Result<()> {
    let words = [program.as_ptr(), c"keep".as_ptr(), std::ptr::null()];
    let environment = [std::ptr::null()];
    let failed = Cell::new(None);
    // SAFETY: plain system calls on numbers and on strings that live until the exec. The sockets
    // are moved up first, since they may lie in each other's way.
    let become_keeper = || unsafe {
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
    let (mut stack, mut inner_stack) = ([0; STACK], [0; STACK]);
    let between = apart(&mut stack, || {
        // A session of its own, and nobody's child when this one has ended.
        let _ = nix::unistd::setsid();
        match apart(&mut inner_stack, become_keeper) {
            Ok(_) => 0,
            Err(errno) => {
                failed.set(Some(errno));
                1
            }
        }
    })?;
    match (failed.get(), waitpid(between, None)) {
        (Some(errno), _) => Err(errno),
        // An engine that ignores SIGCHLD has nobody left to wait for.
        (None, Ok(WaitStatus::Exited(_, 0)) | Err(Errno::ECHILD)) => Ok(()),
        (None, Ok(_)) => Err(Errno::EAGAIN),
        (None, Err(errno)) => Err(errno),
    }
}

/// Runs `child` as another process, until that has become another program or has ended: its
/// memory is ours, so that nothing is copied for it.
fn apart(stack: &mut [u8; STACK], mut child: impl FnMut() -> isize) -> nix::Result<Pid> {
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK;
    // SAFETY: this process has one thread (see `launch`), which waits until the child is gone from
    // this memory: the child runs alone in it, on a stack of its own, which what we run there
    // needs little of.
    unsafe { clone(Box::new(&mut child), stack, flags, Some(libc::SIGCHLD)) }
}
