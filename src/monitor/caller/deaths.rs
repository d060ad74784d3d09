//! What the auditor waits for: a bell, and the deaths of the container's processes.
//!
//! Until there is a process to be watched it waits for the bell alone, which takes no descriptor.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::Duration;

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::ledger::Process;
use crate::monitor::bell::Bell;

/// The bell's place among what is waited for; no process has it.
const BELL: u64 = u64::MAX;

/// What ended a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    /// It took as long as it may.
    Late,
    /// Somebody rang.
    Rung,
    /// A process died.
    Death,
}

/// Who rings, and who died.
#[derive(Debug, Default)]
pub(crate) struct Deaths {
    bell: Bell,
    watch: OnceLock<Watch>,
}

#[derive(Debug)]
struct Watch {
    epoll: Epoll,
    /// The bell, for who waits in the epoll.
    rung: EventFd,
}

/// Processes that are watched, each by its pidfd.
pub(crate) type Watched = BTreeMap<Process, OwnedFd>;

impl Watch {
    fn new() -> nix::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let rung = EventFd::from_flags(EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        epoll.add(&rung, EpollEvent::new(EpollFlags::EPOLLIN, BELL))?;
        Ok(Watch { epoll, rung })
    }
}

impl Deaths {
    /// Wakes who waits, or keeps it from its next wait.
    pub(crate) fn ring(&self) {
        // Before it's seen whether there is an epoll: who makes one looks at the bell after that.
        self.bell.ring();
        if let Some(watch) = self.watch.get() {
            // At its largest number it rings anyway.
            let _ = watch.rung.write(1);
        }
    }

    /// Watches a process, whose pidfd is kept in `watched` and taken out to end that.
    ///
    /// # Errors
    ///
    /// Where none can be watched.
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

    /// Waits for a ring or a death, at most so long.
    pub(crate) fn wait(&self, most: Option<Duration>) -> WaitEnd {
        let Some(watch) = self.watch.get() else {
            return if self.bell.wait(most) { WaitEnd::Rung } else { WaitEnd::Late };
        };
        let most = most.map_or(EpollTimeout::NONE, |most| {
            // Milliseconds, of which the last one is to be over.
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
    use crate::monitor::caller::target::pidfd_open;
    use crate::monitor::journal::process_number::number;
    use crate::process::ProcessId;

    #[test]
    fn a_ring_and_a_death_end_a_wait_whether_or_not_a_process_is_watched() {
        let deaths = Deaths::default();
        assert_eq!(deaths.wait(Some(Duration::ZERO)), WaitEnd::Late);
        deaths.ring();
        assert_eq!(deaths.wait(None), WaitEnd::Rung);
        // Rung before the first process is watched, and heard after that.
        deaths.ring();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id().cast_signed();
        let process = number(ProcessId::of(pid).unwrap());
        let mut watched = Watched::new();
        deaths.watch(&mut watched, process, pidfd_open(pid, 0).unwrap()).unwrap();
        assert_eq!(deaths.wait(None), WaitEnd::Rung);
        assert_eq!(deaths.wait(Some(Duration::ZERO)), WaitEnd::Late);
        deaths.ring();
        assert_eq!(deaths.wait(None), WaitEnd::Rung);
        child.kill().unwrap();
        assert_eq!(deaths.wait(None), WaitEnd::Death);
        child.wait().unwrap();
        assert_eq!(deaths.wait(Some(Duration::ZERO)), WaitEnd::Late, "each is told once");
        assert!(watched.contains_key(&process));
    }
}
