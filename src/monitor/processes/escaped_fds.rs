//! What is known of the container's descriptors that outside processes have. The search for those processes is in
//! [`escape_search`](crate::monitor::audit).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::ledger::Process;
use crate::monitor::lock::Lock;
use crate::monitor::processes::origin::Origin;
use crate::process::ProcessId;

/// How long after a change the mounts of a container's first process may still be changing.
const MOUNTING: Duration = Duration::from_secs(5);

/// How long descriptors are searched for after memory was found that nobody asked the monitor for.
const SUSPICION: Duration = Duration::from_secs(3);

/// The most dead processes that are remembered, to ask for their figures.
const MOST_REMEMBERED: usize = 4096;

/// What is known of outside processes, and of the container's files by which they are found.
#[derive(Debug, Default)]
pub(crate) struct EscapedFds {
    /// The mount on which the file of the last call was opened.
    pub(crate) last_mount: AtomicU64,
    pub(crate) origins: Lock<KnownOrigins>,
    pub(crate) state: Lock<EscapeState>,
}

#[derive(Debug, Default)]
pub(crate) struct KnownOrigins {
    pub(crate) origin: Origin,
    /// Mounts that were judged, whether they were the container's or not.
    pub(crate) judged: BTreeSet<u64>,
}

#[derive(Debug, Default)]
pub(crate) struct EscapeState {
    /// Pids of the container's processes that have ended and are forgotten in the books.
    pub(crate) dead_pids: VecDeque<u32>,
    /// Bytes of outside processes and of the container's dead ones, at the last look.
    pub(crate) figures: BTreeMap<u32, u64>,
    /// Bytes in use less those of all processes, up to a constant: the least since the last search that their growth
    /// caused. Smaller growth is not stored, so that it adds up.
    pub(crate) unexplained: Option<i128>,
    /// Looks in a row during which the bytes in use changed, so that they could not be compared.
    pub(crate) changed_looks: u32,
    /// The container's first process, where it was found.
    pub(crate) first_process: Option<FirstProcess>,
    /// Bytes in use less those of the container's processes, up to a constant: at the last full look, and its time.
    pub(crate) other_bytes: Option<(i128, Instant)>,
    pub(crate) looked: Option<Instant>,
    pub(crate) searched: Option<Instant>,
    /// Until when descriptors are searched for, because memory in use is not explained.
    pub(crate) suspicion: Option<Instant>,
}

/// The container's first process, as it was found.
#[derive(Debug)]
pub(crate) struct FirstProcess {
    /// The process's `mountinfo`, by which the kernel tells of changes.
    pub(crate) mounts: File,
    /// Since when the process's mounts are unchanged, and when they were last looked at.
    pub(crate) since: Instant,
    pub(crate) looked: Instant,
}

impl FirstProcess {
    /// Asks the kernel for changes of the mounts. `true` where the process need not be looked at again yet: a change
    /// is followed by more, and after `interval` the process can have moved into other mounts.
    pub(crate) fn poll_is_stable(&mut self, interval: Duration, now: Instant) -> bool {
        if take_mount_change(&self.mounts) {
            self.since = now;
        }
        now - self.since >= MOUNTING && now - self.looked < interval
    }
}

/// Why an outside process with a descriptor of the container's is to be ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// The container's clients have memory that nobody asked the monitor for.
    ContainerMemory,
    /// The process has memory itself, or could have. It may, where it has a GPU of its own.
    OwnMemory,
}

impl EscapedFds {
    /// Notes that memory is in use that nobody asked the monitor for.
    pub(crate) fn suspect(&self) {
        self.state.lock().suspicion = Some(Instant::now() + SUSPICION);
    }

    /// Notes that a process of the container's has ended and is forgotten in the books.
    pub(crate) fn forget(&self, process: Process) {
        let pid = process.pid();
        let mut state = self.state.lock();
        if !state.dead_pids.contains(&pid) {
            if state.dead_pids.len() >= MOST_REMEMBERED {
                state.dead_pids.pop_front();
            }
            state.dead_pids.push_back(pid);
        }
    }

    /// Whether outside processes may have the container's descriptors though the books have none of its processes.
    pub(crate) fn is_watched(&self) -> bool {
        let state = self.state.lock();
        let seen = state.first_process.is_some() || !state.dead_pids.is_empty();
        drop(state);
        seen && !self.origins.lock().origin.is_unknown()
    }

    /// Whether a process that called has ended and is forgotten in the books.
    pub(crate) fn has_dead_caller(&self) -> bool {
        !self.state.lock().dead_pids.is_empty()
    }

    /// Whether nothing is known of the mounts on which the container's files are opened.
    pub(crate) fn is_unknown(&self) -> bool {
        self.origins.lock().origin.is_unknown()
    }

    /// Pids of the container's dead processes that no process has now.
    pub(crate) fn unused_dead_pids(&self) -> BTreeSet<u32> {
        let mut pids: BTreeSet<u32> = self.state.lock().dead_pids.iter().copied().collect();
        pids.retain(|pid| {
            let number = Some(pid.cast_signed()).filter(|pid| *pid > 0).and_then(Pid::from_raw);
            // The first check costs a third of a microsecond. A process that it finds may be dead all the same.
            let is_gone = |pid| test_kill_process(pid) == Err(Errno::SRCH);
            number.is_some_and(|pid| is_gone(pid) || ProcessId::is_nobodys(pid.as_raw_pid()))
        });
        pids
    }

    /// How long ago descriptors were searched for; [`Duration::MAX`] where they never were.
    pub(crate) fn since_search(&self) -> Duration {
        self.state.lock().searched.map_or(Duration::MAX, |searched| searched.elapsed())
    }
}

/// Takes the kernel's note that mounts came or went since `mountinfo` was opened or last asked (proc(5): the kernel
/// marks a change with an error and a priority event). `true` where the kernel can't be asked.
fn take_mount_change(mountinfo: &File) -> bool {
    let mut asked = [PollFd::new(mountinfo.as_fd(), PollFlags::POLLPRI)];
    let told = poll(&mut asked, PollTimeout::ZERO);
    let events = asked[0].revents();
    let changed = PollFlags::POLLPRI | PollFlags::POLLERR;
    told.is_err() || events.is_none_or(|events| events.intersects(changed))
}
