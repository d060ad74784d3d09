//! Finds outside processes that have the container's descriptors, and ends them.
//!
//! A descriptor can be sent to a process that no filter watches. Memory that is taken through it shows in the
//! driver's figures alone: for the process that made the client, which may be dead by then, or for an outside process
//! that made a client of its own. So the figures of these processes are asked for, too. A process that isn't the
//! container's and has a file which was opened in the container
//! ([`Origins`](crate::monitor::processes)) is then ended.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Signal, pidfd_send_signal};

use crate::events::Event;
use crate::monitor::caller::threads_by_fd_table;
use crate::monitor::driver::DriverAccess;
use crate::monitor::lock::Lock;
use crate::monitor::log::described;
use crate::monitor::processes::{Processes, all_pids, mounts};
use crate::monitor::state::ContainerState;
use crate::process::{pidfd, told};

/// The shortest time between two looks at whether outside processes have taken memory.
const LOOK: Duration = Duration::from_millis(200);

/// The time between two searches for descriptors while memory in use isn't explained; the first search comes no later
/// than this time after such memory was found.
const SEARCH: Duration = Duration::from_millis(200);

/// How often descriptors are searched while memory of dead processes stays in use.
const SLOW_SEARCH: Duration = Duration::from_secs(2);

/// A search begins when so many more bytes are in use that no known process has: the client of a dead outside process
/// may have them, say. The driver's own needs, contexts for example, are less, or are searched for in vain.
const UNEXPLAINED_BYTES: i128 = 16 << 20;

/// Looks in a row that may be dropped because the figures changed meanwhile.
const MOST_CHANGED_LOOKS: u32 = 1;

/// How long descriptors are searched for after memory was found that nobody asked the monitor for.
const SUSPICION: Duration = Duration::from_secs(3);

/// The driver's files that an outside process has open.
#[derive(Debug, Default, PartialEq, Eq)]
struct Descriptors {
    /// A file that was opened in the container.
    of_container: bool,
    /// A file that was opened on a mount of the process's own.
    of_own: bool,
}

/// Why an outside process with a descriptor of the container's is to be ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// The container's clients have memory that nobody asked the monitor for.
    ContainerMemory,
    /// The process has memory itself, or could have. It may, where it has a GPU of its own.
    OwnMemory,
}

/// Searches for outside processes that have the container's descriptors.
#[derive(Debug)]
pub(crate) struct EscapeSearch {
    state: Arc<ContainerState>,
    driver: Arc<DriverAccess>,
    processes: Arc<Processes>,
    found: Lock<Found>,
}

/// What the looks at outside processes found.
#[derive(Debug, Default)]
struct Found {
    /// Bytes of outside processes and of the container's dead ones, at the last look.
    figures: BTreeMap<u32, u64>,
    /// Bytes in use less those of all processes, up to a constant: the least since the last search that their growth
    /// caused. Smaller growth is not stored, so that it adds up.
    unexplained: Option<i128>,
    /// Looks in a row during which the bytes in use changed, so that they could not be compared.
    changed_looks: u32,
    /// Bytes in use less those of the container's processes, up to a constant: at the last full look, and its time.
    other_bytes: Option<(i128, Instant)>,
    looked: Option<Instant>,
    searched: Option<Instant>,
    /// Until when descriptors are searched for, because memory in use is not explained.
    suspicion: Option<Instant>,
}

impl EscapeSearch {
    pub(crate) fn new(driver: Arc<DriverAccess>, processes: Arc<Processes>) -> Self {
        let state = Arc::clone(&processes.state);
        EscapeSearch { state, driver, processes, found: Lock::default() }
    }

    /// Notes that memory is in use that nobody asked the monitor for.
    pub(crate) fn suspect(&self) {
        self.found.lock().suspicion = Some(Instant::now() + SUSPICION);
    }

    /// How long ago descriptors were searched for; [`Duration::MAX`] where they never were.
    pub(crate) fn since_search(&self) -> Duration {
        self.found.lock().searched.map_or(Duration::MAX, |searched| searched.elapsed())
    }

    /// Looks at the figures of outside processes. Where those figures, or the container's own, give reason to, ends the
    /// outside processes that have the container's descriptors.
    pub(crate) fn end_escapes(&self) {
        let origins = &self.processes.origins;
        let now = Instant::now();
        if origins.is_unknown() {
            return;
        }
        let callers = self.processes.caller_pids();
        if callers.is_empty() && !origins.is_watched() {
            return;
        }
        if self.found.lock().looked.is_none_or(|looked| now - looked >= LOOK) {
            self.found.lock().looked = Some(now);
            self.look_at_figures(&callers);
        }
        let (suspicious, lingering, searched) = {
            let found = self.found.lock();
            let lingering = origins.has_dead_pid(|pid| found.figures.contains_key(&pid));
            (found.suspicion.is_some_and(|until| now < until), lingering, found.searched)
        };
        let since = searched.map_or(Duration::MAX, |searched| now - searched);
        if (suspicious && since >= SEARCH) || (lingering && since >= SLOW_SEARCH) {
            self.end_holders(&callers, Evidence::ContainerMemory);
        }
    }

