//! Descriptors that a process inherits from the program that executed it, by number.
#![allow(unsafe_code, reason = "a number becomes a descriptor that is owned")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::libc;

/// Standard output, which is `/dev/null`: here a monitor puts the program that an update hands to it.
pub(crate) const PROGRAM: RawFd = 1;

/// Takes the descriptors 3, 4 and 5, with which a monitor is started: its two listening sockets, and the socket over
/// which its settings come. An exec closes them.
///
/// A program may call this once, before anything else. Fails where one of the three numbers is not open.
pub(crate) fn take_descriptors() -> io::Result<[OwnedFd; 3]> {
    // SAFETY: nothing in this process has opened or taken them: the process has just begun.
    let take = |number| unsafe { take(number) };
    Ok([take(3)?, take(4)?, take(5)?])
}

/// Takes a descriptor that was left open for this program. An exec closes it from now on. Fails where the number is not
/// open.
///
/// # Safety
///
/// Nothing in this process owns the descriptor.
pub(crate) unsafe fn take(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_SETFD sets a flag, and fails where the number is not open.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it is open, and the caller says that no other value owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Has the next exec close a descriptor, or leave it open.
pub(crate) fn set_close_on_exec(number: RawFd, closes: bool) -> io::Result<()> {
    let flags = if closes { libc::FD_CLOEXEC } else { 0 };
    // SAFETY: F_SETFD sets a flag, and fails where the number is not open.
    match unsafe { libc::fcntl(number, libc::F_SETFD, flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Puts a file in the place of the descriptor [`PROGRAM`]. An exec closes it.
pub(crate) fn put_program(file: &impl std::os::fd::AsRawFd) -> io::Result<()> {
    // SAFETY: nothing in a monitor owns standard output.
    match unsafe { libc::dup3(file.as_raw_fd(), PROGRAM, libc::O_CLOEXEC) } {
        PROGRAM => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Puts `/dev/null` in the place of the descriptor [`PROGRAM`], which an execution has closed: else another file would
/// get its number. A program may call this before it opens anything.
pub(crate) fn occupy_program() -> io::Result<()> {
    let null = std::fs::File::open("/dev/null")?;
    match std::os::fd::AsRawFd::as_raw_fd(&null) {
        PROGRAM => std::mem::forget(null),
        _ => put_program(&null)?,
    }
    Ok(())
}

/// Closes every descriptor but 3, 4, 5, standard output and standard error. No monitor reads standard input, so another
/// descriptor takes its number: a host has one monitor for each container.
pub(crate) fn close_other_descriptors() {
    for (first, last) in [(0, 0), (6, libc::c_uint::MAX)] {
        // SAFETY: called before anything else in the process, so nothing in this process owns these descriptors.
        unsafe { libc::close_range(first, last, 0) };
    }
}
