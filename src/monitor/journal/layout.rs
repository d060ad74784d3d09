//! What outlives a worker: how the memory that the keeper holds for it is laid out.
//!
//! From its beginning: a head with a shelf, a slot for each thread, two halves of a log. A half
//! is a count of bytes and so many bytes of records; a record counts when the count
//! covers it. A record is a byte with its length and what `postcard` makes of a [`Record`]. One half is in use; when it's full, everything is written anew into
//! the other as the records that make it from nothing, and then the head names that
//! one: at each instant there is one whole log. Pure: records to bytes and back;
//! who maps the memory is not known here.

use postcard::experimental::max_size::MaxSize;
use serde::{Deserialize, Serialize};

use crate::ledger::{Entry, Process};

/// Bytes of the memory; it is sparse, and what isn't used takes nothing.
pub const JOURNAL_BYTES: usize = 32 << 20;

/// The number of this layout. Another layout, or another meaning of a record, has another number.
pub const FORMAT: u64 = 1;

/// Threads that can have a call, and so slots.
pub const SLOTS: usize = 32;

/// Bytes for the head.
pub const HEAD_BYTES: usize = 4096;

/// Where in the head the shelf begins, which has traces of calls whose reply nobody took; how many
/// it has room for, and bytes of each.
pub const TRACES_OFFSET: usize = 1024;
/// See [`TRACES_OFFSET`].
pub const TRACE_PLACES: usize = 48;
/// See [`TRACES_OFFSET`].
pub const TRACE_BYTES: usize = 48;

/// Bytes for a slot.
pub const SLOT_BYTES: usize = 256;

/// Where the first half begins.
pub const LOG_OFFSET: usize = HEAD_BYTES + SLOTS * SLOT_BYTES;

/// Bytes of a half, its count included.
pub const HALF_BYTES: usize = (JOURNAL_BYTES - LOG_OFFSET) / 2 / 4096 * 4096;

/// Bytes of a half before its records.
pub const COUNT_BYTES: usize = 64;

/// Bytes of the longest record, with the byte that has its length.
pub const RECORD_BYTES: usize = 1 + Record::POSTCARD_MAX_SIZE;

/// A log is not written anew before it has so many bytes.
const LEAST_BYTES: usize = 64 << 10;

/// What a log's records say.
///
/// A worker reads what a worker of an older version wrote. So after a release a new kind goes to the
/// end, here and in [`Entry`], and no kind's fields change; else [`FORMAT`] does, and an upgrade leaves running
/// containers to their old monitors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, MaxSize)]
pub enum Record {
    /// A change of the ledger.
    Ledger(Entry),
    /// A range of addresses in a space.
    AddRange {
        /// The space, by [`Space::number`](crate::monitor::state::space::Space).
        space: u64,
        /// The first address.
        base: u64,
        /// Its bytes.
        length: u64,
    },
    /// A file of the file system that is a node of UVM's.
    Node {
        /// `st_dev`.
        device: u64,
        /// `st_ino`.
        inode: u64,
    },
    /// A range that [`AddRange`](Self::AddRange) told of is gone.
    RemoveRange {
        /// The space.
        space: u64,
        /// The first address.
        base: u64,
    },
    /// A call is let go on that may initialize a file of UVM's, and no other.
    Initialize {
        /// The file's number.
        file: u32,
        /// Whose call it is.
        tid: u32,
        /// Whose memory the file is bound to, then.
        maker: Maker,
    },
    /// That is over, or known to be done.
    Initialized {
        /// Whether the file was initialized.
        done: bool,
    },
    /// A file of UVM's is bound to one memory, and has had a GPU.
    Bound {
        /// Its number.
        file: u32,
    },
    /// There is a channel group, or a channel outside one.
    Group {
        /// On which GPU.
        gpu: usize,
        /// Whose.
        client: u32,
        /// Below which object.
        parent: u32,
        /// Its handle.
        handle: u32,
        /// Whether it was made, and not only let go on.
        certain: bool,
        /// How it is reached; `None` of a channel.
        reach: Option<Reach>,
    },
    /// There is a channel that computes, or is about to be.
    Channel {
        /// On which GPU.
        gpu: usize,
        /// Whose.
        client: u32,
        /// Below which object.
        parent: u32,
        /// Its handle.
        handle: u32,
        /// The process that made it.
        process: Process,
    },
    /// A channel group or a channel is no more.
    Ungroup {
        /// Whose it was.
        client: u32,
        /// Its handle.
        handle: u32,
    },
}

/// Whose a channel group is, and how it is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, MaxSize)]
pub struct Reach {
    /// The process that made it.
    pub process: Process,
    /// The descriptor of that process's that it was made by.
    pub descriptor: i32,
    /// The engine that it asked for, `NV2080_ENGINE_TYPE_*`; 0 lets the driver choose.
    pub engine: u32,
}

/// Who initializes a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, MaxSize)]
pub struct Maker {
    /// The process.
    pub process: Process,
    /// What tells the program that it has executed from the next.
    pub image: u64,
}

