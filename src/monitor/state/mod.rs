//! What the monitor knows of the container.

mod books;
mod change_flag;
mod channels;
mod container_state;
mod devices;
mod due;
mod groups;
mod lane;
mod makers;
mod occasion;
mod pace;
mod processor_budget;
mod self_ranges;
mod space_ranges;

#[cfg(test)]
pub(crate) use books::tests::books_of;
pub(crate) use books::{BOUNDS, Books, NO_CLIENT};
pub(crate) use change_flag::ChangeFlag;
#[cfg(test)]
pub(crate) use channels::MOST_CHANNELS;
pub(crate) use channels::{ChannelName, Channels};
pub(crate) use container_state::{ContainerState, OpenBooks};
pub(crate) use due::Due;
pub(crate) use groups::{DueSlice, Groups, MOST_GROUPS, computes};
pub(crate) use lane::{Lane, OnLane};
pub(crate) use makers::{Initialization, MOST_FILES};
pub(crate) use occasion::{Depth, Occasion};
pub(crate) use processor_budget::ProcessorBudget;
#[cfg(test)]
pub(crate) use space_ranges::MOST_RANGES;
pub(crate) use space_ranges::{Mapped, Space, SpaceRanges};
