//! Files of the driver, and the monitor's own calls on them.

pub(crate) mod buffer;
pub(crate) mod device;
