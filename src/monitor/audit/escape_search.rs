//! Descriptors of the container's that others have, and what they take through them.
//!
//! A descriptor can be sent to a process that no filter watches. What is taken through it
//! shows in the driver's figures alone: of the process that made the client, which may be
//! dead by then, or of a stranger that made one of its own. So those are asked for, too;
//! whoever then is found with a file that was opened in the container ([`Origin`](crate::monitor::processes::origin::Origin)), and
//! isn't at home there, is ended.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::events::Event;
use crate::monitor::caller::target::with_files;
use crate::monitor::log::container_log::described;
use crate::monitor::node::device::{self, Device};
use crate::monitor::processes::container_processes::{Processes, mount_namespace, processes};
use crate::monitor::processes::escaped_fds::{Charge, Home};
use crate::monitor::processes::origin::mounts;
use crate::process::{first_of, told};

/// How often is looked at most whether strangers could have taken anything.
const LOOK: Duration = Duration::from_millis(200);

/// How often descriptors are looked through while there is something to explain, and how
/// long after it came up.
const SEARCH: Duration = Duration::from_millis(200);

/// How often while use by the dead stays the same.
const SLOW_SEARCH: Duration = Duration::from_secs(2);

/// So much more that the driver has for nobody who can be asked about is looked into: for a
/// dead stranger's client, say. Its own needs, contexts for one, are less or looked into in
/// vain.
const UNEXPLAINED_BYTES: i128 = 16 << 20;

/// Looks in a row that may tell nothing of that.
const MOST_UNSTEADY: u32 = 1;

const MOST_MOUNTS: usize = 1024;

/// A stranger's descriptors.
#[derive(Debug, Default, PartialEq, Eq)]
struct Descriptors {
    /// One of the container's.
    of_container: bool,
    /// One of the driver's that it opened where it is at home.
    of_own: bool,
}

impl Processes {
    /// A process of the container has that file open.
    pub(crate) fn note_opened(&self, device: &Device) {
        let Some(mount) = device.mount else { return };
        if self.escaped.last.swap(mount, Ordering::Relaxed) != mount {
            self.learn(mount, device.place.0);
        }
    }

    fn learn(&self, mount: u64, filesystem: u64) {
        let mut origins = self.escaped.origin.lock();
        if origins.judged.len() >= MOST_MOUNTS || !origins.judged.insert(mount) {
            return;
        }
        // The host's own tell nothing.
        let Ok(ours) = fs::read_to_string("/proc/self/mountinfo") else { return };
        if mounts(&ours).contains(&mount) {
            return;
        }
        let nodes = &self.state.settings.nodes;
        let mut of_host = nodes.iter().filter_map(|node| device::place_at(&node.path));
        let private = !of_host.any(|place| place.0 == filesystem);
        origins.origin.learn(mount, private.then_some(filesystem));
    }

    /// Looks for the container's first process, before any has called: a descriptor can be sent
    /// away unused. Its mounts may still be being made, so they are looked at again.
    pub(crate) fn meet(&self) {
        let now = Instant::now();
        let escaped = &self.escaped;
        let mut since = now;
        let meeting = self.state.pace(false, now).full_look;
        if let Some(home) = &mut escaped.state.lock().home {
            if home.is_settled(meeting, now) {
                return;
            }
            since = home.since;
        }
        let Some(state_file) = &self.state.settings.state_file else { return };
        let Ok(Some(first)) = first_of(state_file) else { return };
        let Ok(ours) = fs::read_to_string("/proc/self/mountinfo") else { return };
        let Ok((file, theirs)) = opened(&format!("/proc/{}/mountinfo", first.pid)) else { return };
        let (ours, mut theirs) = (mounts(&ours), mounts(&theirs));
        theirs.retain(|mount| !ours.contains(mount));
        if !first.alive() || theirs.is_empty() || theirs.len() > MOST_MOUNTS {
            return;
        }
        escaped.origin.lock().origin.inhabit(theirs);
        self.settle(first.pid);
        escaped.state.lock().home = Some(Home { mounts: file, since, met: now });
    }

    /// A process of the container's was seen: where it lives, and what it has open.
    pub(crate) fn settle(&self, pid: i32) {
        let cgroup = |pid: &str| fs::read_to_string(format!("/proc/{pid}/cgroup")).ok();
        let ours = mount_namespace(std::process::id().cast_signed());
        let settled = mount_namespace(pid).filter(|of| Some(*of) != ours);
        let home = cgroup(&pid.to_string()).filter(|of| Some(of) != cgroup("self").as_ref());
        let home = home.filter(|of| !of.trim_end().ends_with(":/"));
        let settled = settled.map(|(_, inode)| inode);
        self.escaped.origin.lock().origin.settle(settled, home.as_deref());
        for tid in with_files(pid.cast_unsigned()) {
            for (mount, filesystem) in self.open_nodes(tid) {
                self.learn(mount, filesystem);
            }
        }
    }

    /// The driver's files among a thread's descriptors: their mounts and file systems.
    fn open_nodes(&self, tid: u32) -> Vec<(u64, u64)> {
        let entries = fs::read_dir(format!("/proc/{tid}/fd")).into_iter().flatten().flatten();
        let nodes = &self.state.settings.nodes;
        entries.filter_map(|entry| device::mount_at(nodes, &entry.path())).collect()
    }

