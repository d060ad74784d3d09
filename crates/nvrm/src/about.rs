//! What a subdevice says of its GPU and of the processes that use it, UUID and bytes by process, which
//! subdevice a device has, and what a client says of an object.
//!
//! `NV2080_CTRL_CMD_GPU_GET_GID_INFO` and `GET_PID_INFO` of `ctrl2080gpu.h`,
//! `NV0080_CTRL_CMD_GPU_FIND_SUBDEVICE_HANDLE` of `ctrl0080gpu.h`, and
//! `NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO` of `ctrl0000client.h`,
//! which lie alike in all releases from 515.43.04 to 595.45.04. Parameters to ask with,
//! and what the answers say; which process asks, and whose the processes are, is not known here.

use alloc::vec;
use alloc::vec::Vec;

use super::number::NV_OK;

/// Bytes of `NV2080_CTRL_GPU_GET_GID_INFO_PARAMS`: index, flags, length, 256 of data.
pub const GID_BYTES: usize = 268;

/// Bytes of `NV2080_CTRL_GPU_GET_PID_INFO_PARAMS`: count, 200 entries.
pub const PID_INFO_BYTES: usize = 8 + PID_INFO_ENTRY_BYTES * PID_INFO_MAX;

/// `NV2080_CTRL_GPU_GET_PID_INFO_MAX_COUNT`.
pub const PID_INFO_MAX: usize = 200;

/// Bytes of an `NV2080_CTRL_GPU_PID_INFO`: pid, index, result, six amounts from 16 on.
const PID_INFO_ENTRY_BYTES: usize = 72;

/// `NV2080_GPU_CMD_GPU_GET_GID_FLAGS_FORMAT_BINARY`.
const GID_BINARY: u32 = 2;

/// A GPU's UUID.
pub type Uuid = [u8; 16];

/// What a process has on a GPU, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// Its pid, in the pid namespace of the process that asked.
    pub pid: u32,
    /// Memory that it made.
    pub made_bytes: u64,
    /// Memory of others that it duplicated.
    pub duplicated_bytes: u64,
}

impl Held {
    /// All that it has a name for, in bytes; what it has by two names, twice.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.made_bytes.saturating_add(self.duplicated_bytes)
    }
}

fn word(bytes: &[u8], offset: usize) -> u32 {
    let field = bytes.get(offset..).and_then(<[u8]>::first_chunk);
    field.map_or(0, |field| u32::from_le_bytes(*field))
}

fn long(bytes: &[u8], offset: usize) -> u64 {
    let field = bytes.get(offset..).and_then(<[u8]>::first_chunk);
    field.map_or(0, |field| u64::from_le_bytes(*field))
}

fn put(bytes: &mut [u8], offset: usize, value: u32) {
    if let Some(field) = bytes.get_mut(offset..offset + 4) {
        field.copy_from_slice(&value.to_le_bytes());
    }
}

/// Parameters that ask for the UUID.
#[must_use]
pub fn ask_uuid() -> [u8; GID_BYTES] {
    let mut params = [0; GID_BYTES];
    put(&mut params, 4, GID_BINARY);
    params
}

/// The UUID in an answer, which may be binary or as [`uuid`] reads it.
#[must_use]
pub fn answered_uuid(params: &[u8]) -> Option<Uuid> {
    let length = usize::try_from(word(params, 8)).ok()?;
    let data = params.get(12..)?.get(..length)?;
    if let Ok(binary) = data.try_into() {
        return Some(binary);
    }
    let text = core::str::from_utf8(data).ok()?;
    uuid(text.trim_end_matches('\0'))
}

/// Bytes of `NV0080_CTRL_GPU_FIND_SUBDEVICE_HANDLE_PARAM`: instance, of which there is one where
/// GPUs aren't joined, and handle.
pub const FIND_SUBDEVICE_BYTES: usize = 8;

/// The handle of a device's subdevice in an answer.
#[must_use]
pub fn answered_subdevice(params: &[u8; FIND_SUBDEVICE_BYTES]) -> u32 {
    word(params, 4)
}

/// Bytes of `NV0000_CTRL_CLIENT_GET_HANDLE_INFO_PARAMS`: object, index, and eight of data.
pub const HANDLE_INFO_BYTES: usize = 16;

/// `NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_CLASSID`.
const INDEX_CLASS: u32 = 2;

/// Parameters that ask for an object's class.
#[must_use]
pub fn ask_class(handle: u32) -> [u8; HANDLE_INFO_BYTES] {
    let mut params = [0; HANDLE_INFO_BYTES];
    put(&mut params, 0, handle);
    put(&mut params, 4, INDEX_CLASS);
    params
}

/// The class in an answer.
#[must_use]
pub fn answered_class(params: &[u8]) -> u32 {
    word(params, 8)
}

/// The UUID that `GPU-` and 32 hexadecimal digits with dashes say.
#[must_use]
pub fn uuid(text: &str) -> Option<Uuid> {
    let mut digits = text.strip_prefix("GPU-")?.bytes().filter(|byte| *byte != b'-');
    let mut digit = || char::from(digits.next()?).to_digit(16);
    let mut found = [0; 16];
    for byte in &mut found {
        *byte = u8::try_from(digit()? << 4 | digit()?).ok()?;
    }
    digits.next().is_none().then_some(found)
}

