//! What outlives a worker: how the memory that the keeper holds for it is laid out.
//!
//! From its beginning: a head with a shelf, a slot for each thread, two halves of a log. A half
//! is a count of bytes and so many bytes of records, 32 each; a record counts when the count
//! covers it. One half is in use; when it's full, everything is written anew into
//! the other as the records that make it from nothing, and then the head names that
//! one: at each instant there is one whole log. Pure: records to bytes and back;
//! who maps the memory is not known here.

use crate::ledger::{Before, Client, Entry, Handle, Hold, Process, Shown, Span, Tree};

/// Bytes of the memory; it is sparse, and what isn't used takes nothing.
pub const JOURNAL_BYTES: usize = 16 << 20;

/// Threads that can have a call, and so slots.
pub const SLOTS: usize = 32;

/// Bytes for the head.
pub const HEAD_BYTES: usize = 4096;

/// Where in the head the shelf begins, which has traces of calls whose reply nobody took; how many
/// it has room for, and bytes of each.
pub const SHELF_OFFSET: usize = 1024;
/// See [`SHELF_OFFSET`].
pub const SHELF_PLACES: usize = 48;
/// See [`SHELF_OFFSET`].
pub const TRACE_BYTES: usize = 48;

/// Bytes for a slot.
pub const SLOT_BYTES: usize = 256;

/// Where the first half begins.
pub const LOG_OFFSET: usize = HEAD_BYTES + SLOTS * SLOT_BYTES;

/// Bytes of a half, its count included.
pub const HALF_BYTES: usize = (JOURNAL_BYTES - LOG_OFFSET) / 2 / 4096 * 4096;

/// Bytes of a half before its records.
pub const COUNT_BYTES: usize = 64;

/// Bytes of a record.
pub const RECORD_BYTES: usize = 32;

/// A log is not written anew before it has so many bytes.
const LEAST_BYTES: usize = 64 << 10;

