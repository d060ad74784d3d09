//! Descriptors that a process has from the one that started it, by number.
#![allow(unsafe_code, reason = "a number becomes a descriptor that is owned")]

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// The descriptors 3, 4 and 5 of a program that was started with just these: a keeper's are
/// two sockets and where it is told its settings, a worker's the keeper's socket, the settings and the
/// journal. An exec closes them.
///
/// To be called once, first of all, by the programs that are started so.
///
/// # Errors
///
/// Where one of them isn't open.
pub(crate) fn take_descriptors() -> Result<[OwnedFd; 3], nix::errno::Errno> {
    for number in 3..6 {
        close_at_exec(number)?;
    }
    // SAFETY: the three are open, seen above, and nothing in this process has opened or
    // taken them: it has just begun, and whoever started it gave them to it.
    Ok([3, 4, 5].map(|number: RawFd| unsafe { OwnedFd::from_raw_fd(number) }))
}

fn close_at_exec(number: RawFd) -> Result<(), nix::errno::Errno> {
    // SAFETY: F_SETFD sets a flag, and says where there is no such descriptor.
    match unsafe { nix::libc::fcntl(number, nix::libc::F_SETFD, nix::libc::FD_CLOEXEC) } {
        -1 => Err(nix::errno::Errno::last()),
        _ => Ok(()),
    }
}

/// Closes all but those and standard error. No monitor reads its standard input or writes to its standard
/// output: other descriptors take their numbers, and there is one monitor for each container.
pub(crate) fn close_other_descriptors() {
    for (first, last) in [(0, 1), (6, nix::libc::c_uint::MAX)] {
        // SAFETY: called first of all, as above: nothing in this process owns one of them.
        unsafe { nix::libc::close_range(first, last, 0) };
    }
}
