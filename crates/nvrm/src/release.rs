//! Which driver has which layouts: [`RELEASES`], the one place that knows of versions.
//!
//! A row is a release, the row it builds on, and what it changed; a release's layouts
//! are the changes from the first row down to its own. A difference is said once, at the
//! release that made it. Sorted by version. No row without a change that is read or
//! written here. The recipe to add one is in the module above.

use alloc::string::String;
use alloc::vec::Vec;
use core::cmp::Ordering;
use core::fmt;
use core::str::FromStr;

use thiserror::Error;

use super::layout::Layout;
#[allow(clippy::wildcard_imports, reason = "both are vocabularies, spelt as upstream does")]
use super::{number::*, structs};

/// A driver's version, as `535.161.08` or `565.77`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// The branch: 535.
    pub branch: u16,
    /// The second number: 161.
    pub minor: u16,
    /// The third number: 8; some versions have none.
    pub patch: Option<u16>,
}

/// What a layout is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A call to `/dev/nvidiactl` or `/dev/nvidiaN`, by its number.
    Escape(u32),
    /// A function of `NV_ESC_RM_VID_HEAP_CONTROL`.
    VidHeap(u32),
    /// Parameters of an allocation, by class.
    Class(u32),
    /// Parameters of a control, by command.
    Control(u32),
    /// A call to `/dev/nvidia-uvm`, by its number.
    Uvm(u32),
}

/// What a release changed.
#[derive(Debug, Clone, Copy)]
pub enum Change {
    /// From here on these are the layouts; if there are several, the size decides.
    Set(Key, &'static [Layout]),
    /// From here on the driver doesn't know it.
    Remove(Key),
}

/// One release of the table.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The first release with these changes.
    pub version: Version,
    /// The row it builds on; the first has none.
    pub parent: Option<Version>,
    /// What it changed.
    pub changes: &'static [Change],
}

/// How much is known of a release's layouts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// They were compared with the headers of the releases around it.
    Checked,
    /// Its headers were never published; it is taken to be as the first release whose
    /// headers were.
    Unpublished {
        /// That release.
        like: Version,
    },
    /// It is newer than what was compared; it is taken to be as the last row before it.
    Newer {
        /// The last release that was compared, of its branch or of those before it.
        checked: Version,
    },
}

/// A driver's release, with its layouts.
#[derive(Debug, Clone)]
pub struct Release {
    version: Version,
    standing: Standing,
    layouts: Vec<(Key, &'static [Layout])>,
}

/// Why a release has no layouts, or isn't one.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ReleaseError {
    /// It is older than what is served.
    #[error(
        "driver {version} is older than {oldest}, whose calls are the oldest known; \
         install a driver of branch {oldest} or later"
    )]
    TooOld {
        /// The driver's version.
        version: Version,
        /// The oldest branch that is served.
        oldest: u16,
    },
    /// It is no version.
    #[error("'{text}' is no version of a driver; it should be as 535.161.08")]
    NotAVersion {
        /// What was said to be one; at most 64 characters of it.
        text: String,
    },
}

/// The oldest branch that is served.
///
/// UVM's calls and the wrapper were compared with the sources of 470.256.02, which are
/// as 515.43.04's; `nvos.h` was published only from 515.43.04 on. Before 470 they
/// differ: 460 has no `NV_ESC_REGISTER_FD`, 418 a shorter `UVM_REGISTER_GPU` and a
/// longer `UVM_MAP_EXTERNAL_ALLOCATION`.
pub const OLDEST_BRANCH: u16 = 470;