/// What a log's records say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// A change of the ledger.
    Ledger(Entry),
    /// A range of addresses in a space.
    Announce {
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
    /// A range that [`Announce`](Self::Announce) told of is gone.
    Withdraw {
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reach {
    /// The process that made it.
    pub process: Process,
    /// The descriptor of that process's that it was made by.
    pub descriptor: i32,
    /// The engine that it asked for, `NV2080_ENGINE_TYPE_*`; 0 lets the driver choose.
    pub engine: u32,
}

/// Who initializes a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

/// The fields of a record as they lie: kind, GPU, three words, two long ones.
#[derive(Default)]
struct Raw {
    kind: u8,
    hold: u8,
    gpu: u16,
    words: [u32; 3],
    longs: [u64; 2],
}

const MAPPING: u8 = 1;
const EXPORT: u8 = 2;

impl Raw {
    pub(crate) fn new(kind: u8) -> Self {
        Raw { kind, ..Raw::default() }
    }

    fn gpu(mut self, gpu: usize) -> Self {
        self.gpu = u16::try_from(gpu).unwrap_or(u16::MAX);
        self
    }

    fn words(mut self, words: [u32; 3]) -> Self {
        self.words = words;
        self
    }

    fn longs(mut self, longs: [u64; 2]) -> Self {
        self.longs = longs;
        self
    }

    /// A third long one, in the place of the first two words.
    fn third(mut self, value: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
        self.words[0] = u32::from_le_bytes([a, b, c, d]);
        self.words[1] = u32::from_le_bytes([e, f, g, h]);
        self
    }

    fn get_third(&self) -> u64 {
        u64::from(self.words[0]) | u64::from(self.words[1]) << 32
    }

    /// A piece of a mapping: its tree in the GPU's place and the first word, its memory in the
    /// other two.
    fn piece(mut self, Tree { file, gpu }: Tree, span: Span, charge: u64) -> Self {
        let [a, b, c, d, e, f, g, h] = charge.to_le_bytes();
        self.gpu = gpu;
        self.words = [file, u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])];
        self.longs([span.first, span.last])
    }

    fn get_piece(&self) -> Option<(Tree, Span, u64)> {
        let ([file, low, high], [first, last]) = (self.words, self.longs);
        let charge = u64::from(low) | u64::from(high) << 32;
        (first <= last).then_some((Tree { file, gpu: self.gpu }, Span { first, last }, charge))
    }

    fn hold(mut self, hold: Hold) -> Self {
        (self.hold, self.longs) = match hold {
            Hold::Mapping { space, base } => (MAPPING, [space, base]),
            Hold::Export { file, index } => (EXPORT, [file, index.into()]),
        };
        self
    }

    fn get_hold(&self) -> Option<Hold> {
        let [first, second] = self.longs;
        match self.hold {
            MAPPING => Some(Hold::Mapping { space: first, base: second }),
            EXPORT => Some(Hold::Export { file: first, index: u32::try_from(second).ok()? }),
            _ => None,
        }
    }

    /// What a stake stands before: of which kind that is, in the GPU's place.
    fn before(self, before: Before) -> Self {
        let charge = |charge| [charge, 0];
        let object = |client: Client, handle: Handle| [client.0.into(), handle.0.into()];
        match before {
            Before::Mappings { charge: id } => self.gpu(0).longs(charge(id)),
            Before::Export { hold } => self.gpu(1).hold(hold),
            Before::Name { client, handle } => self.gpu(2).longs(object(client, handle)),
            Before::Nothing { charge: id } => self.gpu(3).longs(charge(id)),
        }
    }

    fn get_before(&self) -> Option<Before> {
        let [charge, second] = self.longs;
        let object = || Some((u32::try_from(charge).ok()?, u32::try_from(second).ok()?));
        let object = || object().map(|(client, handle)| (Client(client), Handle(handle)));
        Some(match self.gpu {
            0 => Before::Mappings { charge },
            1 => Before::Export { hold: self.get_hold()? },
            2 => object().map(|(client, handle)| Before::Name { client, handle })?,
            3 => Before::Nothing { charge },
            _ => return None,
        })
    }

    fn bytes(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[0] = self.kind;
        bytes[1] = self.hold;
        bytes[2..4].copy_from_slice(&self.gpu.to_le_bytes());
        for (at, word) in self.words.iter().enumerate() {
            bytes[4 + 4 * at..8 + 4 * at].copy_from_slice(&word.to_le_bytes());
        }
        for (at, long) in self.longs.iter().enumerate() {
            bytes[16 + 8 * at..24 + 8 * at].copy_from_slice(&long.to_le_bytes());
        }
        bytes
    }

    fn of(bytes: &[u8; RECORD_BYTES]) -> Self {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Raw {
            kind: bytes[0],
            hold: bytes[1],
            gpu: u16::from_le_bytes([bytes[2], bytes[3]]),
            words: [word(4), word(8), word(12)],
            longs: [long(16), long(24)],
        }
    }
}

/// The lower half of a long one.
fn low(long: u64) -> u32 {
    u32::try_from(long & u64::from(u32::MAX)).unwrap_or(0)
}

/// Where memory shows, in a GPU's place.
fn place(shown: Shown) -> usize {
    match shown {
        Shown::Here => 0,
        Shown::On(gpu) => 1 + usize::from(gpu),
    }
}

fn shown(place: u16) -> Shown {
    match place {
        0 => Shown::Here,
        place => Shown::On(place - 1),
    }
}

