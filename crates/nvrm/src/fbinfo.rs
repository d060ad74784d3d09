//! The lists by which a GPU's memory is shown: `NV2080_CTRL_CMD_FB_GET_INFO`, both ways.
//!
//! An entry is an index and a value, four bytes each; memory is in KiB. The older command
//! has the list elsewhere, by address, the newer has it inline; the entries are alike.
//! Which amounts are to be shown is not known here.

use alloc::vec;
use alloc::vec::Vec;

use super::call::Reader;
use super::layout::{Layout, Meaning, Patch};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use super::number::*;
use super::refuse::{CallName, Refusal};
use super::release::{Key, Release};

/// Bytes of an entry: `NV2080_CTRL_FB_INFO`.
pub const ENTRY_BYTES: usize = 8;

/// Where the newer command's list is: behind its length.
const INLINE_OFFSET: usize = 4;

/// Entries that the newer command's list has at most in a branch that isn't known: by 595 it had
/// grown from 54 to 128.
const MOST_ENTRIES: usize = 1024;

/// What a value says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quantity {
    /// All memory there is.
    Total,
    /// A part of all memory, and so at most all of it.
    PartOfTotal,
    /// All memory that is left.
    Free,
    /// A part of what is left, and so at most all of it.
    PartOfFree,
}

/// The values that show memory: index and what it says. Others are left alone.
///
/// `cuMemGetInfo` reads the heap's, NVML the RAM's.
const QUANTITIES: &[(u32, Quantity)] = &[
    (NV2080_CTRL_FB_INFO_INDEX_RAM_SIZE, Quantity::Total),
    (NV2080_CTRL_FB_INFO_INDEX_TOTAL_RAM_SIZE, Quantity::Total),
    (NV2080_CTRL_FB_INFO_INDEX_HEAP_SIZE, Quantity::Total),
    (NV2080_CTRL_FB_INFO_INDEX_MAPPABLE_HEAP_SIZE, Quantity::PartOfTotal),
    (NV2080_CTRL_FB_INFO_INDEX_LARGEST_FREE_REGION_SIZE_KB, Quantity::PartOfFree),
    (NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE, Quantity::Free),
    (NV2080_CTRL_FB_INFO_INDEX_USABLE_RAM_SIZE, Quantity::Total),
];

/// Where a list is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum List {
    /// In the parameters, from this byte on.
    Inline {
        /// Bytes before it.
        offset: usize,
        /// Its entries.
        entries: usize,
    },
    /// In the caller's memory.
    Elsewhere {
        /// Its address.
        address: u64,
        /// Its entries.
        entries: usize,
    },
}

/// The amounts to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryAmounts {
    /// All memory, in bytes.
    pub total_bytes: u64,
    /// What is left of it, in bytes.
    pub free_bytes: u64,
}

/// Bytes that the newer command's parameters may have: this release's, and of a branch that isn't
/// known those of longer lists. They say themselves how long they are, and with another size than
/// its own the driver refuses them.
pub fn sizes(release: &Release) -> impl Iterator<Item = usize> {
    let known = longest(release);
    let most = if release.is_of_new_branch() { MOST_ENTRIES } else { known };
    (known..=most).map(|entries| INLINE_OFFSET + entries * ENTRY_BYTES)
}

/// The layout of what parameters of so many bytes begin with.
#[must_use]
pub fn layout(release: &Release, command: u32, size: usize) -> Option<&'static Layout> {
    let grows = command == NV2080_CTRL_CMD_FB_GET_INFO_V2;
    let known = release.layouts(Key::Control(command)).iter();
    let mut known = known.filter(|known| known.size() <= size);
    known.find(|known| known.size() == size || grows && sizes(release).any(|of| of == size))
}

