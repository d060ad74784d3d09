//! What the worker may do: less than whoever started it.
//!
//! The driver takes privilege from the thread that calls it, and the worker calls it for
//! a container. So all that the driver or the kernel asks for is given up before the
//! first call, but for what reaching into the container's processes takes.

use std::io;

use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::prctl::{set_dumpable, set_no_new_privs};

/// Reading others' memory and descriptors; ending them; looking at what they have mapped.
const KEPT: [Capability; 4] = [
    Capability::CAP_SYS_PTRACE,
    Capability::CAP_KILL,
    Capability::CAP_DAC_READ_SEARCH,
    Capability::CAP_CHECKPOINT_RESTORE,
];

/// Gives up all but what answering takes. For all threads to come.
///
/// # Errors
///
/// Where something can't be given up; then nothing may be executed.
pub(crate) fn drop_all() -> io::Result<()> {
    let may = caps::read(None, CapSet::Permitted).map_err(io::Error::other)?;
    let kept: CapsHashSet = KEPT.into_iter().filter(|cap| may.contains(cap)).collect();
    caps::clear(None, CapSet::Ambient).map_err(io::Error::other)?;
    for set in [CapSet::Effective, CapSet::Permitted] {
        caps::set(None, set, &kept).map_err(io::Error::other)?;
    }
    caps::clear(None, CapSet::Inheritable).map_err(io::Error::other)?;
    set_no_new_privs()?;
    Ok(set_dumpable(false)?)
}
