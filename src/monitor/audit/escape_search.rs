//! Finds outside processes that have the container's descriptors, and ends them.
//!
//! A descriptor can be sent to a process that no filter watches. Memory that is taken through it shows in the
//! driver's figures alone: for the process that made the client, which may be dead by then, or for an outside process
//! that made a client of its own. So the figures of these processes are asked for, too. A process that isn't the
//! container's and has a file which was opened in the container
//! ([`Origin`](crate::monitor::processes)) is then ended.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::process::{Signal, pidfd_send_signal};

use crate::events::Event;
use crate::monitor::caller::threads_by_fd_table;
use crate::monitor::log::described;
use crate::monitor::node::{Device, mount_at, place_at};
use crate::monitor::processes::{
    Evidence, FirstProcess, Processes, all_pids, mount_namespace, mounts,
};
use crate::process::{first_of, pidfd, told};

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

const MOST_MOUNTS: usize = 1024;

/// The driver's files that an outside process has open.
#[derive(Debug, Default, PartialEq, Eq)]
struct Descriptors {
    /// A file that was opened in the container.
    of_container: bool,
    /// A file that was opened on a mount of the process's own.
    of_own: bool,
}

impl Processes {
    /// Notes that a process of the container has that file open.
    pub(crate) fn note_opened(&self, device: &Device) {
        let Some(mount) = device.mount else { return };
        if self.escaped.last_mount.swap(mount, Ordering::Relaxed) != mount {
            self.note_mount(mount, device.place.0);
        }
    }

    fn note_mount(&self, mount: u64, filesystem: u64) {
        let mut origins = self.escaped.origins.lock();
        if origins.judged.len() >= MOST_MOUNTS || !origins.judged.insert(mount) {
            return;
        }
        // Mounts that the host has, too, say nothing of the container.
        let Ok(own) = fs::read_to_string("/proc/self/mountinfo") else { return };
        if mounts(&own).contains(&mount) {
            return;
        }
        let nodes = &self.state.settings.nodes;
        let mut of_host = nodes.iter().filter_map(|node| place_at(&node.path));
        let private = !of_host.any(|place| place.0 == filesystem);
        origins.origin.add_mount(mount, private.then_some(filesystem));
    }

    /// Looks for the container's first process, before any process has called: a descriptor can be sent away unused.
    /// The mounts of the first process may still be changing, so they are looked at again.
    pub(crate) fn find_first_process(&self) {
        let now = Instant::now();
        let escaped = &self.escaped;
        let mut since = now;
        let interval = self.state.pace(false, now).full_look;
        if let Some(first) = &mut escaped.state.lock().first_process {
            if first.poll_is_stable(interval, now) {
                return;
            }
            since = first.since;
        }
        let Some(state_file) = &self.state.settings.state_file else { return };
        let Ok(Some(first)) = first_of(state_file) else { return };
        let Ok(own) = fs::read_to_string("/proc/self/mountinfo") else { return };
        let path = format!("/proc/{}/mountinfo", first.pid);
        let Ok((file, text)) = open_and_read(&path) else { return };
        let (own, mut found) = (mounts(&own), mounts(&text));
        found.retain(|mount| !own.contains(mount));
        if !first.alive() || found.is_empty() || found.len() > MOST_MOUNTS {
            return;
        }
        escaped.origins.lock().origin.set_first_process_mounts(found);
        self.note_process(first.pid);
        escaped.state.lock().first_process =
            Some(FirstProcess { mounts: file, since, looked: now });
    }

    /// Notes in which namespace and cgroup a process of the container's is, and which nodes it has open.
    pub(crate) fn note_process(&self, pid: i32) {
        let cgroup = |pid: &str| fs::read_to_string(format!("/proc/{pid}/cgroup")).ok();
        let own = mount_namespace(std::process::id().cast_signed());
        let namespace = mount_namespace(pid).filter(|found| Some(*found) != own);
        let found = cgroup(&pid.to_string()).filter(|of| Some(of) != cgroup("self").as_ref());
        let found = found.filter(|of| !of.trim_end().ends_with(":/"));
        let namespace = namespace.map(|(_, inode)| inode);
        self.escaped.origins.lock().origin.add_process(namespace, found.as_deref());
        for tid in threads_by_fd_table(pid.cast_unsigned()) {
            for (mount, filesystem) in self.open_nodes(tid) {
                self.note_mount(mount, filesystem);
            }
        }
    }

    /// The mounts and file systems of the driver's nodes that a thread has open.
    fn open_nodes(&self, tid: u32) -> Vec<(u64, u64)> {
        let entries = fs::read_dir(format!("/proc/{tid}/fd")).into_iter().flatten().flatten();
        let nodes = &self.state.settings.nodes;
        entries.filter_map(|entry| mount_at(nodes, &entry.path())).collect()
    }

