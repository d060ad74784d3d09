//! What distinguishes the container's files and processes from others: the mounts, namespaces and cgroups that were
//! seen, the container's first process, and the pids of its dead ones.

use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::caller::threads_by_fd_table;
use crate::gate::settings::{Node, Settings};
use crate::node::{mount_at, place_at};
use crate::processes::provenance::{Provenance, mounts};
use crate::sync::Lock;
use cgpu_core::ledger::Process;
use cgpu_host::process::{ProcessId, first_of, of_any_thread};

/// How long after it was found the mounts of a container's first process may still be changing.
const MOUNTING: Duration = Duration::from_secs(5);

/// How often they are read again meanwhile.
const MOUNTING_INTERVAL: Duration = Duration::from_secs(1);

/// The most dead processes that are remembered, to query their driver usage.
const MOST_REMEMBERED: usize = 4096;

/// The most mounts that are judged.
const MOST_MOUNTS: usize = 1024;

/// What is known of the container's files and processes, whether or not any of the container's processes has called.
#[derive(Debug, Default)]
pub(crate) struct ProvenanceIndex {
    known: Lock<KnownProvenances>,
    first_process: Lock<Option<FirstProcess>>,
    /// Pids of the container's processes that called, have exited, and are forgotten in the state.
    dead_pids: Lock<VecDeque<u32>>,
}

#[derive(Debug, Default)]
struct KnownProvenances {
    provenance: Provenance,
    /// Mounts that were judged, whether they were the container's or not.
    judged: BTreeSet<u64>,
}

/// The container's first process.
#[derive(Debug, Clone, Copy)]
struct FirstProcess {
    found: Instant,
    /// When its mounts were last read.
    read: Instant,
}

impl FirstProcess {
    /// How often its mounts are read.
    fn reading_interval(self, now: Instant, scan_interval: Duration) -> Duration {
        if now - self.found < MOUNTING { MOUNTING_INTERVAL } else { scan_interval }
    }
}

impl ProvenanceIndex {
    /// Notes that a process of the container has a file open on that mount of that file system.
    pub(crate) fn note_mount(&self, mount: u64, filesystem: u64, settings: &Settings) {
        let mut provenances = self.known.lock();
        if provenances.judged.len() >= MOST_MOUNTS || !provenances.judged.insert(mount) {
            return;
        }
        // Mounts that the host has, too, say nothing of the container.
        if mounts_of(own_pid()).is_none_or(|own| own.contains(&mount)) {
            return;
        }
        let mut of_host = settings.nodes.iter().filter_map(|node| place_at(&node.path));
        let private = !of_host.any(|place| place.0 == filesystem);
        provenances.provenance.add_mount(mount, private.then_some(filesystem));
    }

    /// Reads the mounts of the container's first process, before any process has called: a descriptor can be sent away
    /// unused. `scan_interval`: how often they are read once they should be complete.
    pub(crate) fn find_first_process(&self, settings: &Settings, scan_interval: Duration) {
        let now = Instant::now();
        let mut first_process = self.first_process.lock();
        if first_process
            .is_some_and(|first| now - first.read < first.reading_interval(now, scan_interval))
        {
            return;
        }
        let Some(state_file) = &settings.state_file else { return };
        let Ok(Some(first)) = first_of(state_file) else { return };
        let (Some(own), Some(mut found)) = (mounts_of(own_pid()), mounts_of(first.pid)) else {
            return;
        };
        found.retain(|mount| !own.contains(mount));
        if !first.alive() || found.is_empty() || found.len() > MOST_MOUNTS {
            return;
        }
        self.known.lock().provenance.set_first_process_mounts(found);
        let found = first_process.map_or(now, |first| first.found);
        *first_process = Some(FirstProcess { found, read: now });
        drop(first_process);
        self.note_process(first.pid, settings);
    }

    /// How soon [`Self::find_first_process`] is to be called again.
    pub(crate) fn finding_interval(&self, scan_interval: Duration) -> Duration {
        let now = Instant::now();
        let first = *self.first_process.lock();
        first.map_or(MOUNTING_INTERVAL, |first| first.reading_interval(now, scan_interval))
    }

    /// Notes in which namespace and cgroup one of the container's processes is, and which nodes it has open.
    pub(crate) fn note_process(&self, pid: i32, settings: &Settings) {
        let (namespace, cgroup) = home_of(pid, &settings.started_in);
        self.known.lock().provenance.add_process(namespace, cgroup.as_deref());
        for tid in threads_by_fd_table(pid.cast_unsigned()) {
            for (mount, filesystem) in open_nodes(&settings.nodes, tid) {
                self.note_mount(mount, filesystem, settings);
            }
        }
    }

    /// Notes that one of the container's processes has exited and is forgotten in the state.
    pub(crate) fn note_dead(&self, process: Process) {
        let pid = process.pid();
        let mut pids = self.dead_pids.lock();
        if !pids.contains(&pid) {
            if pids.len() >= MOST_REMEMBERED {
                pids.pop_front();
            }
            pids.push_back(pid);
        }
    }

    /// Whether outside processes may have the container's descriptors though the state has none of its processes.
    pub(crate) fn is_watched(&self) -> bool {
        let has_first = self.first_process.lock().is_some();
        (has_first || self.has_dead_caller()) && !self.is_unknown()
    }

    /// Whether a process that called has exited and is forgotten in the state.
    pub(crate) fn has_dead_caller(&self) -> bool {
        !self.dead_pids.lock().is_empty()
    }

