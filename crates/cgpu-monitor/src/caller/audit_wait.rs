//! What the audit thread waits for: to be woken, and the exits of the container's processes.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::sync::ChangeFlag;
use cgpu_core::ledger::Process;

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    Timeout,
    Woken,
    ProcessExited,
}

/// By what other threads wake the audit thread.
#[derive(Debug)]
pub(crate) struct AuditWait {
    wake: ChangeFlag,
}

/// The processes that are watched, each with its pidfd; without one if its exit was reported.
pub(crate) type Watched = BTreeMap<Process, Option<OwnedFd>>;

impl AuditWait {
    /// Fails if the process can have no further descriptors.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(AuditWait { wake: ChangeFlag::new()? })
    }

    /// Wakes the audit thread. If it doesn't wait, its next wait ends at once.
    pub(crate) fn wake(&self) {
        self.wake.set();
    }

    /// Waits to be woken or for the exit of one of `watched`, for `timeout` at most. Each exit is reported once.
    pub(crate) fn wait(&self, watched: &mut Watched, timeout: Option<Duration>) -> WaitEnd {
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let pidfds = watched.values().flatten().map(AsFd::as_fd);
        let asked = std::iter::once(self.wake.descriptor()).chain(pidfds);
        let mut asked: Vec<_> =
            asked.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let count = poll(&mut asked, timeout.as_ref()).unwrap_or(0);
        let exited: Vec<bool> = asked.iter().skip(1).map(|of| !of.revents().is_empty()).collect();
        let is_woken = self.wake.take();
        let pidfds = watched.values_mut().filter(|pidfd| pidfd.is_some());
        for (pidfd, _) in pidfds.zip(&exited).filter(|(_, exited)| **exited) {
            *pidfd = None;
        }
        match (exited.contains(&true), is_woken || count > 0) {
            (true, _) => WaitEnd::ProcessExited,
            (false, true) => WaitEnd::Woken,
            (false, false) => WaitEnd::Timeout,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use cgpu_host::process::ProcessId;
    use cgpu_host::process::pidfd;

    #[test]
    fn a_wake_and_an_exit_end_a_wait() {
        let audit_wait = AuditWait::new().unwrap();
        let mut watched = Watched::new();
        assert_eq!(audit_wait.wait(&mut watched, Some(Duration::ZERO)), WaitEnd::Timeout);
        audit_wait.wake();
        assert_eq!(audit_wait.wait(&mut watched, None), WaitEnd::Woken);
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id().cast_signed();
        let process = Process::from(ProcessId::of(pid).unwrap());
        watched.insert(process, Some(pidfd(pid).unwrap()));
        assert_eq!(audit_wait.wait(&mut watched, Some(Duration::ZERO)), WaitEnd::Timeout);
        audit_wait.wake();
        assert_eq!(audit_wait.wait(&mut watched, None), WaitEnd::Woken);
        child.kill().unwrap();
        assert_eq!(audit_wait.wait(&mut watched, None), WaitEnd::ProcessExited);
        child.wait().unwrap();
        assert_eq!(
            audit_wait.wait(&mut watched, Some(Duration::ZERO)),
            WaitEnd::Timeout,
            "each is reported once"
        );
        assert!(watched.contains_key(&process));
    }
}
