//! The container's callers: listeners, processes, copies of their memory, and calls that a caller makes again.

mod audit_wait;
mod interrupted;
mod listener;
mod listeners;
mod pid_ns;
mod recv_wait;
mod scratch;
mod target;
#[cfg(test)]
mod test_callers;
mod workers;

pub(crate) use audit_wait::{AuditWait, WaitEnd, Watched};
pub(crate) use interrupted::{Fingerprint, Interrupted, Match, Registers, UnclaimedCall};
pub use listener::check_sizes;
pub(crate) use listener::{Listener, Reply};
pub(crate) use listeners::{Listeners, Queue};
pub(crate) use pid_ns::PidMaps;
pub(crate) use scratch::{Copy, Scratch, WriteBack};
pub(crate) use target::{
    PIDFD_THREAD, Target, Targets, compare_files, has_file, threads_by_fd_table,
};
#[cfg(test)]
pub(crate) use test_callers::{Caller, TestCallers};
pub(crate) use workers::{Watch, Workers};