/// `NV0041_CTRL_SURFACE_INFO_INDEX_PHYS_SIZE`, in units of
/// `NV0041_CTRL_SURFACE_INFO_PHYS_SIZE_SCALE_FACTOR` (`ctrl0041.h`, which later releases keep next
/// to an index of bytes).
const INDEX_PHYS_SIZE: u32 = 7;
const PHYS_SIZE_SCALE: u64 = 0x1000;

/// A list of one entry that asks for a memory object's size, index and answer, for
/// [`ask_surface`].
#[must_use]
pub fn ask_size() -> [u8; 8] {
    let mut entry = [0; 8];
    put(&mut entry, 0, INDEX_PHYS_SIZE);
    entry
}

/// `NV0041_CTRL_GET_SURFACE_INFO_PARAMS` of such a list, which lies at `address`.
#[must_use]
pub fn ask_surface(address: u64) -> [u8; 16] {
    let mut params = [0; 16];
    put(&mut params, 0, 1);
    params[8..].copy_from_slice(&address.to_le_bytes());
    params
}

/// The size in an answered entry, in bytes: that of the memory itself, as driver usage counts it
/// (`memdescGetSize`, `mem_ctrl.c`; `memConstructCommon_IMPL`, `mem.c`).
#[must_use]
pub fn answered_size(entry: &[u8]) -> u64 {
    u64::from(word(entry, 4)) * PHYS_SIZE_SCALE
}

/// Parameters that ask what `pids` hold, at most [`PID_INFO_MAX`] of them.
#[must_use]
pub fn ask_held(pids: &[u32]) -> Vec<u8> {
    let mut params = vec![0; PID_INFO_BYTES];
    let pids = pids.get(..PID_INFO_MAX).unwrap_or(pids);
    put(&mut params, 0, u32::try_from(pids.len()).unwrap_or(0));
    for (at, pid) in pids.iter().enumerate() {
        put(&mut params, 8 + at * PID_INFO_ENTRY_BYTES, *pid);
    }
    params
}

/// What the processes of an answer hold; those that have exited by now are left out.
pub fn answered_held(params: &[u8]) -> impl Iterator<Item = Held> {
    let count = usize::try_from(word(params, 0)).unwrap_or(0).min(PID_INFO_MAX);
    let entries = params.get(8..).unwrap_or_default().chunks_exact(PID_INFO_ENTRY_BYTES);
    entries.take(count).filter(|entry| word(entry, 8) == NV_OK).map(|entry| Held {
        pid: word(entry, 0),
        // Private and owned, unprotected and protected.
        made_bytes: [16, 24, 40, 48]
            .into_iter()
            .fold(0, |sum: u64, at| sum.saturating_add(long(entry, at))),
        duplicated_bytes: long(entry, 32).saturating_add(long(entry, 56)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_is_read_as_text_and_bytes() {
        let found = uuid("GPU-63677075-2d73-696d-4000-800000000001").unwrap();
        assert_eq!(&found[..8], b"cgpu-sim");
        for wrong in ["", "GPU-", "MIG-63677075-2d73-696d-4000-800000000001", "GPU-6367"] {
            assert_eq!(uuid(wrong), None, "{wrong}");
        }
        let mut params = ask_uuid();
        put(&mut params, 8, 16);
        params[12..28].copy_from_slice(&found);
        assert_eq!(answered_uuid(&params), Some(found));
        let text = b"GPU-63677075-2d73-696d-4000-800000000001\0";
        put(&mut params, 8, u32::try_from(text.len()).unwrap());
        params[12..12 + text.len()].copy_from_slice(text);
        assert_eq!(answered_uuid(&params), Some(found));
        put(&mut params, 8, u32::MAX);
        assert_eq!(answered_uuid(&params), None);
    }

    #[test]
    fn a_size_is_in_pages_of_4_kib() {
        let mut entry = ask_size();
        assert_eq!(entry, [7, 0, 0, 0, 0, 0, 0, 0]);
        put(&mut entry, 4, u32::MAX);
        assert_eq!(answered_size(&entry), (1 << 44) - 4096);
        assert_eq!(ask_surface(0x1_0000_0002), [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0]);
    }

    #[test]
    fn amounts_are_read_of_those_that_are_there() {
        let mut params = ask_held(&[7, 8]);
        for (at, bytes) in [(16, 1_u64), (24, 2), (32, 4), (40, 8), (48, 16), (56, 32)] {
            params[8 + at..8 + at + 8].copy_from_slice(&bytes.to_le_bytes());
        }
        put(&mut params, 8 + 72 + 8, 0x57);
        let held: Vec<Held> = answered_held(&params).collect();
        assert_eq!(held, [Held { pid: 7, made_bytes: 27, duplicated_bytes: 36 }]);
        assert_eq!(ask_held(&vec![1; 999]).len(), PID_INFO_BYTES);
    }

    #[test]
    fn oversized_count_reads_nothing_beyond_the_table() {
        assert_eq!(answered_held(&[0xff; 9]).count(), 0);
    }
}