/// First and last release of each branch whose headers were compared.
///
/// From `NVIDIA/open-gpu-kernel-modules`: these and all its releases between them.
const CHECKED: &[(Version, Version)] = &[
    (v(515, 43, 4), v(515, 105, 1)),
    (v(520, 56, 6), v(520, 61, 7)),
    (v(525, 47, 4), v(525, 147, 5)),
    (v(530, 30, 2), v(530, 41, 3)),
    (v(535, 43, 2), v(535, 288, 1)),
    (v(545, 23, 6), v(545, 29, 6)),
    (v(550, 40, 7), v(550, 163, 1)),
    (v(555, 42, 2), v(555, 58, 2)),
    (v(560, 28, 3), v(560, 35, 3)),
    (v(565, 57, 1), short(565, 77)),
    (v(570, 86, 15), v(570, 211, 1)),
    (v(575, 51, 2), v(575, 64, 5)),
    (v(580, 65, 6), short(580, 142)),
    (v(590, 44, 1), v(590, 48, 1)),
    (v(595, 44, 2), v(595, 45, 4)),
];

/// All releases that changed what is read or written here.
///
/// Beyond 595.45.04 no headers were at hand; the tables of gVisor's nvproxy, up to
/// 620.06, name no change of those of these structs that they have. They have no sizes of
/// controls: see [`fbinfo::sizes`](super::fbinfo::sizes).
pub static RELEASES: &[Row] = &[
    Row { version: v(515, 43, 4), parent: None, changes: ROOT },
    // nvos.h: NVOS64 gets `flags` at 32, where `status` was; the size stays at 40.
    Row {
        version: v(525, 47, 4),
        parent: Some(v(515, 43, 4)),
        changes: &[Set(Escape(NV_ESC_RM_ALLOC), structs::ALLOC_525)],
    },
    // nvos.h: NVOS21 gets `paramsSize` at 24, where `status` was, and stays at 32 bytes;
    // NVOS64 gets it at 32, 40 → 48 bytes. cl0042.h: new. cl00da.h: new. uvm_ioctl.h: UVM_MM_INITIALIZE is new.
    Row {
        version: v(535, 43, 2),
        parent: Some(v(525, 47, 4)),
        changes: &[
            Set(Escape(NV_ESC_RM_ALLOC), structs::ALLOC_535),
            Set(Class(NV_MEMORY_EXTENDED_USER), structs::MEMORY_120),
            Set(Class(NV_SEMAPHORE_SURFACE), structs::SEMAPHORE_SURFACE),
            Set(Uvm(UVM_MM_INITIALIZE), structs::UVM_MM_INITIALIZE),
        ],
    },
    // nvos.h: `numaNode` appended to NV_MEMORY_ALLOCATION_PARAMS, 120 → 128 bytes; `size`
    // stays at 64. ctrl2080fb.h: NV2080_CTRL_FB_INFO_MAX_LIST_SIZE 0x36 → 0x37.
    // ctrl0000unix.h: `gpuInstanceId` of an exported file, 76 → 80 bytes; `fd` stays at 0.
    Row {
        version: v(545, 23, 6),
        parent: Some(v(535, 43, 2)),
        changes: &[
            Set(Class(NV01_MEMORY_LOCAL_USER), structs::MEMORY_128),
            Set(Class(NV01_MEMORY_SYSTEM), structs::MEMORY_128),
            Set(Class(NV01_MEMORY_DEVICELESS), structs::MEMORY_128),
            Set(Class(NV50_MEMORY_VIRTUAL), structs::MEMORY_128),
            Set(Class(NV_MEMORY_EXTENDED_USER), structs::MEMORY_128),
            Set(Control(NV2080_CTRL_CMD_FB_GET_INFO_V2), structs::FB_INFO_V2_55),
            Set(Control(NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO), structs::EXPORT_INFO_80),
        ],
    },
    // nvos.h: NVOS47 gets `size`, 40 → 48 bytes, `status` 32 → 40.
    Row {
        version: v(550, 40, 7),
        parent: Some(v(545, 23, 6)),
        changes: &[Set(Escape(NV_ESC_RM_UNMAP_MEMORY_DMA), structs::UNMAP_MEMORY_DMA_550)],
    },
    // uvm_types.h: 256 mapping attributes in place of 32. Of the releases for everybody
    // 550.54.14 is the first.
    Row {
        version: v(550, 40, 53),
        parent: Some(v(550, 40, 7)),
        changes: &[
            Set(Uvm(UVM_MAP_EXTERNAL_ALLOCATION), structs::UVM_MAP_EXTERNAL_256),
            Set(Uvm(UVM_ALLOC_SEMAPHORE_POOL), structs::UVM_SEMAPHORE_POOL_256),
        ],
    },
    // ctrl2080fb.h: NV2080_CTRL_FB_INFO_MAX_LIST_SIZE 0x37 → 0x39.
    Row {
        version: v(560, 28, 3),
        parent: Some(v(550, 40, 53)),
        changes: &[Set(Control(NV2080_CTRL_CMD_FB_GET_INFO_V2), structs::FB_INFO_V2_57)],
    },
    // uvm_ioctl.h: UVM_ALLOC_DEVICE_P2P is new.
    Row {
        version: v(565, 57, 1),
        parent: Some(v(560, 28, 3)),
        changes: &[Set(Uvm(UVM_ALLOC_DEVICE_P2P), structs::UVM_ALLOC_DEVICE_P2P)],
    },
    // nv-ioctl.h: `mappingType` before `handles`, 2600 → 2608 bytes.
    Row {
        version: v(570, 86, 15),
        parent: Some(v(565, 57, 1)),
        changes: &[Set(Escape(NV_ESC_EXPORT_TO_DMABUF_FD), structs::EXPORT_TO_DMABUF_570)],
    },
    // nvos.h: NVOS46 gets `flags2`, 56 → 64 bytes, `status` 48 → 56. ctrl2080fb.h:
    // NV2080_CTRL_FB_INFO_MAX_LIST_SIZE 0x39 → 0x80.
    Row {
        version: v(580, 65, 6),
        parent: Some(v(570, 86, 15)),
        changes: &[
            Set(Escape(NV_ESC_RM_MAP_MEMORY_DMA), structs::MAP_MEMORY_DMA_580),
            Set(Control(NV2080_CTRL_CMD_FB_GET_INFO_V2), structs::FB_INFO_V2_128),
        ],
    },
    // uvm_ioctl.h: UVM_FREE loses `length`, 24 → 16 bytes, `rmStatus` 16 → 8.
    Row {
        version: v(590, 44, 1),
        parent: Some(v(580, 65, 6)),
        changes: &[Set(Uvm(UVM_FREE), structs::UVM_FREE_16)],
    },
    // cl0042.h: gone.
    Row {
        version: v(595, 44, 2),
        parent: Some(v(590, 44, 1)),
        changes: &[Remove(Class(NV_MEMORY_EXTENDED_USER))],
    },
];

