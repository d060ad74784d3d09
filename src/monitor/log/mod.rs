//! The events of the container, and the lines of the log that its programs cause.

mod container_log;
mod limit;

pub(crate) use container_log::{ContainerLog, RefusedAllocation, Refuser, When, described};
pub(crate) use limit::Topic;
