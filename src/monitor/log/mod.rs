//! The events of the container, and the lines of the log that its programs cause.

pub(crate) mod container_log;
pub(crate) mod limit;
