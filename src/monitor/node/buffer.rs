//! Memory of ours that the driver writes to: a struct with spare room behind it.
//!
//! The driver copies its own structs, and for a call of UVM's and the parameters of an allocation it
//! doesn't ask how many bytes the caller has (`UVM_ROUTE_CMD_STACK_INIT_CHECK`, uvm_ioctl.h;
//! `rmapiParamsCopyInit`, param_copy.c). So one of a release whose struct has grown finds zeroes behind
//! ours, and answers there. Knows no calls.

use std::ops::{Deref, DerefMut};

/// Room behind a struct.
const SPARE_BYTES: usize = 256;

/// Bytes of a struct, and the room behind them.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    /// With the room.
    all: Vec<u8>,
    size: usize,
}

impl Buffer {
    /// A struct of so many zeroes.
    pub(crate) fn zeroed(size: usize) -> Self {
        let mut buffer = Self::default();
        buffer.reset(size);
        buffer
    }

    /// A copy of a struct.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }

    /// Makes it a struct of so many zeroes.
    pub(crate) fn reset(&mut self, size: usize) {
        self.reset_with(size, SPARE_BYTES);
    }

    /// Makes it a list of so many zeroes, whose entries may be twice as large for the driver.
    pub(crate) fn reset_list(&mut self, size: usize) {
        self.reset_with(size, size.max(SPARE_BYTES));
    }

    fn reset_with(&mut self, size: usize, spare: usize) {
        self.all.clear();
        self.all.resize(size + spare, 0);
        self.size = size;
    }

    /// Makes it a struct of no bytes.
    pub(crate) fn clear(&mut self) {
        self.reset(0);
    }

    /// Its address, for another struct to name.
    pub(crate) fn address(&mut self) -> u64 {
        self.pointer().addr() as u64
    }

    /// Where it begins, with the room behind.
    pub(crate) fn pointer(&mut self) -> *mut u8 {
        self.all.as_mut_ptr()
    }

    /// Whether the driver has said something in the room behind: then its struct is a larger one.
    pub(crate) fn was_exceeded(&self) -> bool {
        self.all.iter().skip(self.size).any(|byte| *byte != 0)
    }

    /// Bytes that it keeps.
    pub(crate) fn capacity(&self) -> usize {
        self.all.capacity()
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.all.get(..self.size).unwrap_or_default()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.all.get_mut(..self.size).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a driver does whose struct is that much larger.
    fn write_as_grown(buffer: &mut Buffer, by: usize) {
        let size = buffer.len() + by;
        // As the kernel does, by the address alone.
        buffer.all.get_mut(..size).expect("the room is part of it").fill(0xa5);
    }

    #[test]
    fn a_larger_struct_is_written_within_the_buffer_and_seen() {
        for size in [0, 4, 16, 20, 4096] {
            for list in [false, true] {
                let mut buffer = Buffer::zeroed(size);
                if list {
                    buffer.reset_list(size);
                }
                assert!(buffer.len() == size && !buffer.was_exceeded());
                write_as_grown(&mut buffer, 0);
                assert!(!buffer.was_exceeded());
                write_as_grown(&mut buffer, if list { size.max(SPARE_BYTES) } else { SPARE_BYTES });
                assert!(buffer.len() == size && buffer.was_exceeded());
                buffer.reset(size / 2);
                assert!(buffer.iter().all(|byte| *byte == 0) && !buffer.was_exceeded());
            }
        }
        let copy = Buffer::of(&[1, 2, 3]);
        assert!(copy[..] == [1, 2, 3] && !copy.was_exceeded());
        assert!(copy.capacity() >= 3 + SPARE_BYTES);
    }
}
