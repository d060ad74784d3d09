//! The container's callers: listeners, processes, copies of their memory, and calls that a caller makes again.

mod audit_wait;
mod interrupted_calls;
mod listeners;
mod pid_ns;
mod scratch;
mod target;
#[cfg(test)]
mod test_callers;

pub(crate) use audit_wait::{AuditWait, WaitEnd, Watched};
pub(crate) use interrupted_calls::{Fingerprint, Interrupted, Match, Registers, UnclaimedCall};
pub use listeners::check_sizes;
pub(crate) use listeners::{Listener, Listeners, QUEUES, Queue, Reply};
pub(crate) use pid_ns::PidMaps;
pub(crate) use scratch::{Copy, Scratch, WriteBack};
pub(crate) use target::{
    PIDFD_THREAD, Target, Targets, compare_files, has_file, threads_by_fd_table,
};
#[cfg(test)]
pub(crate) use test_callers::{Caller, TestCallers};
