//! Descriptors that a process inherits from the process that started it, by number.
#![allow(unsafe_code, reason = "a number becomes a descriptor that is owned")]

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Takes the descriptors 3, 4 and 5, with which the keeper and the worker are started. A keeper gets its two
/// listening sockets and the socket over which its settings come; a worker gets the keeper's socket, the settings and
/// the journal. An exec closes these descriptors.
///
/// A program may call this once, before anything else. Fails where one of the three numbers is not open.
pub(crate) fn take_descriptors() -> Result<[OwnedFd; 3], nix::errno::Errno> {
    for number in 3..6 {
        close_at_exec(number)?;
    }
    // SAFETY: the three numbers are open (checked above), and nothing in this process has opened or taken them: the
    // process has just begun, and its parent gave it the three.
    Ok([3, 4, 5].map(|number: RawFd| unsafe { OwnedFd::from_raw_fd(number) }))
}

fn close_at_exec(number: RawFd) -> Result<(), nix::errno::Errno> {
    // SAFETY: F_SETFD sets a flag, and fails where the number is not open.
    match unsafe { nix::libc::fcntl(number, nix::libc::F_SETFD, nix::libc::FD_CLOEXEC) } {
        -1 => Err(nix::errno::Errno::last()),
        _ => Ok(()),
    }
}

/// Closes every descriptor but 3, 4, 5 and standard error. No monitor reads standard input or writes standard output,
/// so other descriptors take the numbers 0 and 1: a host has one monitor for each container.
pub(crate) fn close_other_descriptors() {
    for (first, last) in [(0, 1), (6, nix::libc::c_uint::MAX)] {
        // SAFETY: called before anything else in the process, so nothing in this process owns these descriptors.
        unsafe { nix::libc::close_range(first, last, 0) };
    }
}
