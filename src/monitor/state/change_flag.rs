//! A flag that something has changed, with a descriptor by which a thread waits for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::eventfd::{EfdFlags, EventFd};

/// A flag that any thread sets and one thread takes.
#[derive(Debug)]
pub(crate) struct ChangeFlag {
    is_set: AtomicBool,
    /// Readable after the flag was set.
    event: EventFd,
}

impl ChangeFlag {
    /// Fails if the process can have no further descriptors.
    pub(crate) fn new() -> io::Result<Self> {
        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        Ok(ChangeFlag { is_set: AtomicBool::new(false), event })
    }

    /// Sets the flag. Only the first of several threads pays a system call.
    pub(crate) fn set(&self) {
        if !self.is_set.swap(true, Ordering::Release) {
            // If the counter is full, the descriptor is readable anyway.
            let _ = self.event.write(1);
        }
    }

    /// Takes the flag. What was changed before the flag was set is visible to the caller afterwards.
    pub(crate) fn take(&self) -> bool {
        let _ = self.event.read();
        self.is_set.swap(false, Ordering::AcqRel)
    }

    /// Readable once the flag is set. It may be readable once more afterwards.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    #[test]
    fn a_flag_is_readable_until_it_is_taken() {
        let flag = ChangeFlag::new().unwrap();
        let is_readable = || {
            let mut asked = [PollFd::new(flag.descriptor(), PollFlags::POLLIN)];
            poll(&mut asked, PollTimeout::ZERO).unwrap() == 1
        };
        assert!(!is_readable() && !flag.take());
        flag.set();
        flag.set();
        assert!(is_readable() && flag.take());
        assert!(!is_readable() && !flag.take());
    }
}
