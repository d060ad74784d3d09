//! What the audit's thread waits for: to be woken, and the exits of the container's processes.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::ledger::Process;

/// The eventfd's number among the events of the epoll. No process has this number.
const WAKE: u64 = u64::MAX;

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    /// The time limit passed.
    Timeout,
    /// Another thread woke this one.
    Woken,
    /// A watched process exited.
    ProcessExited,
}

/// An epoll with the pidfds of the watched processes, and with an eventfd by which other threads wake its own.
#[derive(Debug)]
pub(crate) struct AuditWait {
    epoll: Epoll,
    wake: EventFd,
}

/// The processes that are watched, each with its pidfd.
pub(crate) type Watched = BTreeMap<Process, OwnedFd>;

impl AuditWait {
    /// Fails if the process can have no further descriptors.
    pub(crate) fn new() -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let wake = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        epoll.add(&wake, EpollEvent::new(EpollFlags::EPOLLIN, WAKE))?;
        Ok(AuditWait { epoll, wake })
    }

    /// Wakes the audit's thread. If it doesn't wait, its next wait ends at once.
    pub(crate) fn wake(&self) {
        // If the counter is full, the eventfd is readable anyway.
        let _ = self.wake.write(1);
    }

    /// Watches a process. `watched` keeps its pidfd; to take the pidfd out of `watched` ends the watch.
    pub(crate) fn watch(&self, watched: &mut Watched, process: Process, pidfd: OwnedFd) {
        let event = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT, process.0);
        if self.epoll.add(&pidfd, event).is_ok() {
            watched.insert(process, pidfd);
        }
    }

    /// Waits to be woken or for an exit, for `timeout` at most.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> WaitEnd {
        let timeout = timeout.map_or(EpollTimeout::NONE, |timeout| {
            // An epoll counts whole milliseconds: one more, so that `timeout` has passed.
            EpollTimeout::try_from(timeout + Duration::from_millis(1)).unwrap_or(EpollTimeout::ZERO)
        });
        let mut events = [EpollEvent::empty(); 16];
        let count = self.epoll.wait(&mut events, timeout).unwrap_or(0);
        let _ = self.wake.read();
        let mut events = events.iter().take(count);
        match (count, events.any(|event| event.data() != WAKE)) {
            (0, _) => WaitEnd::Timeout,
            (_, false) => WaitEnd::Woken,
            (_, true) => WaitEnd::ProcessExited,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::process::ProcessId;
    use crate::process::pidfd;

    #[test]
    fn a_wake_and_an_exit_end_a_wait() {
        let audit_wait = AuditWait::new().unwrap();
        assert_eq!(audit_wait.wait(Some(Duration::ZERO)), WaitEnd::Timeout);
        audit_wait.wake();
        assert_eq!(audit_wait.wait(None), WaitEnd::Woken);
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id().cast_signed();
        let process = Process::from(ProcessId::of(pid).unwrap());
        let mut watched = Watched::new();
        audit_wait.watch(&mut watched, process, pidfd(pid).unwrap());
        assert_eq!(audit_wait.wait(Some(Duration::ZERO)), WaitEnd::Timeout);
        audit_wait.wake();
        assert_eq!(audit_wait.wait(None), WaitEnd::Woken);
        child.kill().unwrap();
        assert_eq!(audit_wait.wait(None), WaitEnd::ProcessExited);
        child.wait().unwrap();
        assert_eq!(
            audit_wait.wait(Some(Duration::ZERO)),
            WaitEnd::Timeout,
            "each is reported once"
        );
        assert!(watched.contains_key(&process));
    }
}