/// How far a call has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Stage {
    /// There is none, or nothing was done about it.
    Received = 0,
    /// The driver was asked; whether it has answered isn't known.
    Executing = 1,
    /// It is decided, and nothing is left to be done but to say so.
    Decided = 2,
}

impl Stage {
    /// The stage with that number; one that isn't known is taken for the first.
    #[must_use]
    pub fn of(number: u32) -> Self {
        match number {
            1 => Self::Executing,
            2 => Self::Decided,
            _ => Self::Received,
        }
    }
}

/// Whether a log of `used` bytes, of which `kept` were written at once, is to be written
/// anew.
#[must_use]
pub fn is_due(used: usize, kept: usize) -> bool {
    used > LEAST_BYTES.max(kept + kept / 4) || used + RECORD_BYTES > HALF_BYTES - COUNT_BYTES
}

/// Writes a record where `place` begins, and tells its bytes; `None` where it doesn't fit.
pub fn write(record: &Record, place: &mut [u8]) -> Option<usize> {
    let (length, place) = place.split_first_mut()?;
    *length = u8::try_from(postcard::to_slice(record, place).ok()?.len()).ok()?;
    Some(1 + usize::from(*length))
}

/// The records that lie one after the other in `bytes`, but for those of a kind that isn't known.
pub fn read(mut bytes: &[u8]) -> impl Iterator<Item = Record> {
    let next = move || {
        let (length, behind) = bytes.split_first()?;
        let (record, behind) = behind.split_at_checked(usize::from(*length))?;
        bytes = behind;
        Some(postcard::from_bytes(record).ok())
    };
    std::iter::from_fn(next).flatten()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ledger::{Client, Handle, Hold, Shown, StakePlace};

    #[test]
    fn the_parts_lie_one_after_the_other_and_fit() {
        const { assert!(LOG_OFFSET.is_multiple_of(4096)) };
        const { assert!(TRACES_OFFSET + TRACE_PLACES * TRACE_BYTES <= HEAD_BYTES) };
        const { assert!(LOG_OFFSET + 2 * HALF_BYTES <= JOURNAL_BYTES) };
        assert!(is_due(LEAST_BYTES + 1, 0));
        assert!(!is_due(LEAST_BYTES + 1, LEAST_BYTES));
        assert!(is_due(HALF_BYTES - COUNT_BYTES, HALF_BYTES));
    }

    fn bytes_of(records: &[Record]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for record in records {
            let mut place = [0; RECORD_BYTES];
            let used = write(record, &mut place).unwrap();
            bytes.extend_from_slice(&place[..used]);
        }
        bytes
    }

    /// With the largest numbers, so that the longest kind needs all bytes of the longest record.
    fn records() -> [Record; 5] {
        let (client, parent, handle) = (Client(1), Handle(u32::MAX), Handle(0));
        let (long, hold) = (u64::MAX, Hold::Export { file: u64::MAX, index: u32::MAX });
        let reach = Reach { process: Process(long), descriptor: i32::MIN, engine: u32::MAX };
        let entries = [
            Entry::Commit { gpu: 0, bytes: 0, client: Client(0), parent: Handle(0), handle },
            Entry::Import { hold, client, parent, handle, shown: Shown::On(u16::MAX) },
            Entry::Stake { before: StakePlace::Export { hold }, number: long },
        ];
        let [commit, adopt, stake] = entries.map(Record::Ledger);
        let group = Record::Group {
            gpu: usize::MAX,
            client: u32::MAX,
            parent: u32::MAX,
            handle: u32::MAX,
            certain: true,
            reach: Some(reach),
        };
        [commit, adopt, group, stake, Record::Initialized { done: false }]
    }

    #[test]
    fn records_are_read_as_they_were_written() {
        let records = records();
        assert_eq!(read(&bytes_of(&records)).collect::<Vec<_>>(), records);
        let longest = records.map(|record| bytes_of(&[record]).len()).into_iter().max();
        assert_eq!(longest, Some(RECORD_BYTES));
    }

    #[test]
    fn what_is_no_record_is_left_out_and_what_is_behind_it_is_read() {
        assert_eq!(read(&[0; 4096]).next(), None);
        // A kind that a later version may have, with whatever it holds.
        let later = [3, 127, 0, 0];
        for record in records() {
            let bytes = [&[0], &later[..], &bytes_of(&[record]), &later, &[9, 0, 0]].concat();
            assert_eq!(read(&bytes).collect::<Vec<_>>(), [record]);
        }
    }

    #[test]
    fn a_record_is_not_written_where_it_does_not_fit() {
        for record in records() {
            let mut place = vec![0; bytes_of(&[record]).len()];
            assert_eq!(write(&record, &mut place), Some(place.len()));
            place.pop();
            assert_eq!(write(&record, &mut place), None);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_much(bytes in any::<Vec<u8>>()) {
            read(&bytes).for_each(drop);
        }
    }
}
