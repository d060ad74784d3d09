//! Copies of a call's struct and of what it points at, in buffers that each thread retains for its next call; and which
//! copies go back to the caller.
//!
//! The whole page of the call's struct is copied: most programs have both the struct and its parameters on their
//! stack, and a second copy from another process costs a microsecond. This file doesn't know what a call does.

use nix::errno::Errno;

use crate::caller::target::Target;
use crate::node::Buffer;
use nvrm::{Layout, Meaning, control};

/// Bytes that are copied at once: no machine has smaller pages.
const PAGE_BYTES: usize = 4096;

/// The largest buffer, in bytes, that a thread retains for its next call.
const RETAINED_BYTES: usize = 16 << 10;

/// One of the copies of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Copy {
    Struct,
    Params,
    /// A piece of what the parameters point at: its offset in the list, and its bytes.
    Piece(usize, usize),
}

/// The copies of a call, in buffers that a thread retains for the next one.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) bytes: Buffer,
    /// The parameters: what the struct points at.
    pub(crate) params: Buffer,
    /// What the parameters point at, one piece after another.
    pub(crate) list: Buffer,
    /// The struct and its parameters as they were read; empty if they aren't remembered.
    pub(crate) input: Vec<u8>,
    page: Page,
}

/// A page of the caller's memory, as it was when the struct was read.
#[derive(Debug)]
struct Page {
    /// The page's address; `None` if no page is copied.
    begin: Option<u64>,
    bytes: Box<[u8; PAGE_BYTES]>,
}

impl Default for Page {
    fn default() -> Self {
        Page { begin: None, bytes: Box::new([0; PAGE_BYTES]) }
    }
}

impl Page {
    /// Copies the page of `address`, if it has all `size` bytes from there on.
    fn load(&mut self, target: &Target, address: u64, size: usize) {
        let begin = address & !(PAGE_BYTES as u64 - 1);
        let fits = size != 0 && size as u64 <= PAGE_BYTES as u64 - (address - begin);
        let loaded = fits && target.read(begin, &mut self.bytes[..]).is_ok();
        self.begin = loaded.then_some(begin);
    }

    fn get(&self, address: u64, size: usize) -> Option<&[u8]> {
        let from = usize::try_from(address.checked_sub(self.begin?)?).ok()?;
        self.bytes.get(from..from.checked_add(size)?)
    }

    /// Fills `bytes` from the caller's memory at `address`: all of them, or it fails.
    fn read(&self, target: &Target, address: u64, bytes: &mut [u8]) -> Result<(), Errno> {
        match self.get(address, bytes.len()) {
            Some(copy) => bytes.copy_from_slice(copy),
            None => target.read(address, bytes)?,
        }
        Ok(())
    }
}

impl Scratch {
    /// Forgets what was read for the last call.
    pub(crate) fn begin(&mut self) {
        self.input.clear();
        self.page.begin = None;
    }

    /// Frees buffers that a large call has made larger than [`RETAINED_BYTES`].
    pub(crate) fn shrink(&mut self) {
        for copy in [&mut self.bytes, &mut self.params, &mut self.list] {
            if copy.capacity() > RETAINED_BYTES {
                *copy = Buffer::default();
            }
        }
        if self.input.capacity() > RETAINED_BYTES {
            self.input = Vec::new();
        }
    }

    pub(crate) fn read_struct(
        &mut self,
        target: &Target,
        address: u64,
        size: usize,
    ) -> Result<(), Errno> {
        self.params.clear();
        self.bytes.reset(size);
        if self.page.get(address, size).is_none() {
            self.page.load(target, address, size);
        }
        self.page.read(target, address, &mut self.bytes)
    }

    pub(crate) fn read_params(
        &mut self,
        target: &Target,
        address: u64,
        size: usize,
    ) -> Result<(), Errno> {
        self.params.reset(size);
        self.page.read(target, address, &mut self.params)
    }

    /// Copies a piece of what the parameters point at to its place in the list, which has space for it.
    pub(crate) fn read_piece(
        &mut self,
        target: &Target,
        address: u64,
        (at, bytes): (usize, usize),
    ) -> Result<(), Errno> {
        let copy = self.list.get_mut(at..at + bytes).unwrap_or_default();
        self.page.read(target, address, copy)
    }

