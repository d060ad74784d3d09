//! The container's processes: who they are, what they have open, and ending them.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::{fs, io};

use nix::libc;
use rustix::process::{Signal, pidfd_send_signal};

use crate::events::Event;
use crate::gate::settings::NodeKind;
use crate::ledger::Process;
use crate::monitor::caller::target::{pidfd_open, with_files};
use crate::monitor::driver::access::DriverAccess;
use crate::monitor::journal::process_number::process_id;
use crate::monitor::lock::Lock;
use crate::monitor::log::container_log::described;
use crate::monitor::node::device;
use crate::monitor::processes::escaped_fds::EscapedFds;
use crate::monitor::state::container_state::ContainerState;
use crate::process::{ProcessId, told};

/// The container's processes, and others that have its descriptors
/// ([`escape_search`](crate::monitor::audit::escape_search)).
#[derive(Debug)]
pub(crate) struct Processes {
    pub(crate) state: Arc<ContainerState>,
    pub(crate) driver: Arc<DriverAccess>,
    pub(crate) escaped: EscapedFds,
    /// Those that were ended and are still there.
    killed: Lock<BTreeSet<Process>>,
}

impl Processes {
    pub(crate) fn new(state: Arc<ContainerState>, driver: Arc<DriverAccess>) -> Self {
        Processes { state, driver, escaped: EscapedFds::default(), killed: Lock::default() }
    }

    /// The pids of those that called.
    pub(crate) fn our_pids(&self) -> BTreeSet<u32> {
        let books = self.state.books();
        books.processes.iter().map(|process| process_id(*process).pid.cast_unsigned()).collect()
    }

    /// All processes of the container, also those that never called.
    pub(crate) fn inhabitants(&self) -> BTreeSet<u32> {
        let at_home = |pid: &u32| {
            let namespace = mount_namespace(pid.cast_signed());
            namespace.is_some_and(|(_, inode)| self.houses(*pid, inode))
        };
        let mut pids = self.our_pids();
        pids.extend(processes().filter(at_home));
        pids
    }

    /// Whether a process is the container's, or a monitor.
    pub(crate) fn is_home(&self, pid: u32) -> bool {
        // A namespace that can't be told is nobody's; then what is known is too little.
        let Some(namespace) = mount_namespace(pid.cast_signed()) else { return true };
        let in_ours = Some(namespace) == mount_namespace(std::process::id().cast_signed());
        let program = |tid| fs::read_link(format!("/proc/{tid}/exe")).ok();
        let name = told(pid.cast_signed(), program).unwrap_or_default();
        let name = name.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // An upgrade has replaced the file.
        if in_ours && name.trim_end_matches(" (deleted)") == "cgpu-monitor" {
            return true;
        }
        self.houses(pid, namespace.1)
    }

    fn houses(&self, pid: u32, namespace: u64) -> bool {
        let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        self.escaped.origin.lock().origin.houses(namespace, &cgroup)
    }

    /// Descriptors of that kind of node that the container's processes have, by their threads;
    /// `None` where not all could be looked at, for want of descriptors of our own, say.
    pub(crate) fn open_files(&self, kind: NodeKind) -> Option<Vec<(u32, i32)>> {
        let mut open = Vec::new();
        for pid in self.inhabitants() {
            open.extend(self.open_in(pid, kind)?);
        }
        Some(open)
    }

    /// The same of one process.
    pub(crate) fn open_in(&self, pid: u32, kind: NodeKind) -> Option<Vec<(u32, i32)>> {
        let mut open = Vec::new();
        for tid in with_files(pid) {
            let entries = match fs::read_dir(format!("/proc/{tid}/fd")) {
                Ok(entries) => entries,
                Err(error) if is_gone(&error) => continue,
                Err(_) => return None,
            };
            for entry in entries.flatten() {
                let number = entry.file_name().to_str().and_then(|number| number.parse().ok());
                if let Some(number) = number
                    && device::kind_at(&self.state.settings.nodes, &entry.path()) == Some(kind)
                {
                    open.push((tid, number));
                }
            }
        }
        Some(open)
    }

    /// Ends a process that took or keeps what wasn't given; the event says why.
    pub(crate) fn kill(&self, process: Process, event: Event) {
        let pid = process_id(process);
        // A pidfd names whoever has the pid when it's opened: who that is, is asked after.
        let Ok(pidfd) = pidfd_open(pid.pid, 0) else { return };
        if ProcessId::of(pid.pid) != Some(pid) {
            return;
        }
        let first = {
            let mut killed = self.killed.lock();
            killed.retain(|killed| process_id(*killed).alive());
            killed.insert(process)
        };
        let event = first.then(|| described(event, pid.pid));
        // Whoever sees it gone finds it counted.
        if first {
            self.state.count_killed();
        }
        let _ = pidfd_send_signal(pidfd, Signal::KILL);
        if let Some(event) = event {
            self.state.log.tell_killed(event);
        }
    }
}

/// Whether procfs says so of a process that is no more.
fn is_gone(error: &io::Error) -> bool {
    [Some(libc::ENOENT), Some(libc::ESRCH)].contains(&error.raw_os_error())
}

/// The mount namespace of a process: device and inode.
pub(crate) fn mount_namespace(pid: i32) -> Option<(u64, u64)> {
    let namespace = told(pid, |tid| fs::metadata(format!("/proc/{tid}/ns/mnt")).ok())?;
    Some((namespace.dev(), namespace.ino()))
}

/// The pids there are.
pub(crate) fn processes() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}
