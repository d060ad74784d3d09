//! The layout of the journal: the memory that the keeper holds and that outlives a worker.
//!
//! The journal begins with a head, which has the traces of calls whose reply nobody took. A slot for each thread
//! follows, and then the two halves of a log. A half is a count of bytes, and as many bytes of records; a record counts
//! when the count covers it. A record is a byte with its length, and a [`Record`] as `postcard` encodes it. One half is
//! in use. When it is full, the records that make the same state from nothing are written into the other half, and then
//! the head names that half: at each instant there is one whole log. Pure: this file makes bytes of records and records
//! of bytes, and doesn't know who maps the memory.

use postcard::experimental::max_size::MaxSize;
use serde::{Deserialize, Serialize};

use crate::ledger::{Entry, Process};

/// Bytes of the journal. It is sparse: unused pages take no memory.
pub const JOURNAL_BYTES: usize = 32 << 20;

/// The number of this layout. Another layout, or another meaning of a record, needs another number.
pub(crate) const FORMAT: u64 = 1;

/// The number of slots: as many threads can have a call.
pub(crate) const SLOTS: usize = 32;

/// Bytes of the head.
pub(crate) const HEAD_BYTES: usize = 4096;

/// The most traces of calls whose reply nobody took.
pub(crate) const TRACE_PLACES: usize = 48;

/// Bytes of a slot.
pub(crate) const SLOT_BYTES: usize = 256;

/// Where the first half of the log begins.
pub(crate) const LOG_OFFSET: usize = HEAD_BYTES + SLOTS * SLOT_BYTES;

/// Bytes of a half, its count included.
pub(crate) const HALF_BYTES: usize = (JOURNAL_BYTES - LOG_OFFSET) / 2 / 4096 * 4096;

/// Bytes of a half's count, which comes before the records.
pub(crate) const COUNT_BYTES: usize = 64;

/// Bytes of the longest record, with the byte that has its length.
pub(crate) const RECORD_BYTES: usize = 1 + Record::POSTCARD_MAX_SIZE;

/// A log with fewer bytes is not rewritten.
const LEAST_BYTES: usize = 64 << 10;

/// A record of the log.
///
/// A worker reads what a worker of an older version wrote. So after a release a new kind goes to the end, here and in
/// [`Entry`], and no kind's fields change. Otherwise [`FORMAT`] has to change, and an upgrade leaves running containers
/// to their old monitors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, MaxSize)]
pub(crate) enum Record {
    /// A change of the ledger.
    Ledger(Entry),
    /// A space has a new range of addresses.
    AddRange {
        /// The space, by [`Space::number`](crate::monitor::state::Space).
        space: u64,
        /// The first address.
        base: u64,
        /// The length in bytes.
        length: u64,
    },
    /// A file that is a node of UVM's.
    Node {
        /// `st_dev`.
        device: u64,
        /// `st_ino`.
        inode: u64,
    },
    /// A range from [`AddRange`](Self::AddRange) is gone.
    RemoveRange {
        /// The space.
        space: u64,
        /// The first address.
        base: u64,
    },
    /// A call that may initialize a file of UVM's is continued. No other such call is underway.
    Initialize {
        /// The file's number.
        file: u32,
        /// The thread that makes the call.
        tid: u32,
        /// The process to whose memory the call binds the file.
        maker: Maker,
    },
    /// The call of [`Initialize`](Self::Initialize) is over, or is known to have initialized the file.
    Initialized {
        /// Whether the file was initialized.
        done: bool,
    },
    /// A file of UVM's is bound to one memory, and has had a GPU.
    Bound {
        /// The file's number.
        file: u32,
    },
    /// A channel group, or a channel outside groups, was made, or its call is continued.
    Group {
        /// The GPU's number in the container's order.
        gpu: usize,
        /// The client.
        client: u32,
        /// The handle of the object above it.
        parent: u32,
        /// Its handle.
        handle: u32,
        /// Whether the driver is known to have made it. Otherwise its call was only continued.
        certain: bool,
        /// How the group is reached; `None` for a channel.
        reach: Option<Reach>,
    },
    /// A channel that computes was made, or is about to be made.
    Channel {
        /// The GPU's number in the container's order.
        gpu: usize,
        /// The client.
        client: u32,
        /// The handle of the object above it.
        parent: u32,
        /// Its handle.
        handle: u32,
        /// The process that made the channel.
        process: Process,
    },
    /// A channel group or a channel is gone.
    Ungroup {
        /// The client.
        client: u32,
        /// Its handle.
        handle: u32,
    },
}

/// The process that made a channel group, and how the group is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, MaxSize)]
pub(crate) struct Reach {
    /// The process that made the group.
    pub process: Process,
    /// The process's descriptor on which the group was made.
    pub descriptor: i32,
    /// The engine that the program asked for, `NV2080_ENGINE_TYPE_*`. With 0 the driver chooses.
    pub engine: u32,
}

/// The process that initializes a file of UVM's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, MaxSize)]
pub(crate) struct Maker {
    /// The process.
    pub process: Process,
    /// A number that tells the program that the process executes from a later program of the same process.
    pub image: u64,
}

/// How far a call has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Stage {
    /// There is no call, or nothing was done about it.
    Received = 0,
    /// The driver is about to be asked, or was. Whether it has answered isn't known.
    Executing = 1,
    /// The call is decided, and only the reply is left.
    Decided = 2,
}

impl Stage {
    /// The stage with this number; [`Stage::Received`] for an unknown number.
    #[must_use]
    pub(crate) fn of(number: u32) -> Self {
        match number {
            1 => Self::Executing,
            2 => Self::Decided,
            _ => Self::Received,
        }
    }
}

/// Whether a log of `used` bytes is to be rewritten. `kept` of them were written by the last rewrite, or found at the
/// start.
#[must_use]
pub(crate) fn is_due(used: usize, kept: usize) -> bool {
    used > LEAST_BYTES.max(kept + kept / 4) || used + RECORD_BYTES > HALF_BYTES - COUNT_BYTES
}

/// Writes a record at the beginning of `place`. Returns its length in bytes; `None` where it doesn't fit.
pub(crate) fn write(record: &Record, place: &mut [u8]) -> Option<usize> {
    let (length, place) = place.split_first_mut()?;
    *length = u8::try_from(postcard::to_slice(record, place).ok()?.len()).ok()?;
    Some(1 + usize::from(*length))
}

/// The records that follow one another in `bytes`. Records of unknown kinds are left out.
pub(crate) fn read_records(mut bytes: &[u8]) -> impl Iterator<Item = Record> {
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

    /// Records with the largest numbers, so that the longest kind needs all bytes of the longest record.
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
        assert_eq!(read_records(&bytes_of(&records)).collect::<Vec<_>>(), records);
        let longest = records.map(|record| bytes_of(&[record]).len()).into_iter().max();
        assert_eq!(longest, Some(RECORD_BYTES));
    }

    #[test]
    fn what_is_no_record_is_left_out_and_what_is_behind_it_is_read() {
        assert_eq!(read_records(&[0; 4096]).next(), None);
        // A kind that a later version may have, with any content.
        let later = [3, 127, 0, 0];
        for record in records() {
            let bytes = [&[0], &later[..], &bytes_of(&[record]), &later, &[9, 0, 0]].concat();
            assert_eq!(read_records(&bytes).collect::<Vec<_>>(), [record]);
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
            read_records(&bytes).for_each(drop);
        }
    }
}