    /// Remembers the struct and the parameters as they were read. They are unchanged since then.
    pub(crate) fn remember(&mut self) {
        self.input.clear();
        self.input.extend_from_slice(&self.bytes);
        self.input.extend_from_slice(&self.params);
    }

    /// Changes a field of the struct, or of a part of it.
    pub(crate) fn patch(&mut self, part: &Layout, meaning: Meaning, value: u64) {
        if let Some(patch) = part.patch(meaning, value) {
            let _ = patch.apply(&mut self.bytes);
        }
    }

    /// A field of the struct, or of a part of it.
    pub(crate) fn field(&self, part: &'static Layout, meaning: Meaning) -> Option<u64> {
        part.view(&self.bytes)?.u64(meaning)
    }

    /// The struct as it was read; empty if it isn't remembered.
    pub(crate) fn bytes_read(&self) -> &[u8] {
        self.input.get(..self.bytes.len()).unwrap_or_default()
    }

    /// The parameters as they were read; empty if they aren't remembered.
    pub(crate) fn params_read(&self) -> &[u8] {
        self.input.get(self.bytes.len()..).unwrap_or_default()
    }

    pub(crate) fn copy(&self, copy: Copy) -> &[u8] {
        match copy {
            Copy::Struct => &self.bytes,
            Copy::Params => &self.params,
            Copy::Piece(at, bytes) => self.list.get(at..at + bytes).unwrap_or_default(),
        }
    }

    /// Whether the caller's memory has the same bytes already, so that nothing needs to be written.
    fn is_as_read(&self, copy: Copy) -> bool {
        let read = match copy {
            Copy::Struct => self.input.get(..self.bytes.len()),
            Copy::Params => self.input.get(self.bytes.len()..),
            Copy::Piece(..) => None,
        };
        read == Some(self.copy(copy))
    }
}

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

    /// Writes all copies to the caller's memory. Fails if the memory can't be written.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::caller::target::Targets;

    #[test]
    fn data_in_one_page_is_copied_together() {
        let memory = vec![7_u8; 3 * PAGE_BYTES];
        let first = memory.as_ptr().addr().next_multiple_of(PAGE_BYTES) as u64;
        let target = Targets::new(false).unwrap().get(std::process::id().cast_signed()).unwrap();
        let mut scratch = Scratch::default();
        scratch.begin();
        scratch.read_struct(&target, first + 64, 32).unwrap();
        assert_eq!(scratch.bytes[..], [7; 32]);
        assert!(scratch.page.get(first, PAGE_BYTES).is_some());
        assert!(scratch.page.get(first, PAGE_BYTES + 1).is_none());
        assert!(scratch.page.get(first - 1, 1).is_none());
        assert!(scratch.page.get(u64::MAX, 1).is_none());
        for (address, size) in [(first, 100), (first + 4000, 200), (first + 4096, 8)] {
            scratch.read_params(&target, address, size).unwrap();
            assert_eq!(scratch.params[..], vec![7; size]);
        }
        // A struct across two pages, and a call without a struct.
        scratch.begin();
        scratch.read_struct(&target, first + 4090, 16).unwrap();
        assert_eq!(scratch.bytes[..], [7; 16]);
        assert_eq!(scratch.page.begin, None);
        scratch.read_struct(&target, 0, 0).unwrap();
        scratch.read_struct(&target, 8, 8).unwrap_err();
        scratch.read_struct(&target, u64::MAX, 8).unwrap_err();
    }

    #[test]
    fn only_changed_copies_differ_from_those_read() {
        let (bytes, params) = (Buffer::of(&[1; 4]), Buffer::of(&[2; 4]));
        let mut scratch = Scratch { bytes, params, ..Scratch::default() };
        scratch.begin();
        assert!(!scratch.is_as_read(Copy::Struct) && !scratch.is_as_read(Copy::Params));
        scratch.remember();
        assert!(scratch.is_as_read(Copy::Struct) && scratch.is_as_read(Copy::Params));
        scratch.bytes = Buffer::of(&[1, 1, 1, 0]);
        assert!(!scratch.is_as_read(Copy::Struct) && scratch.is_as_read(Copy::Params));
        assert!(!scratch.is_as_read(Copy::Piece(0, 0)));
    }
}
