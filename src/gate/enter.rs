//! Goes behind the gate: from then on this process's driver calls, and those of all that comes
//! of it, are its monitor's to answer.
#![allow(unsafe_code, reason = "seccomp has no safe interface in our crates")]

use std::io::{self, Read};
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc::{self, sock_fprog};
use thiserror::Error;

use super::filter::{Machine, program};
use super::passing::{self, Wait};

/// What the keeper is told with a listener: nothing that it doesn't know. Who says so waits for
/// [`LISTENER_TAKEN`].
pub const LISTENER_SENT: &[u8] = b"{}";

/// What the keeper says when it holds the listener.
pub const LISTENER_TAKEN: &[u8] = b"{}";

/// How long the keeper may take: it may be starting, on a host that has other things to do.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Why this process can't go behind the gate.
#[derive(Debug, Error)]
pub enum EnterError {
    /// The monitor isn't there.
    #[error(
        "the monitor at {} doesn't answer: {source}; if it has ended, the container's GPUs are \
         closed: make the container anew",
        socket.display()
    )]
    NoMonitor {
        /// Its socket.
        socket: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// There is a listener.
    #[error(
        "another seccomp listener watches this process already, and there can be one: start the \
         engine outside of it"
    )]
    OtherListener,
    /// The kernel takes no filter.
    #[error("cannot put on a seccomp filter: {source}; run the engine as root with CAP_SYS_ADMIN")]
    Filter {
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// Puts the filter on this process, and gives the listener to the keeper at `socket`, which
/// holds it then.
///
/// Descriptors that are open stay as they were.
///
/// # Errors
///
/// Where there is no keeper, it doesn't take the listener, or no filter can be put on. One that is
/// put on and whose listener nobody took stays: driver calls fail from then on.
pub fn enter(socket: &Path) -> Result<(), EnterError> {
    let no_monitor = |source| EnterError::NoMonitor { socket: socket.to_owned(), source };
    // First of all: without a listener that somebody holds, the calls behind it fail.
    let keeper = UnixStream::connect(socket).map_err(no_monitor)?;
    let listener = match install_filter() {
        Err(Errno::EBUSY) => return Err(EnterError::OtherListener),
        put => put.map_err(|errno| EnterError::Filter { source: errno.into() })?,
    };
    let sent = passing::send(&keeper, LISTENER_SENT, Some(listener.as_fd()), Wait::Always);
    sent.map_err(|errno| no_monitor(errno.into()))?;
    wait_until_taken(&keeper).map_err(no_monitor)
}

/// Waits until the keeper holds what it was sent: it may have ended before it looked.
fn wait_until_taken(mut keeper: &UnixStream) -> io::Result<()> {
    keeper.set_read_timeout(Some(TIMEOUT))?;
    let mut answer = [0; LISTENER_TAKEN.len()];
    keeper.read_exact(&mut answer).map_err(|error| match error.kind() {
        // As a socket says that the time is over.
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    })
}

/// With a listener. No mitigation comes with this filter that the profile's own, if there is one,
/// doesn't bring.
const LISTENER: libc::c_ulong =
    libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;

/// The same, and an interrupted call waits until the monitor has answered, since 5.19.
const KILLABLE_WAIT: libc::c_ulong = LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;

/// What this kernel can do with the filter: asked of it, and nothing put on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// A filter can have a listener.
    pub listener: bool,
    /// An interrupted call waits until it is answered.
    pub killable_wait: bool,
}

/// Asks the kernel which flags it knows.
#[must_use]
pub fn abilities() -> Abilities {
    // It looks at the flags first, and then for the filter (kernel/seccomp.c,
    // seccomp_set_mode_filter).
    let knows = |flags| set_filter(flags, None) == Err(Errno::EFAULT);
    Abilities { listener: knows(LISTENER), killable_wait: knows(KILLABLE_WAIT) }
}

/// Puts the filter on, and returns its listener.
fn install_filter() -> Result<OwnedFd, Errno> {
    let mut program = program(Machine::HERE);
    let len = libc::c_ushort::try_from(program.len()).map_err(|_| Errno::EINVAL)?;
    let filter = sock_fprog { len, filter: program.as_mut_ptr() };
    let listener = match set_filter(KILLABLE_WAIT, Some(&filter)) {
        Err(Errno::EINVAL) => set_filter(LISTENER, Some(&filter)),
        set => set,
    }?;
    let listener = RawFd::try_from(listener).map_err(|_| Errno::EBADF)?;
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(listener) })
}

/// Sets a filter with these flags; where there is none, the kernel only looks at the flags.
fn set_filter(flags: libc::c_ulong, filter: Option<&sock_fprog>) -> Result<libc::c_long, Errno> {
    let mode = libc::SECCOMP_SET_MODE_FILTER;
    let address = filter.map_or(ptr::null(), ptr::from_ref);
    // SAFETY: the kernel has copied `filter` and what it points at when the call returns, and
    // answers with an error where nothing is at an address.
    Errno::result(unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, address) })
}
