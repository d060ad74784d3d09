//! What the monitor knows of the container.

mod channels;
mod container_state;
mod creators;
mod groups;
mod rm_lock;
mod schedule;
mod space_ranges;

#[cfg(test)]
pub(crate) use channels::MOST_CHANNELS;
pub(crate) use channels::{ChannelName, Channels};
#[cfg(test)]
pub(crate) use container_state::tests::state_of;
pub(crate) use container_state::{BOUNDS, ContainerState, NO_CLIENT};
pub(crate) use creators::{Initialization, MOST_FILES};
pub(crate) use groups::{Groups, MOST_GROUPS, ScheduledSlice, computes};
pub(crate) use rm_lock::{RmLock, UnderRmLock};
pub(crate) use schedule::{AuditInterval, Idleness, Occasion, Schedule};
#[cfg(test)]
pub(crate) use space_ranges::MOST_RANGES;
pub(crate) use space_ranges::{Mapped, Space, SpaceRanges};
