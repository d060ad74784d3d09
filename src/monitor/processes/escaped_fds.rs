//! What is known of descriptors of the container's that others have. Who has them is looked for in
//! [`escape_search`](crate::monitor::audit::escape_search).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::ledger::Process;
use crate::monitor::journal::process_number::process_id;
use crate::monitor::lock::Lock;
use crate::monitor::processes::origin::Origin;
use crate::process::ProcessId;

/// How long the mounts of a container's first process may still be being made.
const MOVING_IN: Duration = Duration::from_secs(5);

const SUSPICION: Duration = Duration::from_secs(3);

/// Dead processes whose figures are asked for, and mounts that were judged.
const MOST_FORMER: usize = 4096;

/// What is known of the world outside.
#[derive(Debug, Default)]
pub(crate) struct EscapedFds {
    /// The mount of the last call's file.
    pub(crate) last: AtomicU64,
    pub(crate) origin: Lock<Origins>,
    pub(crate) state: Lock<Outside>,
}

#[derive(Debug, Default)]
pub(crate) struct Origins {
    pub(crate) origin: Origin,
    /// Mounts that were looked at, the container's or not.
    pub(crate) judged: BTreeSet<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct Outside {
    /// Pids of processes of the container's that are dead and buried.
    pub(crate) former: VecDeque<u32>,
    /// Bytes of processes that aren't the container's, or were, at the last look.
    pub(crate) figures: BTreeMap<u32, u64>,
    /// Bytes in use less those of all processes, but for a constant: at the last search.
    pub(crate) unexplained: Option<i128>,
    /// Looks in a row during which that changed.
    pub(crate) unsteady: u32,
    /// The container's first process, where it was met.
    pub(crate) home: Option<Home>,
    /// Bytes in use less those of the container's own processes, but for a constant: at the last
    /// look at strangers' figures, and when that was.
    pub(crate) of_others: Option<(i128, Instant)>,
    pub(crate) looked: Option<Instant>,
    pub(crate) searched: Option<Instant>,
    /// Until when there is something to explain.
    pub(crate) suspicion: Option<Instant>,
}

/// Where the container's first process lives.
#[derive(Debug)]
pub(crate) struct Home {
    /// Its `mountinfo`, which tells of changes.
    pub(crate) mounts: File,
    /// Since when its mounts are as they are, and when it was met last.
    pub(crate) since: Instant,
    pub(crate) met: Instant,
}

impl Home {
    /// Whether it need not be looked at again yet. A change is the beginning of more; where the kernel tells of
    /// none it is looked at every `meeting`: the process can have moved into other mounts.
    pub(crate) fn is_settled(&mut self, meeting: Duration, now: Instant) -> bool {
        if has_changed(&self.mounts) {
            self.since = now;
        }
        now - self.since >= MOVING_IN && now - self.met < meeting
    }
}

/// What is held against a stranger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Charge {
    /// The container's clients have what nobody asked us for.
    Theirs,
    /// It has memory itself, or could have: which it may, where it has a GPU of its own.
    Own,
}

impl EscapedFds {
    /// There is use that nobody asked for.
    pub(crate) fn suspect(&self) {
        self.state.lock().suspicion = Some(Instant::now() + SUSPICION);
    }

    /// A process of the container's is dead and forgotten.
    pub(crate) fn forget(&self, process: Process) {
        let pid = process_id(process).pid.cast_unsigned();
        let mut state = self.state.lock();
        if !state.former.contains(&pid) {
            if state.former.len() >= MOST_FORMER {
                state.former.pop_front();
            }
            state.former.push_back(pid);
        }
    }

    /// Whether there may be something to see though nobody of the container has called.
    pub(crate) fn is_watched(&self) -> bool {
        let state = self.state.lock();
        let seen = state.home.is_some() || !state.former.is_empty();
        drop(state);
        seen && !self.origin.lock().origin.is_unknown()
    }

    /// Whether any process of the container's has ever called.
    pub(crate) fn has_called(&self) -> bool {
        !self.state.lock().former.is_empty()
    }

    /// Whether nothing is known of where the container's files are opened.
    pub(crate) fn is_unknown(&self) -> bool {
        self.origin.lock().origin.is_unknown()
    }

    /// Pids of the container's that are nobody's now.
    pub(crate) fn former(&self) -> BTreeSet<u32> {
        let mut pids: BTreeSet<u32> = self.state.lock().former.iter().copied().collect();
        pids.retain(|pid| {
            let number = Some(pid.cast_signed()).filter(|pid| *pid > 0).and_then(Pid::from_raw);
            // That costs a third of a microsecond; who is there may be dead all the same.
            let is_gone = |pid| test_kill_process(pid) == Err(Errno::SRCH);
            number.is_some_and(|pid| is_gone(pid) || ProcessId::is_nobodys(pid.as_raw_pid()))
        });
        pids
    }

    /// Since when descriptors weren't searched for; forever where they never were.
    pub(crate) fn since_search(&self) -> Duration {
        self.state.lock().searched.map_or(Duration::MAX, |searched| searched.elapsed())
    }
}

/// Whether mounts came or went since that `mountinfo` was opened, or this was asked last (proc(5): the kernel marks
/// it with an error and a priority event). Where the kernel can't be asked, the answer is yes.
fn has_changed(mountinfo: &File) -> bool {
    let mut asked = [PollFd::new(mountinfo.as_fd(), PollFlags::POLLPRI)];
    let told = poll(&mut asked, PollTimeout::ZERO);
    let events = asked[0].revents();
    let changed = PollFlags::POLLPRI | PollFlags::POLLERR;
    told.is_err() || events.is_none_or(|events| events.intersects(changed))
}