    fn look_at_figures(&self, callers: &BTreeSet<u32>) {
        let origins = &self.processes.origins;
        let own: Vec<u32> = callers.iter().copied().collect();
        let Some((_, other_bytes)) = self.driver.figures(&own) else { return };
        let (last, suspicion) = {
            let found = self.found.lock();
            (found.other_bytes, found.suspicion)
        };
        let now = Instant::now();
        // All processes are asked for only with reason: there are many processes, and many monitors that ask.
        let was_used = !callers.is_empty() || origins.has_dead_caller();
        let often = self.state.pace(was_used, now).full_look;
        if last.is_some_and(|(bytes, at)| bytes == other_bytes && now - at < often)
            && suspicion.is_none_or(|until| until <= now)
        {
            return;
        }
        self.found.lock().other_bytes = Some((other_bytes, now));
        let dead_pids = origins.dead_pids();
        let all = all_pids().chain(dead_pids.iter().copied()).chain(callers.iter().copied());
        let all: Vec<u32> = all.collect::<BTreeSet<u32>>().into_iter().collect();
        let Some((_, before)) = self.driver.figures(&[]) else { return };
        let Some((mut figures, unexplained)) = self.driver.figures(&all) else { return };
        let Some((_, after)) = self.driver.figures(&[]) else { return };
        figures.retain(|pid, _| !callers.contains(pid));
        let known = std::mem::replace(&mut self.found.lock().figures, figures.clone());
        let grown =
            figures.iter().filter(|(pid, bytes)| known.get(pid).is_none_or(|known| known < bytes));
        for (pid, _) in grown {
            if dead_pids.contains(pid) {
                self.suspect();
            }
            self.end_holder(*pid, callers, Evidence::OwnMemory);
        }
        // Memory that is taken during the look is in one figure and not in the other.
        let mut found = self.found.lock();
        if before != after && found.changed_looks < MOST_CHANGED_LOOKS {
            found.changed_looks += 1;
            return;
        }
        found.changed_looks = 0;
        let known = found.unexplained;
        drop(found);
        if known.is_some_and(|known| unexplained - known >= UNEXPLAINED_BYTES) {
            self.end_holders(callers, Evidence::OwnMemory);
        } else if known.is_some_and(|known| known <= unexplained) {
            return;
        }
        self.found.lock().unexplained = Some(unexplained);
    }

    /// Ends all outside processes that have a descriptor of the container's. `true` where there was one.
    pub(crate) fn end_holders(&self, callers: &BTreeSet<u32>, evidence: Evidence) -> bool {
        let all: Vec<u32> = all_pids().collect();
        let found = all.iter().filter(|pid| self.end_holder(**pid, callers, evidence)).count() > 0;
        self.found.lock().searched = Some(Instant::now());
        found
    }

    /// Ends a process that isn't the container's and has a descriptor of the container's. `true` where it was ended.
    fn end_holder(&self, pid: u32, callers: &BTreeSet<u32>, evidence: Evidence) -> bool {
        let own = std::process::id();
        let kept = [1, own, std::os::unix::process::parent_id()];
        if kept.contains(&pid) || callers.contains(&pid) {
            return false;
        }
        // The pidfd is opened before anything is asked: the signal reaches only the process that had the pid then.
        let Ok(pidfd) = pidfd(pid.cast_signed()) else { return false };
        let found = self.descriptors_of(pid);
        if !found.of_container
            || (evidence == Evidence::OwnMemory && found.of_own)
            || self.processes.is_container_or_monitor(pid)
        {
            return false;
        }
        let event = described(Event::killed_outside(), pid.cast_signed());
        if pidfd_send_signal(&pidfd, Signal::KILL).is_err() {
            return false;
        }
        self.state.count_killed();
        self.state.log.tell_killed(event);
        true
    }

    /// Which of the driver's files a process has open. Threads may have descriptors of their own.
    fn descriptors_of(&self, pid: u32) -> Descriptors {
        let mut found = Descriptors::default();
        let mut own_mounts = None;
        for tid in threads_by_fd_table(pid) {
            for (mount, filesystem) in self.processes.origins.open_nodes(tid) {
                let own_mounts = own_mounts.get_or_insert_with(|| {
                    let of = |tid| fs::read_to_string(format!("/proc/{tid}/mountinfo")).ok();
                    told(pid.cast_signed(), of).map(|text| mounts(&text))
                });
                let Some(own_mounts) = own_mounts else { return Descriptors::default() };
                if own_mounts.contains(&mount) {
                    found.of_own = true;
                } else if self.processes.origins.has_file(mount, filesystem) {
                    found.of_container = true;
                }
            }
        }
        found
    }
}