    /// Looks at the figures of those who aren't the container's, and for whoever has a
    /// descriptor of its where they, or the container's own, ask for it.
    pub(crate) fn look_abroad(&self) {
        let escaped = &self.escaped;
        let now = Instant::now();
        if escaped.origin.lock().origin.is_unknown() {
            return;
        }
        let ours = self.our_pids();
        if ours.is_empty() && !escaped.is_watched() {
            return;
        }
        if escaped.state.lock().looked.is_none_or(|looked| now - looked >= LOOK) {
            escaped.state.lock().looked = Some(now);
            self.look_at_figures(&ours);
        }
        let (suspicious, lingering, searched) = {
            let state = escaped.state.lock();
            let lingering = state.former.iter().any(|pid| state.figures.contains_key(pid));
            (state.suspicion.is_some_and(|until| now < until), lingering, state.searched)
        };
        let since = searched.map_or(Duration::MAX, |searched| now - searched);
        if (suspicious && since >= SEARCH) || (lingering && since >= SLOW_SEARCH) {
            self.search(&ours, Charge::Theirs);
        }
    }

    fn look_at_figures(&self, ours: &BTreeSet<u32>) {
        let escaped = &self.escaped;
        let own: Vec<u32> = ours.iter().copied().collect();
        let Some((_, of_others)) = self.driver.figures(&own) else { return };
        let (last, suspicion) = {
            let state = escaped.state.lock();
            (state.of_others, state.suspicion)
        };
        let now = Instant::now();
        // Many monitors ask, for many processes: not without a reason.
        let was_used = !ours.is_empty() || escaped.has_called();
        let often = self.state.pace(was_used, now).full_look;
        if last.is_some_and(|(bytes, at)| bytes == of_others && now - at < often)
            && suspicion.is_none_or(|until| until <= now)
        {
            return;
        }
        escaped.state.lock().of_others = Some((of_others, now));
        let former: BTreeSet<u32> = escaped.state.lock().former.iter().copied().collect();
        let all = processes().chain(former.iter().copied()).chain(ours.iter().copied());
        let all: Vec<u32> = all.collect::<BTreeSet<u32>>().into_iter().collect();
        let Some((_, before)) = self.driver.figures(&[]) else { return };
        let Some((mut figures, unexplained)) = self.driver.figures(&all) else { return };
        let Some((_, after)) = self.driver.figures(&[]) else { return };
        figures.retain(|pid, _| !ours.contains(pid));
        let known = std::mem::replace(&mut escaped.state.lock().figures, figures.clone());
        let grown =
            figures.iter().filter(|(pid, bytes)| known.get(pid).is_none_or(|known| known < bytes));
        for (pid, _) in grown {
            if former.contains(pid) {
                escaped.suspect();
            }
            self.end_holder(*pid, ours, Charge::Own);
        }
        // What is taken meanwhile is in one figure and not in the other.
        let mut state = escaped.state.lock();
        if before != after && state.unsteady < MOST_UNSTEADY {
            state.unsteady += 1;
            return;
        }
        state.unsteady = 0;
        let known = state.unexplained;
        drop(state);
        if known.is_some_and(|known| unexplained - known >= UNEXPLAINED_BYTES) {
            self.search(ours, Charge::Own);
        } else if known.is_some_and(|known| known <= unexplained) {
            return;
        }
        escaped.state.lock().unexplained = Some(unexplained);
    }

    /// Ends all strangers that have a descriptor of the container's. Whether there was one.
    pub(crate) fn search(&self, ours: &BTreeSet<u32>, charge: Charge) -> bool {
        let all: Vec<u32> = processes().collect();
        let found = all.iter().filter(|pid| self.end_holder(**pid, ours, charge)).count() > 0;
        self.escaped.state.lock().searched = Some(Instant::now());
        found
    }

    /// Ends a process if it isn't the container's and has a descriptor that is. Whether it
    /// was to be ended.
    fn end_holder(&self, pid: u32, ours: &BTreeSet<u32>, charge: Charge) -> bool {
        let own = std::process::id();
        let kept = [1, own, std::os::unix::process::parent_id()];
        if kept.contains(&pid) || ours.contains(&pid) {
            return false;
        }
        // Before anything is asked: whoever had the pid by then is who gets the signal.
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let pidfd = number.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        let Some(pidfd) = pidfd else { return false };
        let found = self.found(pid);
        if !found.of_container || (charge == Charge::Own && found.of_own) || self.is_home(pid) {
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

    /// What a process has open. Threads may have descriptors of their own.
    fn found(&self, pid: u32) -> Descriptors {
        let mut found = Descriptors::default();
        let mut at_home = None;
        for tid in with_files(pid) {
            for (mount, filesystem) in self.open_nodes(tid) {
                let at_home = at_home.get_or_insert_with(|| {
                    let of = |tid| fs::read_to_string(format!("/proc/{tid}/mountinfo")).ok();
                    told(pid.cast_signed(), of).map(|text| mounts(&text))
                });
                let Some(at_home) = at_home else { return Descriptors::default() };
                if at_home.contains(&mount) {
                    found.of_own = true;
                } else if self.escaped.origin.lock().origin.has(mount, filesystem) {
                    found.of_container = true;
                }
            }
        }
        found
    }
}

/// A file below /proc, and what it said when it was opened.
fn opened(path: &str) -> io::Result<(File, String)> {
    let mut file = File::open(path)?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    Ok((file, text))
}