use Change::{Remove, Set};
use Key::{Class, Control, Escape, Uvm, VidHeap};

/// Everything, as 515.43.04 has it.
const ROOT: &[Change] = &[
    Set(Escape(NV_ESC_RM_ALLOC_MEMORY), structs::ALLOC_MEMORY),
    Set(Escape(NV_ESC_RM_ALLOC_OBJECT), structs::ALLOC_OBJECT),
    Set(Escape(NV_ESC_RM_FREE), structs::FREE),
    Set(Escape(NV_ESC_RM_CONTROL), structs::CONTROL),
    Set(Escape(NV_ESC_RM_ALLOC), structs::ALLOC_515),
    Set(Escape(NV_ESC_RM_DUP_OBJECT), structs::DUP_OBJECT),
    Set(Escape(NV_ESC_RM_SHARE), structs::SHARE),
    Set(Escape(NV_ESC_RM_IDLE_CHANNELS), structs::IDLE_CHANNELS),
    Set(Escape(NV_ESC_RM_VID_HEAP_CONTROL), structs::VID_HEAP),
    Set(Escape(NV_ESC_RM_MAP_MEMORY), structs::MAP_MEMORY),
    Set(Escape(NV_ESC_RM_UNMAP_MEMORY), structs::UNMAP_MEMORY),
    Set(Escape(NV_ESC_RM_ALLOC_CONTEXT_DMA2), structs::ALLOC_CONTEXT_DMA2),
    Set(Escape(NV_ESC_RM_MAP_MEMORY_DMA), structs::MAP_MEMORY_DMA_515),
    Set(Escape(NV_ESC_RM_UNMAP_MEMORY_DMA), structs::UNMAP_MEMORY_DMA_515),
    Set(Escape(NV_ESC_RM_BIND_CONTEXT_DMA), structs::BIND_CONTEXT_DMA),
    Set(Escape(NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO), structs::UPDATE_DEVICE_MAPPING_INFO),
    Set(Escape(NV_ESC_REGISTER_FD), structs::REGISTER_FD),
    Set(Escape(NV_ESC_ALLOC_OS_EVENT), structs::ALLOC_OS_EVENT),
    Set(Escape(NV_ESC_FREE_OS_EVENT), structs::FREE_OS_EVENT),
    Set(Escape(NV_ESC_IOCTL_XFER_CMD), structs::XFER),
    Set(Escape(NV_ESC_EXPORT_TO_DMABUF_FD), structs::EXPORT_TO_DMABUF_515),
    Set(VidHeap(NVOS32_FUNCTION_ALLOC_SIZE), structs::VID_HEAP_ALLOC_SIZE),
    Set(VidHeap(NVOS32_FUNCTION_ALLOC_SIZE_RANGE), structs::VID_HEAP_ALLOC_RANGE),
    Set(VidHeap(NVOS32_FUNCTION_ALLOC_TILED_PITCH_HEIGHT), structs::VID_HEAP_ALLOC_TILED),
    Set(VidHeap(NVOS32_FUNCTION_FREE), structs::VID_HEAP_FREE),
    Set(VidHeap(NVOS32_FUNCTION_INFO), structs::VID_HEAP_INFO),
    Set(VidHeap(NVOS32_FUNCTION_RELEASE_COMPR), structs::VID_HEAP_OTHER),
    Set(VidHeap(NVOS32_FUNCTION_REACQUIRE_COMPR), structs::VID_HEAP_OTHER),
    Set(VidHeap(NVOS32_FUNCTION_GET_MEM_ALIGNMENT), structs::VID_HEAP_OTHER),
    Set(VidHeap(NVOS32_FUNCTION_HW_ALLOC), structs::VID_HEAP_OTHER),
    Set(VidHeap(NVOS32_FUNCTION_HW_FREE), structs::VID_HEAP_HW_FREE),
    Set(VidHeap(NVOS32_FUNCTION_ALLOC_OS_DESCRIPTOR), structs::VID_HEAP_OTHER),
    Set(Class(NV01_DEVICE_0), structs::DEVICE),
    Set(Class(NV20_SUBDEVICE_0), structs::SUBDEVICE),
    Set(Class(KEPLER_CHANNEL_GROUP_A), structs::CHANNEL_GROUP),
    Set(Class(NV01_MEMORY_LOCAL_USER), structs::MEMORY_120),
    Set(Class(NV01_MEMORY_SYSTEM), structs::MEMORY_120),
    Set(Class(NV01_MEMORY_DEVICELESS), structs::MEMORY_120),
    Set(Class(NV50_MEMORY_VIRTUAL), structs::MEMORY_120),
    Set(Control(NV2080_CTRL_CMD_FB_GET_INFO), structs::FB_INFO),
    Set(Control(NV2080_CTRL_CMD_FB_GET_INFO_V2), structs::FB_INFO_V2_54),
    Set(Control(NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS), structs::DISABLE_CHANNELS),
    Set(Control(NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD), structs::EXPORT_OBJECT),
    Set(Control(NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD), structs::IMPORT_OBJECT),
    Set(Control(NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD), structs::EXPORT_OBJECTS),
    Set(Control(NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD), structs::IMPORT_OBJECTS),
    Set(Control(NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO), structs::EXPORT_INFO_76),
    Set(Control(NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE), structs::ADDRESS_SPACE),
    Set(Control(NVA06C_CTRL_CMD_SET_TIMESLICE), structs::TIMESLICE),
    Set(Uvm(UVM_INITIALIZE), structs::UVM_INITIALIZE),
    Set(Uvm(UVM_REGISTER_GPU), structs::UVM_REGISTER_GPU),
    Set(Uvm(UVM_UNREGISTER_GPU), structs::UVM_UNREGISTER_GPU),
    Set(Uvm(UVM_REGISTER_GPU_VASPACE), structs::UVM_REGISTER_GPU_VASPACE),
    Set(Uvm(UVM_UNREGISTER_GPU_VASPACE), structs::UVM_UNREGISTER_GPU_VASPACE),
    Set(Uvm(UVM_REGISTER_CHANNEL), structs::UVM_REGISTER_CHANNEL),
    Set(Uvm(UVM_MAP_EXTERNAL_ALLOCATION), structs::UVM_MAP_EXTERNAL_32),
    Set(Uvm(UVM_FREE), structs::UVM_FREE_24),
    Set(Uvm(UVM_UNMAP_EXTERNAL), structs::UVM_UNMAP_EXTERNAL),
    Set(Uvm(UVM_CREATE_EXTERNAL_RANGE), structs::UVM_CREATE_EXTERNAL_RANGE),
    Set(Uvm(UVM_VALIDATE_VA_RANGE), structs::UVM_VALIDATE_VA_RANGE),
    Set(Uvm(UVM_DISABLE_READ_DUPLICATION), structs::UVM_DISABLE_READ_DUPLICATION),
    Set(Uvm(UVM_CLEAN_UP_ZOMBIE_RESOURCES), structs::UVM_CLEAN_UP_ZOMBIE_RESOURCES),
    Set(Uvm(UVM_ALLOC_SEMAPHORE_POOL), structs::UVM_SEMAPHORE_POOL_32),
    Set(Uvm(UVM_MAP_DYNAMIC_PARALLELISM_REGION), structs::UVM_MAP_DYNAMIC_PARALLELISM_REGION),
];