/// Where the list is whose command's parameters are `bytes`.
///
/// # Errors
///
/// Where the parameters are not of this driver's size, or the list is longer than its
/// longest: the driver refuses that too (`rmapi_deprecated_control.c`).
pub fn list(release: &Release, command: u32, bytes: &[u8]) -> Result<List, Refusal> {
    let key = Key::Control(command);
    let reader = Reader { release, call: CallName(key) };
    let known = layout(release, command, bytes.len()).map_or(bytes.len(), Layout::size);
    let view = reader.view(key, bytes.get(..known).unwrap_or(bytes))?;
    let count = reader.word(view, Meaning::Count)?;
    let entries = usize::try_from(count).unwrap_or(usize::MAX);
    let longest = match view.layout().field(Meaning::List) {
        Some(list) if command == NV2080_CTRL_CMD_FB_GET_INFO_V2 => {
            bytes.len().saturating_sub(list.offset) / ENTRY_BYTES
        }
        _ => longest(release),
    };
    if entries > longest {
        return Err(Refusal::UnknownSize {
            driver: release.version(),
            call: reader.call,
            stated: entries.saturating_mul(ENTRY_BYTES),
            known: vec![longest * ENTRY_BYTES],
        });
    }
    if command == NV2080_CTRL_CMD_FB_GET_INFO {
        return Ok(List::Elsewhere { address: reader.long(view, Meaning::List)?, entries });
    }
    let field = view.layout().field(Meaning::List).ok_or_else(|| reader.table(Meaning::List))?;
    Ok(List::Inline { offset: field.offset, entries })
}

/// What to write into a list so that it shows `shown`, from byte `offset` of `bytes` on.
///
/// Entries beyond the end of `bytes` are left out. The index is read from `bytes`, which
/// are our copy and what the caller gets back; a part is never shown larger than it is.
pub fn patches(
    bytes: &[u8],
    offset: usize,
    entries: usize,
    shown: MemoryAmounts,
) -> impl Iterator<Item = Patch> {
    let list = bytes.get(offset..).unwrap_or_default();
    list.chunks_exact(ENTRY_BYTES).take(entries).enumerate().filter_map(move |(at, entry)| {
        let (index, value) = entry.split_first_chunk::<4>()?;
        let (value, _) = value.split_first_chunk::<4>()?;
        let index = u32::from_le_bytes(*index);
        let (_, quantity) = QUANTITIES.iter().find(|(of, _)| *of == index)?;
        let shown = shown.kib(*quantity, u32::from_le_bytes(*value));
        Some(Patch::word(offset + at * ENTRY_BYTES + 4, shown))
    })
}

impl MemoryAmounts {
    /// What to show in KiB in the place of `value`, rounded down.
    fn kib(self, quantity: Quantity, value: u32) -> u32 {
        let kib = |bytes: u64| u32::try_from(bytes / 1024).unwrap_or(u32::MAX);
        match quantity {
            Quantity::Total => kib(self.total_bytes),
            Quantity::PartOfTotal => value.min(kib(self.total_bytes)),
            Quantity::Free => kib(self.free_bytes),
            Quantity::PartOfFree => value.min(kib(self.free_bytes)),
        }
    }
}

/// `NV2080_CTRL_FB_INFO_MAX_LIST_SIZE` of a release.
fn longest(release: &Release) -> usize {
    let inline = release.layouts(Key::Control(NV2080_CTRL_CMD_FB_GET_INFO_V2)).first();
    inline.map_or(0, |layout| layout.size().saturating_sub(INLINE_OFFSET) / ENTRY_BYTES)
}

/// Parameters of `NV2080_CTRL_CMD_FB_GET_INFO_V2` that ask what is free, of one of its [`sizes`].
#[must_use]
pub fn ask_free(size: usize) -> Vec<u8> {
    let mut params = vec![0; size];
    let words = [1, NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE];
    for (word, place) in words.into_iter().zip(params.chunks_exact_mut(4)) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    params
}

