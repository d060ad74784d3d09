//! Files of the driver, and the monitor's own calls on them.

mod buffer;
mod device;

pub(crate) use buffer::Buffer;
pub use device::Failure;
#[cfg(test)]
pub(crate) use device::IN_MEMORY;
pub(crate) use device::{Device, Rm, kind_at, mount_at, place_at};