/// A version of two numbers.
const fn short(branch: u16, minor: u16) -> Version {
    Version { branch, minor, patch: None }
}

/// A version of three numbers.
const fn v(branch: u16, minor: u16, patch: u16) -> Version {
    Version { branch, minor, patch: Some(patch) }
}

impl FromStr for Version {
    type Err = ReleaseError;

    fn from_str(text: &str) -> Result<Self, ReleaseError> {
        let number = |text: &str| {
            let digits = (1..=4).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
            digits.then(|| text.parse::<u16>().ok()).flatten()
        };
        let mut parts = text.split('.').map(number);
        match (parts.next(), parts.next(), parts.next(), parts.next()) {
            (Some(Some(branch)), Some(Some(minor)), None, None) => Ok(short(branch, minor)),
            (Some(Some(branch)), Some(Some(minor)), Some(Some(patch)), None) => {
                Ok(v(branch, minor, patch))
            }
            _ => Err(ReleaseError::NotAVersion { text: text.chars().take(64).collect() }),
        }
    }
}

impl Version {
    /// The version in the first line of `/proc/driver/nvidia/version` (`nv-procfs.c`,
    /// `nv_procfs_read_version`): the word that looks like one.
    #[must_use]
    pub fn in_banner(text: &str) -> Option<Self> {
        text.lines().next()?.split_whitespace().find_map(|word| word.parse().ok())
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}", self.branch, self.minor)?;
        self.patch.map_or(Ok(()), |patch| write!(f, ".{patch:02}"))
    }
}