/// The bytes that are free, in an answer.
#[must_use]
pub fn answered_free(params: &[u8]) -> Option<u64> {
    let (_, value) = params.get(INLINE_OFFSET..)?.split_at_checked(4)?;
    let kib = value.first_chunk().map(|kib| u32::from_le_bytes(*kib))?;
    Some(u64::from(kib) << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_free_is_asked_as_one_entry() {
        let mut params = ask_free(sizes(&release("535.161.08")).next().unwrap());
        assert_eq!(params.len(), 436);
        let wanted = [1, NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE, 0].map(u32::to_le_bytes).concat();
        assert_eq!(params[..12], wanted);
        params[8..12].copy_from_slice(&3_u32.to_le_bytes());
        assert_eq!(answered_free(&params), Some(3 << 10));
        assert_eq!(answered_free(&params[..11]), None);
    }

    #[test]
    fn list_may_have_grown_in_unknown_branches() {
        let (known, new) = (release("595.45.04"), release("900.10.01"));
        let command = NV2080_CTRL_CMD_FB_GET_INFO_V2;
        assert_eq!(sizes(&known).collect::<Vec<usize>>(), [1028]);
        assert_eq!(sizes(&new).take(3).collect::<Vec<usize>>(), [1028, 1036, 1044]);
        let grown = inline(1036, &[(NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE, 0); 129]);
        assert_eq!(list(&new, command, &grown), Ok(List::Inline { offset: 4, entries: 129 }));
        list(&known, command, &grown).unwrap_err();
        for wrong in [0, 4, 1020, 1027, 1029, 1035, 4 + 8 * (MOST_ENTRIES + 1)] {
            list(&new, command, &vec![0; wrong]).unwrap_err();
            assert_eq!(layout(&new, command, wrong), None);
        }
        let longer = inline(1036, &[(NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE, 0); 130]);
        list(&new, command, &longer[..1036]).unwrap_err();
        assert_eq!(layout(&new, NV2080_CTRL_CMD_FB_GET_INFO, 24), None);
    }

    const SHOWN: MemoryAmounts =
        MemoryAmounts { total_bytes: 6 << 30, free_bytes: (4 << 30) + 1023 };

    fn release(text: &str) -> Release {
        Release::of(text.parse().unwrap()).unwrap()
    }

    /// Parameters of the newer command with these entries.
    fn inline(size: usize, entries: &[(u32, u32)]) -> Vec<u8> {
        let mut bytes = u32::try_from(entries.len()).unwrap().to_le_bytes().to_vec();
        for (index, value) in entries {
            bytes.extend(index.to_le_bytes());
            bytes.extend(value.to_le_bytes());
        }
        bytes.resize(size, 0xaa);
        bytes
    }

    /// Memory is shown as the quota, and the other entries are left as they are.
    #[test]
    fn memory_sizes_show_the_quota_others_stay() {
        let gib = 1 << 20;
        let entries = [(0x09, 16 * gib), (0x16, 12 * gib), (0x05, 7), (0x12, 100), (0x0a, 256)];
        let mut bytes = inline(436, &entries);
        let found = list(&release("535.161.08"), NV2080_CTRL_CMD_FB_GET_INFO_V2, &bytes).unwrap();
        assert_eq!(found, List::Inline { offset: 4, entries: 5 });
        let patches: Vec<Patch> = patches(&bytes, 4, 5, SHOWN).collect();
        assert_eq!(patches.len(), 4);
        assert!(patches.iter().all(|patch| patch.apply(&mut bytes)));
        let wanted = [(0x09, 6 * gib), (0x16, 4 * gib), (0x05, 7), (0x12, 100), (0x0a, 256)];
        assert_eq!(bytes, inline(436, &wanted));
    }

    #[test]
    fn a_part_is_cut_to_what_is_shown() {
        let bytes = inline(436, &[(0x12, u32::MAX), (0x0a, u32::MAX)]);
        let values: Vec<Vec<u8>> =
            patches(&bytes, 4, 2, SHOWN).map(|patch| patch.bytes().to_vec()).collect();
        assert_eq!(values, [(4_u32 << 20).to_le_bytes(), (6_u32 << 20).to_le_bytes()]);
    }

    #[test]
    fn entries_beyond_the_bytes_are_left_out() {
        let bytes = inline(436, &[(0x09, 1); 3]);
        for len in 0..bytes.len() {
            let entries = len.saturating_sub(4) / 8;
            let count = patches(&bytes[..len], 4, usize::MAX, SHOWN).count();
            assert_eq!(count, entries.min(3));
        }
        assert_eq!(patches(&bytes, usize::MAX, 1, SHOWN).count(), 0);
    }

    #[test]
    fn list_longer_than_the_drivers_longest_is_refused() {
        for (text, longest) in [("535.161.08", 54_u32), ("550.54.14", 55), ("580.65.06", 128)] {
            let release = release(text);
            let mut bytes = [0; 16];
            for (count, fits) in [(0, true), (longest, true), (longest + 1, false)] {
                bytes[..4].copy_from_slice(&count.to_le_bytes());
                let found = list(&release, NV2080_CTRL_CMD_FB_GET_INFO, &bytes);
                assert_eq!(found.is_ok(), fits, "{text} {count}");
            }
            bytes[..4].fill(0xff);
            assert!(list(&release, NV2080_CTRL_CMD_FB_GET_INFO, &bytes).is_err());
        }
    }
}
