//! A seccomp listener: receives notifications and replies to them.
#![allow(unsafe_code, reason = "seccomp's ioctls have no safe interface in our crates")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::libc::{
    self, SECCOMP_IOCTL_NOTIF_ID_VALID, SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND,
    SECCOMP_IOCTL_NOTIF_SET_FLAGS, seccomp_notif, seccomp_notif_resp, seccomp_notif_sizes,
};

#[cfg(test)]
use {crate::monitor::caller::test_callers::TestCallers, std::sync::Arc};

/// `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP`: the caller and the listening thread take turns on one processor.
const SYNC_WAKE_UP: u64 = 1;

/// `SECCOMP_USER_NOTIF_FLAG_CONTINUE`.
const CONTINUE: u32 = 1;

/// A listener, with its number.
#[derive(Debug)]
pub(crate) struct Listener {
    number: u64,
    descriptor: OwnedFd,
    /// The callers that wait, in a test without a kernel.
    #[cfg(test)]
    callers: Option<Arc<TestCallers>>,
}

/// The answer to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The kernel makes the call as the caller asked for it.
    Continue,
    /// The call fails with this error.
    Errno(i32),
    /// The monitor has made the call.
    Done,
}

impl Reply {
    /// The error and the flags of a `seccomp_notif_resp`.
    pub(crate) fn parts(self) -> (i32, u32) {
        match self {
            Self::Continue => (0, CONTINUE),
            Self::Errno(errno) => (-errno, 0),
            Self::Done => (0, 0),
        }
    }
}

impl Reply {
    /// The reply with this error and these flags.
    pub(crate) fn of(parts: (i32, u32)) -> Self {
        match parts {
            (0, CONTINUE) => Self::Continue,
            (0, _) => Self::Done,
            (error, _) => Self::Errno(-error),
        }
    }
}

impl From<Errno> for Reply {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno as i32)
    }
}

impl Listener {
    pub(crate) fn new(number: u64, descriptor: OwnedFd) -> Self {
        // SAFETY: takes numbers only. Kernels before 6.6 refuse the flag; their calls are slower.
        unsafe { libc::ioctl(descriptor.as_raw_fd(), SECCOMP_IOCTL_NOTIF_SET_FLAGS, SYNC_WAKE_UP) };
        Listener {
            number,
            descriptor,
            #[cfg(test)]
            callers: None,
        }
    }

    /// A listener of a test, which says which callers wait.
    #[cfg(test)]
    pub(crate) fn of_model(number: u64, descriptor: OwnedFd, callers: Arc<TestCallers>) -> Self {
        Listener { number, descriptor, callers: Some(callers) }
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Receives a notification. `None` where its caller has gone, or a signal interrupted the wait.
    pub(crate) fn receive(&self) -> Option<seccomp_notif> {
        // SAFETY: all zeroes are a notification, and the kernel demands that it is zeroed.
        let mut notice: seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes a notification, whose size [`check_sizes`] compared with the kernel's.
        let received = unsafe {
            libc::ioctl(self.descriptor.as_raw_fd(), SECCOMP_IOCTL_NOTIF_RECV, &raw mut notice)
        };
        (received == 0).then_some(notice)
    }

    /// Whether the caller of notification `id` still waits.
    pub(crate) fn is_valid(&self, id: u64) -> bool {
        #[cfg(test)]
        if let Some(callers) = &self.callers {
            return callers.is_waiting(id);
        }
        // SAFETY: reads the eight bytes of `id`.
        let valid = unsafe {
            libc::ioctl(self.descriptor.as_raw_fd(), SECCOMP_IOCTL_NOTIF_ID_VALID, &raw const id)
        };
        valid == 0
    }

    /// Answers notification `id`. `true` where its caller still waited.
    pub(crate) fn send(&self, id: u64, (error, flags): (i32, u32)) -> bool {
        #[cfg(test)]
        if let Some(callers) = &self.callers {
            return callers.reply(id, (error, flags));
        }
        let mut response = seccomp_notif_resp { id, val: 0, error, flags };
        // SAFETY: reads a `seccomp_notif_resp`, whose size [`check_sizes`] compared.
        let sent = unsafe {
            libc::ioctl(self.descriptor.as_raw_fd(), SECCOMP_IOCTL_NOTIF_SEND, &raw mut response)
        };
        sent == 0
    }
}

/// Compares the sizes of the kernel's seccomp structs with those of this program.
///
/// # Errors
///
/// Where sizes differ, or the kernel has no user notification.
pub fn check_sizes() -> io::Result<()> {
    let mut sizes =
        seccomp_notif_sizes { seccomp_notif: 0, seccomp_notif_resp: 0, seccomp_data: 0 };
    // SAFETY: writes a `seccomp_notif_sizes`.
    let asked = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_NOTIF_SIZES, 0, &raw mut sizes)
    };
    if asked != 0 {
        return Err(io::Error::last_os_error());
    }
    let known = (size_of::<seccomp_notif>(), size_of::<seccomp_notif_resp>());
    if (usize::from(sizes.seccomp_notif), usize::from(sizes.seccomp_notif_resp)) != known {
        return Err(io::Error::from(Errno::EOVERFLOW));
    }
    Ok(())
}