impl Release {
    /// The release of that version.
    ///
    /// # Errors
    ///
    /// Where it is older than [`OLDEST_BRANCH`].
    pub fn of(version: Version) -> Result<Self, ReleaseError> {
        if version.branch < OLDEST_BRANCH {
            return Err(ReleaseError::TooOld { version, oldest: OLDEST_BRANCH });
        }
        let row = RELEASES.iter().rfind(|row| row.version <= version).or(RELEASES.first());
        let layouts = row.map_or_else(Vec::new, fold);
        Ok(Self { version, standing: standing(version), layouts })
    }

    /// Its version.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// How much is known of it; to be logged once where it isn't all.
    #[must_use]
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Whether nothing of its branch was compared: its structs may have grown.
    #[must_use]
    pub fn is_of_new_branch(&self) -> bool {
        match self.standing {
            Standing::Newer { checked } => checked.branch < self.version.branch,
            Standing::Checked | Standing::Unpublished { .. } => false,
        }
    }

    /// The layouts it has of `key`; none where it doesn't know it.
    #[must_use]
    pub fn layouts(&self, key: Key) -> &'static [Layout] {
        match self.layouts.binary_search_by_key(&key, |(of, _)| *of) {
            Ok(at) => self.layouts.get(at).map_or(&[], |(_, layouts)| layouts),
            Err(_) => &[],
        }
    }

    /// The layout it has of `key` in `size` bytes.
    #[must_use]
    pub fn layout(&self, key: Key, size: usize) -> Option<&'static Layout> {
        self.layouts(key).iter().find(|layout| layout.size() == size)
    }
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Checked => f.write_str("its headers were compared"),
            Self::Unpublished { like } => {
                write!(f, "its headers were never published; taken to be as {like}")
            }
            Self::Newer { checked } => {
                write!(f, "newer than {checked}, the last compared; taken to be as that")
            }
        }
    }
}

