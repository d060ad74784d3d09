//! What a debugger reads or writes of memory at once, in parts that are small enough to be copied.
//!
//! `NV83DE_CTRL_CMD_DEBUG_READ_MEMORY` and its like take as many bytes as memory has
//! (`RMAPI_PARAM_COPY_FLAGS_DISABLE_MAX_SIZE_CHECK`, embedded_param_copy.c). Their structs lie alike in
//! all releases: handle, length, offset, address. A part is the same call for fewer bytes.

use super::{Direction, MAX_PIECES_BYTES, long, word};
use crate::rm::layout::Patch;
use crate::rm::number::{NV83DE_CTRL_CMD_DEBUG_READ_MEMORY, NV83DE_CTRL_CMD_DEBUG_WRITE_MEMORY};

/// Where a struct has its length, the offset in the memory, and the address of the caller's bytes; and
/// its own bytes.
const LENGTH: usize = 4;
const OFFSET: usize = 8;
const ADDRESS: usize = 16;
const BYTES: usize = 24;

/// What is read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    length: u32,
    offset: u64,
    address: u64,
    /// Who writes the caller's bytes.
    pub direction: Direction,
}

/// A part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Where the caller's bytes are.
    pub address: u64,
    /// How many.
    pub bytes: usize,
    offset: u64,
}

impl Access {
    /// What a control with these parameters accesses, where that is more than is copied at once.
    /// What can't be of any memory isn't an access.
    #[must_use]
    pub fn of(command: u32, params: &[u8]) -> Option<Self> {
        let direction = match command {
            NV83DE_CTRL_CMD_DEBUG_READ_MEMORY => Direction::Out,
            NV83DE_CTRL_CMD_DEBUG_WRITE_MEMORY => Direction::In,
            _ => return None,
        };
        let (length, offset) = (word(params, LENGTH)?, long(params, OFFSET)?);
        let address = long(params, ADDRESS)?;
        offset.checked_add(length.into())?;
        address.checked_add(length.into())?;
        let is_long = usize::try_from(length).is_ok_and(|length| length > MAX_PIECES_BYTES);
        let is_whole = params.len() == BYTES && address != 0 && is_long;
        is_whole.then_some(Access { length, offset, address, direction })
    }

    /// Its parts, the last one first: where that isn't in the memory any more, nothing is done.
    pub fn parts(&self) -> impl Iterator<Item = Part> + '_ {
        let part = u32::try_from(MAX_PIECES_BYTES).unwrap_or(u32::MAX);
        (0..self.length.div_ceil(part)).rev().map(move |number| {
            let from = number * part;
            let bytes = usize::try_from((self.length - from).min(part)).unwrap_or(0);
            let (address, offset) = (self.address + u64::from(from), self.offset + u64::from(from));
            Part { address, bytes, offset }
        })
    }

    /// What makes parameters of a part those of the whole again.
    #[must_use]
    pub fn patches(&self) -> [Patch; 3] {
        patches(self.length, self.offset, self.address)
    }
}

impl Part {
    /// What makes parameters of the whole those of this part, of a copy at `address`.
    #[must_use]
    pub fn patches(&self, address: u64) -> [Patch; 3] {
        patches(u32::try_from(self.bytes).unwrap_or(0), self.offset, address)
    }
}

fn patches(length: u32, offset: u64, address: u64) -> [Patch; 3] {
    [Patch::word(LENGTH, length), Patch::long(OFFSET, offset), Patch::long(ADDRESS, address)]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn params(length: u32, offset: u64, address: u64) -> [u8; BYTES] {
        let mut params = [7; BYTES];
        assert!(patches(length, offset, address).iter().all(|patch| patch.apply(&mut params)));
        params
    }

    #[test]
    fn what_fits_or_can_not_be_is_no_long_access() {
        let read = NV83DE_CTRL_CMD_DEBUG_READ_MEMORY;
        let most = u32::try_from(MAX_PIECES_BYTES).unwrap();
        assert!(Access::of(read, &params(most + 1, 0, 0x1000)).is_some());
        assert!(Access::of(0x83de_0317, &params(most + 1, 0, 0x1000)).is_none());
        for params in [
            params(most, 0, 0x1000),
            params(most + 1, u64::MAX - 7, 0x1000),
            params(most + 1, 0, u64::MAX - 7),
            params(most + 1, 0, 0),
        ] {
            assert_eq!(Access::of(read, &params), None);
        }
        assert_eq!(Access::of(read, &params(u32::MAX, 0, 1)[..16]), None);
    }

    proptest! {
        #[test]
        fn the_parts_are_the_whole(
            length in 1_u32..64 << 20, offset in 0..1_u64 << 40, address in 1..1_u64 << 46,
        ) {
            let whole = params(length, offset, address);
            let Some(access) = Access::of(NV83DE_CTRL_CMD_DEBUG_WRITE_MEMORY, &whole) else {
                prop_assert!(length as usize <= MAX_PIECES_BYTES);
                return Ok(());
            };
            let mut end = u64::from(length);
            for part in access.parts() {
                prop_assert!((1..=MAX_PIECES_BYTES).contains(&part.bytes));
                end -= part.bytes as u64;
                prop_assert_eq!((part.address, part.offset), (address + end, offset + end));
                let mut params = whole;
                prop_assert!(part.patches(9).iter().all(|patch| patch.apply(&mut params)));
                prop_assert_eq!(long(&params, ADDRESS), Some(9));
                prop_assert!(access.patches().iter().all(|patch| patch.apply(&mut params)));
                prop_assert_eq!(params, whole);
            }
            prop_assert_eq!(end, 0);
        }
    }
}
