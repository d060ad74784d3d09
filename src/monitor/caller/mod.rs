//! The container's callers: listeners, processes, copies of their memory, and calls that a caller makes again.

pub(crate) mod audit_wait;
pub(crate) mod leader;
pub(crate) mod listener;
pub(crate) mod listeners;
pub(crate) mod pid_ns;
pub(crate) mod recv_wait;
pub(crate) mod scratch;
pub(crate) mod target;
#[cfg(test)]
pub(crate) mod test_callers;
pub(crate) mod thread_order;
pub(crate) mod unclaimed;