/// The bytes of a record.
#[must_use]
pub fn encode(record: Record) -> [u8; RECORD_BYTES] {
    let entry = match record {
        Record::Announce { space, base, length } => {
            return Raw::new(40).third(space).longs([base, length]).bytes();
        }
        Record::Node { device, inode } => return Raw::new(42).longs([device, inode]).bytes(),
        Record::Withdraw { space, base } => return Raw::new(41).longs([space, base]).bytes(),
        Record::Initialize { file, tid, maker: Maker { process, image } } => {
            return Raw::new(43).words([file, tid, 0]).longs([process.0, image]).bytes();
        }
        Record::Initialized { done } => {
            return Raw::new(44).words([u32::from(done), 0, 0]).bytes();
        }
        Record::Bound { file } => return Raw::new(45).words([file, 0, 0]).bytes(),
        Record::Group { gpu, client, parent, handle, certain, reach } => {
            let raw = Raw::new(46).gpu(gpu).words([client, parent, handle]);
            let longs = reach.map_or([0; 2], |Reach { process, descriptor, engine }| {
                [process.0, u64::from(descriptor.cast_unsigned()) | u64::from(engine) << 32]
            });
            let hold = u8::from(certain) | u8::from(reach.is_some()) << 1;
            return Raw { hold, ..raw.longs(longs) }.bytes();
        }
        Record::Channel { gpu, client, parent, handle, process } => {
            let raw = Raw::new(48).gpu(gpu).words([client, parent, handle]);
            return raw.longs([process.0, 0]).bytes();
        }
        Record::Ungroup { client, handle } => {
            return Raw::new(47).words([client, 0, handle]).bytes();
        }
        Record::Ledger(entry) => entry,
    };
    let raw = match entry {
        Entry::Commit { gpu, bytes, client, parent, handle } => {
            Raw::new(1).gpu(gpu).words([client.0, parent.0, handle.0]).longs([bytes, 0])
        }
        Entry::Note { client, parent, handle } => Raw::new(2).words([client.0, parent.0, handle.0]),
        Entry::Adopt { hold, client, parent, handle, shown } => {
            Raw::new(3).gpu(place(shown)).words([client.0, parent.0, handle.0]).hold(hold)
        }
        Entry::Hold { hold, client, handle } => {
            Raw::new(4).words([client.0, 0, handle.0]).hold(hold)
        }
        Entry::Duplicate { source: (of, source), client, parent, handle, shown } => Raw::new(5)
            .gpu(place(shown))
            .words([client.0, parent.0, handle.0])
            .longs([of.0.into(), source.0.into()]),
        Entry::Release { hold } => Raw::new(6).hold(hold),
        Entry::ReleaseSpace { space } => Raw::new(7).longs([space, 0]),
        Entry::Free { client, handle } => Raw::new(8).words([client.0, 0, handle.0]),
        Entry::Share { client, process } => {
            Raw::new(9).words([client.0, 0, 0]).longs([process.0, 0])
        }
        Entry::Left { process } => Raw::new(10).longs([process.0, 0]),
        Entry::Limit { gpu, limit_bytes } => Raw::new(11).gpu(gpu).longs([limit_bytes, 0]),
        Entry::Reconcile { gpu, driver_bytes } => Raw::new(12).gpu(gpu).longs([driver_bytes, 0]),
        Entry::Account { gpu, missed, gone, epoch } => {
            Raw::new(13).gpu(gpu).third(epoch).longs([missed, gone])
        }
        Entry::Charge { id, gpu, bytes, epoch } => {
            Raw::new(14).gpu(gpu).third(id).longs([bytes, epoch])
        }
        Entry::Object { client, parent, handle, charge, shown } => Raw::new(15)
            .gpu(charge.map_or(0, |_| 1 + place(shown)))
            .words([client.0, parent.0, handle.0])
            .longs([charge.unwrap_or(0), 0]),
        Entry::Held { hold, charge } => Raw::new(16).third(charge).hold(hold),
        Entry::Map { tree, span, charge } => Raw::new(17).piece(tree, span, charge),
        Entry::MapAlone { tree, span, charge } => Raw::new(18).piece(tree, span, charge),
        Entry::Unmake { tree, first, charge } => {
            Raw::new(19).piece(tree, Span { first, last: first }, charge)
        }
        Entry::Unmap { tree, span } => Raw::new(20).piece(tree, span, 0),
        Entry::CloseFile { file } => Raw::new(21).words([file, 0, 0]),
        Entry::NextCharge { id } => Raw::new(22).longs([id, 0]),
        Entry::Stake { before, own } => Raw::new(23).third(own).before(before),
        Entry::Unstake { own } => Raw::new(24).longs([own, 0]),
        Entry::LoseStakes { first, last } => Raw::new(25).longs([first, last]),
        Entry::Bare { charge } => Raw::new(26).longs([charge, 0]),
        Entry::LoosenStakes { first, last } => Raw::new(27).longs([first, last]),
    };
    raw.bytes()
}

