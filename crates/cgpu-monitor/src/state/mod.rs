//! What the monitor knows of the container.

mod channels;
mod container_state;
mod creators;
mod groups;
mod pace;
mod rm_lock;
mod space_ranges;

#[cfg(test)]
pub(crate) use channels::MOST_CHANNELS;
pub(crate) use channels::{ChannelName, Channels};
#[cfg(test)]
pub(crate) use container_state::tests::state_of;
pub(crate) use container_state::{BOUNDS, ContainerState, NO_CLIENT};
pub(crate) use creators::{Initialization, MOST_FILES};
pub(crate) use groups::{DueSlice, Groups, MOST_GROUPS, computes};
pub(crate) use pace::{Due, Idleness, Occasion, Pace};
pub(crate) use rm_lock::{RmLock, UnderRmLock};
#[cfg(test)]
pub(crate) use space_ranges::MOST_RANGES;
pub(crate) use space_ranges::{Mapped, Space, SpaceRanges};