    /// Looks at the figures of outside processes. Where those figures, or the container's own, give reason to, ends the
    /// outside processes that have the container's descriptors.
    pub(crate) fn end_escapes(&self) {
        let escaped = &self.escaped;
        let now = Instant::now();
        if escaped.origins.lock().origin.is_unknown() {
            return;
        }
        let callers = self.caller_pids();
        if callers.is_empty() && !escaped.is_watched() {
            return;
        }
        if escaped.state.lock().looked.is_none_or(|looked| now - looked >= LOOK) {
            escaped.state.lock().looked = Some(now);
            self.look_at_figures(&callers);
        }
        let (suspicious, lingering, searched) = {
            let state = escaped.state.lock();
            let lingering = state.dead_pids.iter().any(|pid| state.figures.contains_key(pid));
            (state.suspicion.is_some_and(|until| now < until), lingering, state.searched)
        };
        let since = searched.map_or(Duration::MAX, |searched| now - searched);
        if (suspicious && since >= SEARCH) || (lingering && since >= SLOW_SEARCH) {
            self.end_holders(&callers, Evidence::ContainerMemory);
        }
    }

    fn look_at_figures(&self, callers: &BTreeSet<u32>) {
        let escaped = &self.escaped;
        let own: Vec<u32> = callers.iter().copied().collect();
        let Some((_, other_bytes)) = self.driver.figures(&own) else { return };
        let (last, suspicion) = {
            let state = escaped.state.lock();
            (state.other_bytes, state.suspicion)
        };
        let now = Instant::now();
        // All processes are asked for only with reason: there are many processes, and many monitors that ask.
        let was_used = !callers.is_empty() || escaped.has_dead_caller();
        let often = self.state.pace(was_used, now).full_look;
        if last.is_some_and(|(bytes, at)| bytes == other_bytes && now - at < often)
            && suspicion.is_none_or(|until| until <= now)
        {
            return;
        }
        escaped.state.lock().other_bytes = Some((other_bytes, now));
        let dead_pids: BTreeSet<u32> = escaped.state.lock().dead_pids.iter().copied().collect();
        let all = all_pids().chain(dead_pids.iter().copied()).chain(callers.iter().copied());
        let all: Vec<u32> = all.collect::<BTreeSet<u32>>().into_iter().collect();
        let Some((_, before)) = self.driver.figures(&[]) else { return };
        let Some((mut figures, unexplained)) = self.driver.figures(&all) else { return };
        let Some((_, after)) = self.driver.figures(&[]) else { return };
        figures.retain(|pid, _| !callers.contains(pid));
        let known = std::mem::replace(&mut escaped.state.lock().figures, figures.clone());
        let grown =
            figures.iter().filter(|(pid, bytes)| known.get(pid).is_none_or(|known| known < bytes));
        for (pid, _) in grown {
            if dead_pids.contains(pid) {
                escaped.suspect();
            }
            self.end_holder(*pid, callers, Evidence::OwnMemory);
        }
        // Memory that is taken during the look is in one figure and not in the other.
        let mut state = escaped.state.lock();
        if before != after && state.changed_looks < MOST_CHANGED_LOOKS {
            state.changed_looks += 1;
            return;
        }
        state.changed_looks = 0;
        let known = state.unexplained;
        drop(state);
        if known.is_some_and(|known| unexplained - known >= UNEXPLAINED_BYTES) {
            self.end_holders(callers, Evidence::OwnMemory);
        } else if known.is_some_and(|known| known <= unexplained) {
            return;
        }
        escaped.state.lock().unexplained = Some(unexplained);
    }

    /// Ends all outside processes that have a descriptor of the container's. `true` where there was one.
    pub(crate) fn end_holders(&self, callers: &BTreeSet<u32>, evidence: Evidence) -> bool {
        let all: Vec<u32> = all_pids().collect();
        let found = all.iter().filter(|pid| self.end_holder(**pid, callers, evidence)).count() > 0;
        self.escaped.state.lock().searched = Some(Instant::now());
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
            || self.is_container_or_monitor(pid)
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
            for (mount, filesystem) in self.open_nodes(tid) {
                let own_mounts = own_mounts.get_or_insert_with(|| {
                    let of = |tid| fs::read_to_string(format!("/proc/{tid}/mountinfo")).ok();
                    told(pid.cast_signed(), of).map(|text| mounts(&text))
                });
                let Some(own_mounts) = own_mounts else { return Descriptors::default() };
                if own_mounts.contains(&mount) {
                    found.of_own = true;
                } else if self.escaped.origins.lock().origin.has_file(mount, filesystem) {
                    found.of_container = true;
                }
            }
        }
        found
    }
}

/// A file below /proc, and its text when it was opened.
fn open_and_read(path: &str) -> io::Result<(File, String)> {
    let mut file = File::open(path)?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok((file, text))
}