    /// Whether the pid of a dead process that called and is forgotten in the state fits `is_wanted`, and no process has
    /// it now.
    pub(crate) fn has_unused_dead_pid(&self, is_wanted: impl Fn(u32) -> bool) -> bool {
        let pids = self.dead_pids.lock();
        pids.iter().any(|pid| is_wanted(*pid) && ProcessId::is_absent(pid.cast_signed()))
    }

    /// Pids of the container's dead processes that called and are forgotten in the state.
    pub(crate) fn dead_pids(&self) -> BTreeSet<u32> {
        self.dead_pids.lock().iter().copied().collect()
    }

    /// Pids of the container's dead processes that no process has now.
    pub(crate) fn unused_dead_pids(&self) -> BTreeSet<u32> {
        let mut pids = self.dead_pids();
        pids.retain(|pid| {
            let number = Some(pid.cast_signed()).filter(|pid| *pid > 0).and_then(Pid::from_raw);
            // The first check costs a third of a microsecond. A process that it finds may be dead all the same.
            let is_gone = |pid| test_kill_process(pid) == Err(Errno::SRCH);
            number.is_some_and(|pid| is_gone(pid) || ProcessId::is_absent(pid.as_raw_pid()))
        });
        pids
    }

    /// Whether nothing is known of the mounts on which the container's files are opened.
    pub(crate) fn is_unknown(&self) -> bool {
        self.known.lock().provenance.is_unknown()
    }

    /// Whether an open file is the container's, by its mount or its file system.
    pub(crate) fn has_file(&self, mount: u64, filesystem: u64) -> bool {
        self.known.lock().provenance.has_file(mount, filesystem)
    }

    /// Whether a process is the container's, by its mount namespace or its cgroup.
    pub(crate) fn has_process(&self, namespace: u64, cgroup: &str) -> bool {
        self.known.lock().provenance.has_process(namespace, cgroup)
    }
}

fn own_pid() -> i32 {
    std::process::id().cast_signed()
}

/// The mounts and file systems of the nodes that a thread has open.
fn open_nodes(nodes: &[Node], tid: u32) -> Vec<(u64, u64)> {
    let entries = fs::read_dir(format!("/proc/{tid}/fd")).into_iter().flatten().flatten();
    let open = entries.filter_map(|entry| {
        let place = mount_at(nodes, &entry.path())?;
        let number = entry.file_name();
        let info = format!("/proc/{tid}/fdinfo/{}", number.to_string_lossy());
        reaches_driver(&fs::read_to_string(info).ok()?).then_some(place)
    });
    open.collect()
}

/// The driver's files that an outside process has open.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Descriptors {
    /// A file that was opened in the container.
    pub(crate) of_container: bool,
    /// A file that was opened on a mount of the process's own.
    pub(crate) of_own: bool,
}

/// Which of the driver's files a process has open; `has_file` says by mount and file system whether one was opened in
/// the container. Threads may have descriptors of their own.
pub(crate) fn descriptors_of(
    pid: u32,
    nodes: &[Node],
    has_file: impl Fn(u64, u64) -> bool,
) -> Descriptors {
    let mut found = Descriptors::default();
    let mut own_mounts = None;
    for tid in threads_by_fd_table(pid) {
        for (mount, filesystem) in open_nodes(nodes, tid) {
            let own_mounts = own_mounts.get_or_insert_with(|| mounts_of(pid.cast_signed()));
            let Some(own_mounts) = own_mounts else { return Descriptors::default() };
            if own_mounts.contains(&mount) {
                found.of_own = true;
            } else if has_file(mount, filesystem) {
                found.of_container = true;
            }
        }
    }
    found
}

/// The mounts that a process sees; `None` where they can't be read.
pub(crate) fn mounts_of(pid: i32) -> Option<BTreeSet<u64>> {
    let of = |tid| fs::read_to_string(format!("/proc/{tid}/mountinfo")).ok();
    of_any_thread(pid, of).map(|text| mounts(&text))
}

/// The mount namespace and the cgroups of a container's process, unless others are in them, too: the monitor, any
/// process in the cgroups `shared` (an engine makes a container without cgroups of its own in those of its helpers), or
/// the host.
pub(crate) fn home_of(pid: i32, shared: &str) -> (Option<u64>, Option<String>) {
    let own = mount_namespace(own_pid());
    let namespace = mount_namespace(pid).filter(|found| Some(*found) != own);
    let found = cgroups_of(pid).filter(|of| of != shared && !of.trim_end().ends_with(":/"));
    (namespace.map(|(_, inode)| inode), found)
}

/// The cgroups of a process, as `/proc/PID/cgroup` has them; `None` if it has ended.
pub(crate) fn cgroups_of(pid: i32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()
}

/// The mount namespace of a process, by the device and inode of its file.
pub(crate) fn mount_namespace(pid: i32) -> Option<(u64, u64)> {
    let namespace = of_any_thread(pid, |tid| fs::metadata(format!("/proc/{tid}/ns/mnt")).ok())?;
    Some((namespace.dev(), namespace.ino()))
}

/// Whether a descriptor is an open file, by `/proc/PID/fdinfo`, and not a mere place in the file system (`O_PATH`),
/// which any process may have of a node that it can't open.
fn reaches_driver(fdinfo: &str) -> bool {
    let flags = fdinfo.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & OFlags::PATH.bits() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A descriptor of a mere place in the file system (O_PATH) is no open file.
    #[test]
    fn path_descriptor_is_not_an_open_file() {
        assert!(reaches_driver("pos:\t0\nflags:\t02100002\nmnt_id:\t24\n"));
        assert!(!reaches_driver("pos:\t0\nflags:\t010000000\nmnt_id:\t24\n"));
        assert!(!reaches_driver("pos:\t0\n"));
    }
}
