//! The copies that a call writes to its caller's memory, and their addresses there.

use nix::errno::Errno;

use crate::monitor::caller::{Copy, Scratch, Target};
use crate::rm::control;

/// The most copies that go back: the struct, its parameters, and the pieces that the parameters point at.
const MOST_COPIES: usize = 2 + control::MAX_PIECES;

/// The copies that go back, each with its address, in the order in which they are written. The struct has the first
/// place.
#[derive(Debug, Default)]
pub(crate) struct WriteBack([Option<(u64, Copy)>; MOST_COPIES]);

impl WriteBack {
    pub(crate) fn set(&mut self, place: usize, address: u64, copy: Copy) {
        if let Some(write) = self.0.get_mut(place) {
            *write = Some((address, copy));
        }
    }

    /// Drops all copies but the struct.
    pub(crate) fn keep_struct_alone(&mut self) {
        self.0.iter_mut().skip(1).for_each(|write| *write = None);
    }

    /// Drops copies whose bytes the caller's memory has already.
    pub(crate) fn drop_unchanged(&mut self, scratch: &Scratch) {
        for write in &mut self.0 {
            write.take_if(|(_, copy)| scratch.is_as_read(*copy));
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    pub(crate) fn has(&self, copy: Copy) -> bool {
        self.0.iter().flatten().any(|(_, written)| *written == copy)
    }

    /// Writes all copies to the caller's memory.
    ///
    /// # Errors
    ///
    /// Where the memory can't be written.
    pub(crate) fn write(&self, target: &Target, scratch: &Scratch) -> Result<(), Errno> {
        let copies = |(address, copy)| (address, scratch.copy(copy));
        target.write(&self.0.map(|write| write.map(copies)))
    }

    /// The address and the bytes of each copy.
    pub(crate) fn output(&self, scratch: &Scratch) -> Vec<(u64, Vec<u8>)> {
        let bytes = |(address, copy): &(u64, Copy)| (*address, scratch.copy(*copy).to_vec());
        self.0.iter().flatten().map(bytes).collect()
    }
}
