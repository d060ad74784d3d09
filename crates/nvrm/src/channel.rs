//! Taking channels off a GPU and back: `NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS`.
//!
//! `NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS` (ctrl2080fifo.h), alike from 515.43.04 to 595.45.04:
//! bDisable, numChannels at 4, bOnlyDisableScheduling at 8, bRewindGpPut at 9, pRunlistPreemptEvent at 16,
//! hClientList at 24, hChannelList at 280. All of a list or none. An H100 was seen to do so within a
//! millisecond, for channels of any client, and asked by any process (`tests/gpu/results`, 2026-11-26).
use alloc::vec;
use alloc::vec::Vec;

/// What the classes of all channels end in: `GF100_CHANNEL_GPFIFO` 0x906f, and so on.
pub const ANY_CHANNEL: u32 = 0x6f;

/// `NV2080_ENGINE_TYPE_GRAPHICS` (cl2080_notification.h), which also computes.
pub const ENGINE_GRAPHICS: u32 = 1;

/// Channels that one call can name (`NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES`).
pub const MOST_CHANNELS: usize = 64;

const CLIENTS: usize = 24;
const CHANNELS: usize = CLIENTS + 4 * MOST_CHANNELS;
const BYTES: usize = CHANNELS + 4 * MOST_CHANNELS;

/// The parameters that take these channels, by client and handle, off their GPU or back onto it; those past
/// [`MOST_CHANNELS`] are left out.
#[must_use]
pub fn ask_disable(disable: bool, channels: &[(u32, u32)]) -> Vec<u8> {
    let mut params = vec![0; BYTES];
    let mut put = |at: usize, value: u32| {
        if let Some(field) = params.get_mut(at..at + 4) {
            field.copy_from_slice(&value.to_le_bytes());
        }
    };
    let channels = &channels[..channels.len().min(MOST_CHANNELS)];
    put(0, u32::from(disable));
    put(4, u32::try_from(channels.len()).unwrap_or(0));
    for (at, (client, channel)) in channels.iter().enumerate() {
        put(CLIENTS + 4 * at, *client);
        put(CHANNELS + 4 * at, *channel);
    }
    params
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channel_list_is_cut_at_its_capacity() {
        let params = ask_disable(true, &[(7, 8), (9, 10)]);
        let word = |at: usize| {
            u32::from_le_bytes([params[at], params[at + 1], params[at + 2], params[at + 3]])
        };
        assert_eq!(params.len(), 536);
        assert_eq!([0, 4, 8, 24, 28, 32, 280, 284].map(word), [1, 2, 0, 7, 9, 0, 8, 10]);
        let many: Vec<(u32, u32)> = (0..100).map(|handle| (1, handle)).collect();
        let params = ask_disable(false, &many);
        assert_eq!((params[0], params[4], params.len()), (0, 64, 536));
    }
}
