//! What the auditor waits for: a bell, and the deaths of the container's processes.
//!
//! Until a process is watched, the auditor waits for the bell alone, which takes no descriptor.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::Duration;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::ledger::Process;
use crate::monitor::bell::Bell;

/// The bell's number among the events of the epoll. No process has this number.
const BELL: u64 = u64::MAX;

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    /// The time limit passed.
    Late,
    /// The bell rang.
    Rung,
    /// A watched process died.
    Death,
}

/// The auditor's bell, and the epoll that tells of deaths once a process is watched.
#[derive(Debug, Default)]
pub(crate) struct AuditWait {
    bell: Bell,
    watch: OnceLock<Watch>,
}

#[derive(Debug)]
struct Watch {
    epoll: Epoll,
    /// Rings in place of the bell for an auditor that waits in the epoll.
    rung: EventFd,
}

/// The processes that are watched, each with its pidfd.
pub(crate) type Watched = BTreeMap<Process, OwnedFd>;

impl Watch {
    fn new() -> nix::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let rung = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        epoll.add(&rung, EpollEvent::new(EpollFlags::EPOLLIN, BELL))?;
        Ok(Watch { epoll, rung })
    }
}

impl AuditWait {
    /// Wakes the auditor. Where the auditor doesn't wait, its next wait ends at once.
    pub(crate) fn ring(&self) {
        // The bell rings before the epoll is looked for: a thread that makes the epoll looks at the bell afterwards.
        self.bell.ring();
        if let Some(watch) = self.watch.get() {
            // Where the event's counter is full, the event is readable anyway.
            let _ = watch.rung.write(1);
        }
    }

    /// Watches a process. `watched` keeps its pidfd; to take the pidfd out of `watched` ends the watch. Fails where no
    /// epoll can be made.
    pub(crate) fn watch(
        &self,
        watched: &mut Watched,
        process: Process,
        pidfd: OwnedFd,
    ) -> nix::Result<()> {
        let watch = match self.watch.get() {
            Some(watch) => watch,
            None => {
                let new = Watch::new()?;
                let watch = self.watch.get_or_init(|| new);
                if self.bell.wait(Some(Duration::ZERO)) {
                    let _ = watch.rung.write(1);
                }
                watch
            }
        };
        let event = EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLONESHOT, process.0);
        if watch.epoll.add(&pidfd, event).is_ok() {
            watched.insert(process, pidfd);
        }
        Ok(())
    }

    /// Waits for a ring or a death, for `most` at most.
    pub(crate) fn wait(&self, most: Option<Duration>) -> WaitEnd {
        let Some(watch) = self.watch.get() else {
            return if self.bell.wait(most) { WaitEnd::Rung } else { WaitEnd::Late };
        };
        let most = most.map_or(EpollTimeout::NONE, |most| {
            // An epoll counts whole milliseconds: one more, so that `most` has passed.
            EpollTimeout::try_from(most + Duration::from_millis(1)).unwrap_or(EpollTimeout::ZERO)
        });
        let mut events = [EpollEvent::empty(); 16];
        let woken = watch.epoll.wait(&mut events, most).unwrap_or(0);
        let _ = watch.rung.read();
        let mut events = events.iter().take(woken);
        match (woken, events.any(|event| event.data() != BELL)) {
            (0, _) => WaitEnd::Late,
            (_, false) => WaitEnd::Rung,
            (_, true) => WaitEnd::Death,
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
    fn a_ring_and_a_death_end_a_wait_whether_or_not_a_process_is_watched() {
        let audit_wait = AuditWait::default();
        assert_eq!(audit_wait.wait(Some(Duration::ZERO)), WaitEnd::Late);
        audit_wait.ring();
        assert_eq!(audit_wait.wait(None), WaitEnd::Rung);
        // The bell rings before the first process is watched, and ends the wait after that.
        audit_wait.ring();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id().cast_signed();
        let process = Process::from(ProcessId::of(pid).unwrap());
        let mut watched = Watched::new();
        audit_wait.watch(&mut watched, process, pidfd(pid).unwrap()).unwrap();
        assert_eq!(audit_wait.wait(None), WaitEnd::Rung);
        assert_eq!(audit_wait.wait(Some(Duration::ZERO)), WaitEnd::Late);
        audit_wait.ring();
        assert_eq!(audit_wait.wait(None), WaitEnd::Rung);
        child.kill().unwrap();
        assert_eq!(audit_wait.wait(None), WaitEnd::Death);
        child.wait().unwrap();
        assert_eq!(audit_wait.wait(Some(Duration::ZERO)), WaitEnd::Late, "each is told once");
        assert!(watched.contains_key(&process));
    }
}
