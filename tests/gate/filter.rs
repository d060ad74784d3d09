//! Puts a filter on whose flags a test chooses.
#![allow(unsafe_code, reason = "the kernel's seccomp interface has no safe one in our crates")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::libc::{
    self, SECCOMP_FILTER_FLAG_NEW_LISTENER, SECCOMP_SET_MODE_FILTER, sock_filter, sock_fprog,
};

/// Puts this process under the filter, and returns the listener.
pub(crate) fn install(program: &[sock_filter], wait_killable: bool) -> io::Result<OwnedFd> {
    const WAIT_KILLABLE_RECV: libc::c_ulong = 1 << 5;
    // SAFETY: takes numbers only.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let program = sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        filter: program.as_ptr().cast_mut(),
    };
    let killable = if wait_killable { WAIT_KILLABLE_RECV } else { 0 };
    // SAFETY: `program` names instructions that outlive the call; the kernel checks them.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::c_ulong::from(SECCOMP_SET_MODE_FILTER),
            SECCOMP_FILTER_FLAG_NEW_LISTENER | killable,
            &raw const program,
        )
    };
    if listener < 0 {
        return Err(io::Error::last_os_error());
    }
    let listener = RawFd::try_from(listener).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made it.
    Ok(unsafe { OwnedFd::from_raw_fd(listener) })
}
