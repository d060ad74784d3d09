//! Puts this process behind the gate: the monitor answers the driver calls of this process, and of all its later
//! children.
#![allow(unsafe_code, reason = "no crate in use has a safe interface to seccomp")]

use std::io::{self, Read};
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::ptr;
use std::time::Duration;

use nix::errno::Errno;
use nix::libc::{self, sock_filter, sock_fprog};
use thiserror::Error;

use super::fd_passing::{self, Wait};
use super::filter::{Machine, program};

/// The message that goes to the monitor with a listener. It says nothing that the monitor does not know. The sender of
/// this message waits for [`LISTENER_TAKEN`].
pub const LISTENER_SENT: &[u8] = b"{}";

/// The monitor's answer once it holds the listener.
pub const LISTENER_TAKEN: &[u8] = b"{}";

/// How long the monitor may take to answer. The monitor may still be starting, on a busy host.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Why this process can't go behind the gate.
#[derive(Debug, Error)]
pub enum EnterError {
    /// The monitor does not answer.
    #[error(
        "the monitor at {} doesn't answer: {source}; if it has ended, the container's GPUs are \
         closed: make the container anew",
        socket.display()
    )]
    NoMonitor {
        /// The monitor's socket.
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Another seccomp listener watches this process already.
    #[error(
        "another seccomp listener watches this process already, and there can be one: start the \
         engine outside of it"
    )]
    OtherListener,
    /// The kernel refuses the filter.
    #[error("cannot put on a seccomp filter: {source}; run the engine as root with CAP_SYS_ADMIN")]
    Filter {
        #[source]
        source: io::Error,
    },
}

/// Installs the filter on this process, and gives the listener to the monitor at `socket`, which holds it from then
/// on.
///
/// Open descriptors of this process stay open.
///
/// # Errors
///
/// If no monitor answers, the monitor does not take the listener, or the kernel refuses the filter. A filter that is
/// installed stays: if no monitor took its listener, this process's driver calls fail from then on.
pub fn enter(socket: &Path) -> Result<(), EnterError> {
    let no_monitor = |source| EnterError::NoMonitor { socket: socket.to_owned(), source };
    // Connect before the filter is installed: a trapped call fails if no process holds the listener.
    let monitor = UnixStream::connect(socket).map_err(no_monitor)?;
    let listener = match install_filter() {
        Err(Errno::EBUSY) => return Err(EnterError::OtherListener),
        put => put.map_err(|errno| EnterError::Filter { source: errno.into() })?,
    };
    let sent = fd_passing::send(&monitor, LISTENER_SENT, Some(listener.as_fd()), Wait::Always);
    sent.map_err(|errno| no_monitor(errno.into()))?;
    wait_until_taken(&monitor).map_err(no_monitor)
}

/// Waits until the monitor holds the listener: the monitor may end before it reads the message.
fn wait_until_taken(mut monitor: &UnixStream) -> io::Result<()> {
    monitor.set_read_timeout(Some(TIMEOUT))?;
    let mut answer = [0; LISTENER_TAKEN.len()];
    monitor.read_exact(&mut answer).map_err(|error| match error.kind() {
        // A socket reports `WouldBlock` when its read timeout has expired.
        io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
        _ => error,
    })
}

/// Flags for a filter with a listener. `SPEC_ALLOW`: this filter turns on no speculation mitigation. A profile of the
/// container's own still turns on its mitigations.
const LISTENER: libc::c_ulong =
    libc::SECCOMP_FILTER_FLAG_NEW_LISTENER | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW;

/// [`LISTENER`], and an interrupted call waits until the monitor has answered (Linux 5.19 and later).
const KILLABLE_WAIT: libc::c_ulong = LISTENER | libc::SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;

/// What this kernel's seccomp can do. Asking installs no filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Abilities {
    /// A filter can have a listener.
    pub listener: bool,
    /// An interrupted call waits until the monitor has answered it.
    pub killable_wait: bool,
}

/// Asks the kernel which flags of a filter it knows.
#[must_use]
pub fn abilities() -> Abilities {
    // The kernel checks the flags first, and reads the filter afterwards: known flags and no filter give `EFAULT`
    // (kernel/seccomp.c, seccomp_set_mode_filter).
    let knows = |flags| set_filter(flags, None) == Err(Errno::EFAULT);
    Abilities { listener: knows(LISTENER), killable_wait: knows(KILLABLE_WAIT) }
}

/// Installs the filter, and returns its listener.
fn install_filter() -> Result<OwnedFd, Errno> {
    let mut program = program(Machine::HERE);
    let len = libc::c_ushort::try_from(program.len()).map_err(|_| Errno::EINVAL)?;
    let filter = sock_fprog { len, filter: program.as_mut_ptr() };
    let listener = match set_filter(KILLABLE_WAIT, Some(&filter)) {
        Err(Errno::EINVAL) => set_filter(LISTENER, Some(&filter)),
        set => set,
    }?;
    let listener = RawFd::try_from(listener).map_err(|_| Errno::EBADF)?;
    // SAFETY: the kernel has just made this descriptor for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(listener) })
}

/// Puts a filter without a listener on this thread, and on those that it starts. It turns on no speculation mitigation.
///
/// # Errors
///
/// If the kernel refuses the filter.
pub(crate) fn confine(mut program: Vec<sock_filter>) -> io::Result<()> {
    let len = libc::c_ushort::try_from(program.len()).map_err(|_| Errno::EINVAL)?;
    let filter = sock_fprog { len, filter: program.as_mut_ptr() };
    set_filter(libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW, Some(&filter))?;
    Ok(())
}

/// Calls seccomp(2) with these flags. Where `filter` is `None`, the kernel only checks the flags.
fn set_filter(flags: libc::c_ulong, filter: Option<&sock_fprog>) -> Result<libc::c_long, Errno> {
    let mode = libc::SECCOMP_SET_MODE_FILTER;
    let address = filter.map_or(ptr::null(), ptr::from_ref);
    // SAFETY: the kernel has copied `filter` and its instructions when the call returns, and answers with an error
    // where an address is not mapped.
    Errno::result(unsafe { libc::syscall(libc::SYS_seccomp, mode, flags, address) })
}