/// The record that the bytes are; `None` of a kind that isn't known.
#[must_use]
pub fn decode(bytes: &[u8; RECORD_BYTES]) -> Option<Record> {
    let raw = Raw::of(bytes);
    let gpu = usize::from(raw.gpu);
    let [first, second] = raw.longs;
    let (client, parent, handle) =
        (Client(raw.words[0]), Handle(raw.words[1]), Handle(raw.words[2]));
    let entry = match raw.kind {
        1 => Entry::Commit { gpu, bytes: first, client, parent, handle },
        2 => Entry::Note { client, parent, handle },
        3 => {
            let shown = shown(raw.gpu);
            Entry::Adopt { hold: raw.get_hold()?, client, parent, handle, shown }
        }
        4 => Entry::Hold { hold: raw.get_hold()?, client, handle },
        5 => {
            let source = (u32::try_from(first).ok()?, u32::try_from(second).ok()?);
            let (source, shown) = ((Client(source.0), Handle(source.1)), shown(raw.gpu));
            Entry::Duplicate { source, client, parent, handle, shown }
        }
        6 => Entry::Release { hold: raw.get_hold()? },
        7 => Entry::ReleaseSpace { space: first },
        8 => Entry::Free { client, handle },
        9 => Entry::Share { client, process: Process(first) },
        10 => Entry::Left { process: Process(first) },
        11 => Entry::Limit { gpu, limit_bytes: first },
        12 => Entry::Reconcile { gpu, driver_bytes: first },
        13 => Entry::Account { gpu, missed: first, gone: second, epoch: raw.get_third() },
        14 => Entry::Charge { id: raw.get_third(), gpu, bytes: first, epoch: second },
        15 => {
            let charge = (gpu > 0).then_some(first);
            let shown = shown(raw.gpu.saturating_sub(1));
            Entry::Object { client, parent, handle, charge, shown }
        }
        16 => Entry::Held { hold: raw.get_hold()?, charge: raw.get_third() },
        17..=20 => {
            let (tree, span, charge) = raw.get_piece()?;
            match raw.kind {
                17 => Entry::Map { tree, span, charge },
                18 => Entry::MapAlone { tree, span, charge },
                19 => Entry::Unmake { tree, first: span.first, charge },
                _ => Entry::Unmap { tree, span },
            }
        }
        21 => Entry::CloseFile { file: raw.words[0] },
        22 => Entry::NextCharge { id: first },
        23 => Entry::Stake { before: raw.get_before()?, own: raw.get_third() },
        24 => Entry::Unstake { own: first },
        25 => Entry::LoseStakes { first, last: second },
        26 => Entry::Bare { charge: first },
        27 => Entry::LoosenStakes { first, last: second },
        40 => {
            return Some(Record::Announce { space: raw.get_third(), base: first, length: second });
        }
        41 => return Some(Record::Withdraw { space: first, base: second }),
        42 => return Some(Record::Node { device: first, inode: second }),
        43 => {
            let [file, tid, _] = raw.words;
            let maker = Maker { process: Process(first), image: second };
            return Some(Record::Initialize { file, tid, maker });
        }
        44 => return Some(Record::Initialized { done: raw.words[0] != 0 }),
        45 => return Some(Record::Bound { file: raw.words[0] }),
        46 => {
            let [client, parent, handle] = raw.words;
            let certain = raw.hold & 1 != 0;
            let reach = (raw.hold & 2 != 0).then(|| Reach {
                process: Process(first),
                descriptor: low(second).cast_signed(),
                engine: low(second >> 32),
            });
            return Some(Record::Group { gpu, client, parent, handle, certain, reach });
        }
        47 => {
            let [client, _, handle] = raw.words;
            return Some(Record::Ungroup { client, handle });
        }
        48 => {
            let [client, parent, handle] = raw.words;
            return Some(Record::Channel { gpu, client, parent, handle, process: Process(first) });
        }
        _ => return None,
    };
    Some(Record::Ledger(entry))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_parts_lie_one_after_the_other_and_fit() {
        const { assert!(LOG_OFFSET.is_multiple_of(4096)) };
        const { assert!(SHELF_OFFSET + SHELF_PLACES * TRACE_BYTES <= HEAD_BYTES) };
        const { assert!(LOG_OFFSET + 2 * HALF_BYTES <= JOURNAL_BYTES) };
        assert!(is_due(LEAST_BYTES + 1, 0));
        assert!(!is_due(LEAST_BYTES + 1, LEAST_BYTES));
        assert!(is_due(HALF_BYTES - COUNT_BYTES, HALF_BYTES));
    }

    #[test]
    fn what_is_no_record_is_none() {
        for kind in [0, 28, 39, 49, 255] {
            let mut bytes = [0; RECORD_BYTES];
            bytes[0] = kind;
            assert_eq!(decode(&bytes), None);
        }
    }

    fn hold() -> impl Strategy<Value = Hold> {
        prop_oneof![
            any::<(u64, u64)>().prop_map(|(space, base)| Hold::Mapping { space, base }),
            any::<(u64, u32)>().prop_map(|(file, index)| Hold::Export { file, index }),
        ]
    }

    proptest! {
        #[test]
        fn a_record_is_read_as_it_was_written(
            kind in 0..36_u8,
            gpu in 0..64_usize,
            (a, b, c) in any::<(u32, u32, u32)>(),
            (x, y, z) in any::<(u64, u64, u64)>(),
            hold in hold(),
            shown in prop_oneof![
                Just(Shown::Here), (0..64_u16).prop_map(Shown::On),
            ],
        ) {
            let (client, parent, handle) = (Client(a), Handle(b), Handle(c));
            let process = Process(x);
            let before = [
                Before::Mappings { charge: x },
                Before::Export { hold },
                Before::Name { client, handle },
                Before::Nothing { charge: x },
            ][gpu % 4];
            let (tree, span) = (
                Tree { file: a, gpu: u16::try_from(gpu).unwrap() },
                Span { first: x.min(y), last: x.max(y) },
            );
            let record = match kind {
                0 => Record::Announce { space: x, base: y, length: z },
                1 => Record::Withdraw { space: x, base: y },
                24 => Record::Initialize { file: a, tid: b, maker: Maker { process, image: y } },
                25 => Record::Initialized { done: a % 2 == 1 },
                26 => Record::Bound { file: a },
                27 => Record::Ledger(Entry::NextCharge { id: x }),
                28 => Record::Ledger(Entry::Stake { before, own: z }),
                29 => Record::Ledger(Entry::Unstake { own: x }),
                30 => Record::Ledger(Entry::LoseStakes { first: x, last: y }),
                31 => Record::Ledger(Entry::Bare { charge: x }),
                32 => Record::Ledger(Entry::LoosenStakes { first: x, last: y }),
                33 => {
                    let certain = x % 2 == 1;
                    let reach = (y % 2 == 1).then(|| Reach {
                        process,
                        descriptor: a.cast_signed(),
                        engine: b,
                    });
                    Record::Group { gpu, client: a, parent: b, handle: c, certain, reach }
                }
                34 => Record::Ungroup { client: a, handle: c },
                35 => Record::Channel { gpu, client: a, parent: b, handle: c, process },
                kind => Record::Ledger(match kind {
                    2 => Entry::Commit { gpu, bytes: x, client, parent, handle },
                    3 => Entry::Note { client, parent, handle },
                    4 => Entry::Adopt { hold, client, parent, handle, shown },
                    5 => Entry::Hold { hold, client, handle },
                    6 => {
                        let source = (Client(b), Handle(c));
                        Entry::Duplicate { source, client, parent, handle, shown }
                    }
                    7 => Entry::Release { hold },
                    8 => Entry::ReleaseSpace { space: x },
                    9 => Entry::Free { client, handle },
                    10 => Entry::Share { client, process },
                    11 => Entry::Left { process },
                    12 => Entry::Limit { gpu, limit_bytes: x },
                    13 => Entry::Reconcile { gpu, driver_bytes: x },
                    14 => Entry::Account { gpu, missed: x, gone: y, epoch: z },
                    15 => Entry::Charge { id: x, gpu, bytes: y, epoch: z },
                    16 => Entry::Object { client, parent, handle, charge: Some(x), shown },
                    17 => {
                        let shown = Shown::Here;
                        Entry::Object { client, parent, handle, charge: None, shown }
                    }
                    18 => Entry::Held { hold, charge: x },
                    19 => Entry::Map { tree, span, charge: z },
                    20 => Entry::MapAlone { tree, span, charge: z },
                    21 => Entry::Unmake { tree, first: x, charge: z },
                    22 => Entry::Unmap { tree, span },
                    _ => Entry::CloseFile { file: a },
                }),
            };
            prop_assert_eq!(decode(&encode(record)), Some(record));
        }

        #[test]
        fn no_bytes_are_too_much(bytes in any::<[u8; RECORD_BYTES]>()) {
            let _ = decode(&bytes);
        }
    }
}
