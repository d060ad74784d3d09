//! The monitor's privileges: fewer than those of the process that started it.
//!
//! The driver judges privilege by the thread that calls it, and the monitor calls it for a container. So before its
//! first call the monitor gives up every privilege that the driver or the kernel asks for, except those with which it
//! reaches into the container's processes. It also gives up the system calls of [`deny_list`].

use std::io;

use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::prctl::{set_dumpable, set_no_new_privs};

use crate::gate::enter::confine;
use crate::monitor::daemon::deny_list;

/// To read the memory and descriptors of other processes, to end them, and to look at what they have mapped.
const KEPT: [Capability; 4] = [
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

/// Gives up all privileges that answering doesn't need, for this thread and all that it starts. Fails where a privilege
/// can't be given up; then no call may be executed.
pub(crate) fn drop_privileges(confinement: Confinement) -> io::Result<()> {
    let may = caps::read(None, CapSet::Permitted).map_err(io::Error::other)?;
    let kept: CapsHashSet = KEPT.into_iter().filter(|cap| may.contains(cap)).collect();
    caps::clear(None, CapSet::Ambient).map_err(io::Error::other)?;
    for set in [CapSet::Effective, CapSet::Permitted] {
        caps::set(None, set, &kept).map_err(io::Error::other)?;
    }
    caps::clear(None, CapSet::Inheritable).map_err(io::Error::other)?;
    set_no_new_privs()?;
    set_dumpable(false)?;
    match confinement {
        Confinement::Begins => confine(deny_list::program()),
        Confinement::Lasts => Ok(()),
    }
}
