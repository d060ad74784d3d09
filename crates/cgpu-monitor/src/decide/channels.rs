//! Decides whether there is capacity for one more channel group, or for one more channel.

use crate::decide::refusal_reason::RefusalReason;
use crate::state::{Channels, Groups, MOST_GROUPS};

/// The most channels of a container on a GPU that compute outside groups: each has the driver's slice.
const MOST_OUTSIDE_GROUPS: usize = 4;

/// Decides on a group, or a handle of one, on a GPU that may have `most` groups: it is refused if the GPU or the
/// container has no capacity left.
pub(crate) fn capacity_for_group(
    groups: &Groups,
    gpu: usize,
    most: u32,
) -> Result<(), RefusalReason> {
    if !groups.has_capacity() {
        return Err(RefusalReason::GroupsFull { most: MOST_GROUPS });
    }
    match groups.count(gpu) < usize::try_from(most).unwrap_or(usize::MAX) {
        true => Ok(()),
        false => Err(RefusalReason::GroupsOfGpuFull { most }),
    }
}

/// Decides on a channel that computes: it is refused if no more channels can be known.
pub(crate) fn capacity_for_channel(channels: &Channels) -> Result<(), RefusalReason> {
    if channels.has_capacity() { Ok(()) } else { Err(RefusalReason::ChannelsFull) }
}

/// Decides on a channel that computes outside groups, if the container has `count` of these on a GPU with slices: it is
/// refused from [`MOST_OUTSIDE_GROUPS`] on.
pub(crate) fn capacity_outside_groups(count: usize) -> Result<(), RefusalReason> {
    match count < MOST_OUTSIDE_GROUPS {
        true => Ok(()),
        false => Err(RefusalReason::OutsideGroupsFull { most: MOST_OUTSIDE_GROUPS }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::Record;
    use crate::state::MOST_CHANNELS;
    use cgpu_core::ledger::Process;

    fn enter(groups: &mut Groups, gpu: usize, handle: u32) {
        let (client, parent) = (1, 2);
        let group = Record::Group { gpu, client, parent, handle, certain: true, reach: None };
        groups.replay(group);
    }

    #[test]
    fn channel_groups_are_bounded_per_gpu_and_container() {
        let mut groups = Groups::default();
        (0..3).for_each(|handle| enter(&mut groups, 0, handle));
        assert_eq!(capacity_for_group(&groups, 0, 4), Ok(()));
        assert_eq!(
            capacity_for_group(&groups, 0, 3),
            Err(RefusalReason::GroupsOfGpuFull { most: 3 })
        );
        assert_eq!(capacity_for_group(&groups, 1, 3), Ok(()));
        let all = u32::try_from(MOST_GROUPS).unwrap();
        (0..all).for_each(|handle| enter(&mut groups, 0, handle));
        assert_eq!(
            capacity_for_group(&groups, 1, 3),
            Err(RefusalReason::GroupsFull { most: MOST_GROUPS })
        );
    }

    #[test]
    fn four_channels_compute_outside_groups() {
        assert_eq!(capacity_outside_groups(3), Ok(()));
        assert_eq!(capacity_outside_groups(4), Err(RefusalReason::OutsideGroupsFull { most: 4 }));
    }

    #[test]
    fn a_channel_that_cannot_be_known_is_refused() {
        let mut channels = Channels::default();
        let (gpu, client, parent, process) = (0, 1, 2, Process(3));
        for handle in 0..MOST_CHANNELS {
            assert_eq!(capacity_for_channel(&channels), Ok(()), "{handle}");
            channels.replay(Record::Channel { gpu, client, parent, handle, process });
        }
        assert_eq!(capacity_for_channel(&channels), Err(RefusalReason::ChannelsFull));
    }
}
