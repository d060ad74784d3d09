//! What is told of the container: events, and lines of the log that its programs cause.

pub(crate) mod container_log;
pub(crate) mod limit;
