//! The monitor's memory for a struct that the driver writes to, with spare bytes behind the struct.
//!
//! The driver copies as many bytes as its own struct has. For a call of UVM and the parameters of an allocation, it
//! does not ask for the caller's size (`UVM_ROUTE_CMD_STACK_INIT_CHECK`, uvm_ioctl.h; `rmapiParamsCopyInit`,
//! param_copy.c). So a driver whose struct has grown reads zeroes behind the monitor's struct, and writes its answer
//! there. Knows no calls.

use std::ops::{Deref, DerefMut};

/// The spare bytes behind a struct.
const SPARE_BYTES: usize = 256;

/// The bytes of a struct, and spare bytes behind them.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    /// The struct and the spare bytes.
    all: Vec<u8>,
    size: usize,
}

impl Buffer {
    /// A struct of `size` zeroes.
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

    /// Makes the buffer a struct of `size` zeroes.
    pub(crate) fn reset(&mut self, size: usize) {
        self.reset_with(size, SPARE_BYTES);
    }

    /// Makes the buffer a list of `size` zeroes. Each entry may be up to twice as large for the driver.
    pub(crate) fn reset_list(&mut self, size: usize) {
        self.reset_with(size, size.max(SPARE_BYTES));
    }

    fn reset_with(&mut self, size: usize, spare: usize) {
        self.all.clear();
        self.all.resize(size + spare, 0);
        self.size = size;
    }

    /// Makes the buffer a struct of no bytes.
    pub(crate) fn clear(&mut self) {
        self.reset(0);
    }

    /// The struct's address, as a field of another struct.
    pub(crate) fn address(&mut self) -> u64 {
        self.pointer().addr() as u64
    }

    /// The first byte of the struct. The spare bytes follow the struct.
    pub(crate) fn pointer(&mut self) -> *mut u8 {
        self.all.as_mut_ptr()
    }

    /// Whether the driver has written into the spare bytes: its struct is larger then.
    pub(crate) fn was_exceeded(&self) -> bool {
        self.all.iter().skip(self.size).any(|byte| *byte != 0)
    }

    /// The bytes that are allocated.
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

    /// Writes as a driver does whose struct is `by` bytes larger.
    fn write_as_grown(buffer: &mut Buffer, by: usize) {
        let size = buffer.len() + by;
        // Past the struct's end, as the kernel does, which knows only the address.
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
