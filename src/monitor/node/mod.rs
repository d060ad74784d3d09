//! The driver's nodes: files of them, and calls on these.

pub(crate) mod buffer;
pub(crate) mod device;
