//! Decides whether there is room for one more channel group, or for one more channel.

use crate::monitor::decide::denial::Denial;
use crate::monitor::state::{Channels, Groups, MOST_GROUPS};

/// The most channels of a container on a GPU that compute outside groups: each has the driver's slice.
const MOST_OUTSIDE_GROUPS: usize = 4;

/// Decides on a group, or a name of one, on a GPU that may have `most` groups.
///
/// # Errors
///
/// Where the GPU, or the container, has no room for it.
pub(crate) fn room_for_group(groups: &Groups, gpu: usize, most: u32) -> Result<(), Denial> {
    if !groups.has_room() {
        return Err(Denial::GroupsFull { most: MOST_GROUPS });
    }
    match groups.count(gpu) < usize::try_from(most).unwrap_or(usize::MAX) {
        true => Ok(()),
        false => Err(Denial::GroupsOfGpuFull { most }),
    }
}

/// Decides on a channel that computes.
///
/// # Errors
///
/// Where no more channels can be known.
pub(crate) fn room_for_channel(channels: &Channels) -> Result<(), Denial> {
    if channels.has_room() { Ok(()) } else { Err(Denial::ChannelsFull) }
}

/// Decides on a channel that computes outside groups, where the GPU has `count` of these. `is_bounded`: whether slices
/// are set on the GPU, and none can be set for such a channel.
///
/// # Errors
///
/// Where there are [`MOST_OUTSIDE_GROUPS`] already.
pub(crate) fn room_outside_groups(is_bounded: bool, count: usize) -> Result<(), Denial> {
    match is_bounded && count >= MOST_OUTSIDE_GROUPS {
        true => Err(Denial::OutsideGroupsFull { most: MOST_OUTSIDE_GROUPS }),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::journal::Record;

    fn enter(groups: &mut Groups, gpu: usize, handle: u32) {
        let (client, parent) = (1, 2);
        let group = Record::Group { gpu, client, parent, handle, certain: true, reach: None };
        groups.replay(group);
    }

    #[test]
    fn each_gpu_has_its_bound_of_groups_and_the_container_has_one() {
        let mut groups = Groups::default();
        (0..3).for_each(|handle| enter(&mut groups, 0, handle));
        assert_eq!(room_for_group(&groups, 0, 4), Ok(()));
        assert_eq!(room_for_group(&groups, 0, 3), Err(Denial::GroupsOfGpuFull { most: 3 }));
        assert_eq!(room_for_group(&groups, 1, 3), Ok(()));
        let all = u32::try_from(MOST_GROUPS).unwrap();
        (0..all).for_each(|handle| enter(&mut groups, 0, handle));
        assert_eq!(room_for_group(&groups, 1, 3), Err(Denial::GroupsFull { most: MOST_GROUPS }));
    }

    #[test]
    fn channels_outside_groups_are_bounded_where_slices_are_set() {
        assert_eq!(room_outside_groups(true, MOST_OUTSIDE_GROUPS - 1), Ok(()));
        assert!(room_outside_groups(true, MOST_OUTSIDE_GROUPS).is_err());
        assert_eq!(room_outside_groups(false, usize::MAX), Ok(()));
    }
}