/// The layouts of a row: its parents' with its own changes, sorted by key.
fn fold(row: &Row) -> Vec<(Key, &'static [Layout])> {
    // Parents are older than their children (tested), so this ends.
    let parent = row.parent.and_then(|of| {
        RELEASES.iter().find(|other| other.version == of && other.version < row.version)
    });
    let mut layouts = parent.map_or_else(Vec::new, fold);
    for change in row.changes {
        let (key, new) = match *change {
            Set(key, layouts) => (key, Some(layouts)),
            Remove(key) => (key, None),
        };
        match (layouts.binary_search_by_key(&key, |(of, _)| *of), new) {
            (Ok(at), Some(new)) => layouts[at].1 = new,
            (Ok(at), None) => {
                layouts.remove(at);
            }
            (Err(at), Some(new)) => layouts.insert(at, (key, new)),
            (Err(_), None) => {}
        }
    }
    layouts
}

fn standing(version: Version) -> Standing {
    let Some((first, _)) = CHECKED.first() else { return Standing::Checked };
    if version < *first {
        return Standing::Unpublished { like: *first };
    }
    let before = CHECKED.iter().rfind(|(first, _)| *first <= version);
    match before {
        Some((_, last)) if version.cmp(last) == Ordering::Greater => {
            Standing::Newer { checked: *last }
        }
        _ => Standing::Checked,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn release(text: &str) -> Release {
        Release::of(text.parse().unwrap()).unwrap()
    }

    #[test]
    fn versions_parse_and_print_like_the_drivers() {
        for text in ["535.161.08", "565.77", "470.05", "515.43.04", "550.100", "610.43.02"] {
            assert_eq!(text.parse::<Version>().unwrap().to_string(), text);
        }
        for text in
            ["", "535", "535.", ".1", "535.1.2.3", "535.x", "+535.1", "99999.1", "535.00001"]
        {
            let error = text.parse::<Version>().unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("'{text}' is no version of a driver; it should be as 535.161.08")
            );
        }
    }

    #[test]
    fn versions_are_ordered_numerically_and_equal_themselves() {
        let sorted = ["470.256.02", "515.43.04", "535.98", "535.104.05", "565.77", "565.77.01"];
        let versions: Vec<Version> = sorted.iter().map(|text| text.parse().unwrap()).collect();
        assert!(versions.is_sorted());
        assert_eq!(versions[0].cmp(&versions[0]), Ordering::Equal);
        assert!(versions.windows(2).all(|pair| pair[0] < pair[1]));
    }

    /// The rows are sorted, and every row but the first has an older parent.
    #[test]
    fn release_rows_are_sorted_with_older_parents() {
        assert!(RELEASES.windows(2).all(|pair| pair[0].version < pair[1].version));
        for (at, row) in RELEASES.iter().enumerate() {
            assert_eq!(row.parent.is_none(), at == 0);
            if let Some(parent) = row.parent {
                assert!(RELEASES[..at].iter().any(|other| other.version == parent));
            }
        }
    }

    #[test]
    fn every_row_folds_and_every_change_changes_something() {
        for row in RELEASES {
            let before = row.parent.map(|parent| Release::of(parent).unwrap());
            let after = Release::of(row.version).unwrap();
            assert!(after.layouts.iter().map(|(key, _)| key).is_sorted());
            let mut seen = HashSet::new();
            for change in row.changes {
                let key = match change {
                    Set(key, layouts) => {
                        assert_eq!(after.layouts(*key), *layouts);
                        key
                    }
                    Remove(key) => {
                        assert!(after.layouts(*key).is_empty());
                        key
                    }
                };
                assert!(seen.insert(key), "{key:?} twice in {}", row.version);
                let old = before.as_ref().map_or(&[][..], |before| before.layouts(*key));
                assert_ne!(old, after.layouts(*key), "{key:?} in {}", row.version);
            }
            assert!(!row.changes.is_empty());
        }
    }

    #[test]
    fn layouts_of_one_key_differ_in_size() {
        for row in RELEASES {
            for (key, layouts) in Release::of(row.version).unwrap().layouts {
                let sizes: HashSet<usize> = layouts.iter().map(Layout::size).collect();
                assert_eq!(sizes.len(), layouts.len(), "{key:?}");
                assert!(!layouts.is_empty());
            }
        }
    }

    #[test]
    fn a_change_begins_at_its_release_and_lasts() {
        let sizes = |text: &str, key| -> Vec<usize> {
            release(text).layouts(key).iter().map(Layout::size).collect()
        };
        let alloc = Escape(NV_ESC_RM_ALLOC);
        assert_eq!(sizes("470.256.02", alloc), [32, 40]);
        assert_eq!(sizes("530.41.03", alloc), [32, 40]);
        assert_eq!(sizes("535.43.02", alloc), [32, 48]);
        assert_eq!(sizes("595.45.04", alloc), [32, 48]);
        let memory = Class(NV01_MEMORY_LOCAL_USER);
        assert_eq!(sizes("535.288.01", memory), [120]);
        assert_eq!(sizes("545.23.06", memory), [128]);
        let info = Control(NV2080_CTRL_CMD_FB_GET_INFO_V2);
        for (text, entries) in [
            ("535.161.08", 0x36),
            ("545.23.06", 0x37),
            ("550.163.01", 0x37),
            ("560.28.03", 0x39),
            ("575.64.05", 0x39),
            ("580.65.06", 0x80),
        ] {
            assert_eq!(sizes(text, info), [4 + 8 * entries], "{text}");
        }
        let extended = Class(NV_MEMORY_EXTENDED_USER);
        assert!(sizes("530.41.03", extended).is_empty());
        assert_eq!(sizes("590.48.01", extended), [128]);
        assert!(sizes("595.44.02", extended).is_empty());
    }

    /// A driver newer than the table, or than the table's rows of its branch, has the last row, and
    /// says so.
    #[test]
    fn newer_driver_reports_using_the_last_row() {
        let newer = release("620.06");
        assert_eq!(newer.layouts, release("595.45.04").layouts);
        assert_eq!(
            newer.standing().to_string(),
            "newer than 595.45.04, the last compared; taken to be as that"
        );
        let branch = release("535.309.01");
        assert_eq!(branch.layouts, release("535.288.01").layouts);
        let Standing::Newer { checked } = branch.standing() else { panic!("it is newer") };
        assert!(!branch.is_of_new_branch() && release("596.10.01").is_of_new_branch());
        assert_eq!(checked.to_string(), "535.288.01");
        assert_eq!(release("535.161.08").standing(), Standing::Checked);
    }

    /// A driver whose headers are unpublished says so, and an older driver is refused.
    #[test]
    fn unpublished_headers_are_reported_older_drivers_refused() {
        assert_eq!(
            release("470.256.02").standing().to_string(),
            "its headers were never published; taken to be as 515.43.04"
        );
        let error = Release::of("418.87.01".parse().unwrap()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "driver 418.87.01 is older than 470, whose calls are the oldest known; \
             install a driver of branch 470 or later"
        );
    }
}
