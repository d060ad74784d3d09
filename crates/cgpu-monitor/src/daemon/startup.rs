//! What a monitor does for its process before it serves: limits, a heap that all threads share, and fewer privileges.
//!
//! The driver judges privilege by the thread that calls it, and the monitor calls it for a container. So before its
//! first call the monitor gives up every privilege that the driver or the kernel asks for, except those with which it
//! reaches into the container's processes. It also gives up the system calls of [`deny_list`].
#![allow(unsafe_code, reason = "mallopt has no safe interface in our crates")]

use std::{fs, io};

use caps::{CapSet, Capability, CapsHashSet};
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::thread::set_no_new_privs;
use tracing::warn;

use crate::daemon::deny_list;
use crate::gate::entry::confine;

/// Takes the monitor out of the OOM killer's choice.
pub(super) fn avoid_oom_killer() {
    let _ = fs::write("/proc/self/oom_score_adj", "-999");
}

/// The most descriptors that a monitor needs: three for each of at most 4096 known processes, a few hundred for
/// threads that called lately, 4096 exports, and 1024 files of UVM.
const DESCRIPTORS: u64 = 18 << 10;

/// Raises the limit of open files to [`DESCRIPTORS`], or as far as the host permits: engines start programs with a low
/// default limit, or a lower one. Fails if the limit stays below [`DESCRIPTORS`]: the error, and the limit.
pub(super) fn raise_descriptor_limit() -> Result<(), (rustix::io::Errno, u64)> {
    let limit = getrlimit(Resource::Nofile);
    // `None` is no limit.
    let all = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let enough = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
    let wanted = if limit.maximum.is_some_and(|most| most < DESCRIPTORS) { enough } else { all };
    setrlimit(Resource::Nofile, wanted)
        .or_else(|error| setrlimit(Resource::Nofile, all).and(Err(error)))
        .map_err(|error| (error, limit.maximum.unwrap_or(u64::MAX)))
}

/// Makes all threads allocate from one heap. The threads take turns with calls, so a heap for each would become as
/// large as the common one, and would retain what its thread once needed.
pub(super) fn share_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the function takes only numbers, and there is no second thread yet.
    unsafe {
        nix::libc::mallopt(nix::libc::M_ARENA_MAX, 1)
    };
}

/// Logs what the host didn't permit.
pub(super) fn report(
    remaining_controllers: Vec<String>,
    limit: Result<(), (rustix::io::Errno, u64)>,
) {
    for controllers in remaining_controllers {
        warn!(
            controllers,
            "the monitor stays in the container's cgroups, and is paid for there; let root write \
             /sys/fs/cgroup"
        );
    }
    if let Err((error, most)) = limit {
        warn!(
            %error,
            most,
            "few descriptors: few processes and exports can be kept account of; raise the engine's \
             limit of open files (LimitNOFILE)"
        );
    }
}

/// To read the memory and descriptors of other processes, to end them, and to check what they have mapped.
const RETAINED: [Capability; 4] = [
    Capability::CAP_SYS_PTRACE,
    Capability::CAP_KILL,
    Capability::CAP_DAC_READ_SEARCH,
    Capability::CAP_CHECKPOINT_RESTORE,
];

/// Whether the process is behind the filter of [`deny_list`] already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Confinement {
    /// It isn't.
    Begins,
    /// It is: an update executes the new program behind it.
    Lasts,
}

/// Gives up all privileges that answering doesn't need, for this thread and all that it starts. Fails if a privilege
/// can't be given up; then no call may be executed.
pub(crate) fn drop_privileges(confinement: Confinement) -> io::Result<()> {
    let may = caps::read(None, CapSet::Permitted).map_err(io::Error::other)?;
    let retained: CapsHashSet = RETAINED.into_iter().filter(|cap| may.contains(cap)).collect();
    caps::clear(None, CapSet::Ambient).map_err(io::Error::other)?;
    for set in [CapSet::Effective, CapSet::Permitted] {
        caps::set(None, set, &retained).map_err(io::Error::other)?;
    }
    caps::clear(None, CapSet::Inheritable).map_err(io::Error::other)?;
    set_no_new_privs(true)?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    match confinement {
        Confinement::Begins => confine(deny_list::program()),
        Confinement::Lasts => Ok(()),
    }
}
