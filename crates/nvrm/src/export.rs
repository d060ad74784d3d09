//! Memory in files: controls that put it into one, and take it out.
//!
//! Each names the file by a descriptor of the process that makes the call (`ctrl0000unix.h`), and
//! the driver keeps the memory alive while the file is open. A file has as many places as its first
//! export says: one if that is of a single object, at most 65,535 if it is of a list. A list goes
//! into consecutive places and frees what these had; where it names no object (0), a place is left
//! empty. Either all of a list is exported, or imported, or nothing
//! (`cliresCtrlCmdOsUnixExportObjectsToFd_IMPL` and its neighbours in `os.c`). What exports and
//! imports is alike from 515.43.04 to 595.45.04.

use alloc::vec;
use alloc::vec::Vec;

use super::layout::{Layout, Meaning};
use super::number::{
    NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE, NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE_SYSMEM,
    NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE_VIDMEM, NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD,
    NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD, NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO,
    NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD, NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_TYPE_NONE,
    NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD,
};
use super::release::{Key, Release};

/// What one of these does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    /// Puts an object into a file.
    Export,
    /// Puts a list of objects into a file.
    ExportList,
    /// Makes an object of what is in a file.
    Import,
    /// Makes objects of what is in a file.
    ImportList,
    /// Reports what is in a file.
    Report,
}

/// What is exported or imported, and where in the file it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// The first place.
    pub first: u32,
    /// The object that is to be in each from there on; 0 is none, or one whose handle the
    /// driver chooses.
    pub objects: Vec<u32>,
    /// The object above those that are made; the device, or another object above, of those that are
    /// exported, as far as the caller says.
    pub parent: u32,
}

impl Places {
    /// Whether that place is among them.
    #[must_use]
    pub fn has(&self, place: u32) -> bool {
        let number = place.checked_sub(self.first).and_then(|number| usize::try_from(number).ok());
        number.is_some_and(|number| number < self.objects.len())
    }

    /// The places for which there is an object, and that.
    pub fn named(&self) -> impl Iterator<Item = (u32, u32)> {
        let all = (self.first..).zip(self.objects.iter().copied());
        all.filter(|(_, object)| *object != 0)
    }
}

/// Bytes of `NV0000_CTRL_OS_UNIX_EXPORT_OBJECTS_TO_FD_PARAMS`, of which the descriptor comes
/// first and all but `numObjects` and `index` is 0 here.
const CLEAR_BYTES: usize = 2128;
const CLEAR_DESCRIPTOR: core::ops::Range<usize> = 0..4;
const FIRST_OBJECT: core::ops::Range<usize> = 76..80;
const CLEAR_COUNT: core::ops::Range<usize> = 2124..2126;
const CLEAR_INDEX: core::ops::Range<usize> = 2126..2128;

/// Places that one control clears at most:
/// `NV0000_CTRL_OS_UNIX_EXPORT_OBJECTS_TO_FD_MAX_OBJECTS`.
const MAX_CLEARED: u32 = 512;

/// `NVOS33_FLAGS_MAPPING` (16:15) as `_DIRECT`: else memory of the host may be shown as the
/// GPU's, as `RmImportObject` (`rmobjexportimport.c`) says.
const MAPPED_DIRECTLY: u64 = 1 << 15;

/// What a control does; `None` where it is none of these.
#[must_use]
pub fn does(command: u32) -> Option<Does> {
    match command {
        NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD => Some(Does::Export),
        NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD => Some(Does::ExportList),
        NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD => Some(Does::Import),
        NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD => Some(Does::ImportList),
        NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO => Some(Does::Report),
        _ => None,
    }
}

/// The struct of such a control, where parameters have its size.
#[must_use]
pub fn layout(release: &Release, does: Does, size: usize) -> Option<&'static Layout> {
    let command = match does {
        Does::Export => NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD,
        Does::ExportList => NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD,
        Does::Import => NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD,
        Does::ImportList => NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD,
        Does::Report => NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO,
    };
    release.layouts(Key::Control(command)).iter().find(|layout| layout.size() == size)
}

/// The descriptor in parameters.
#[must_use]
pub fn descriptor(layout: &'static Layout, params: &[u8]) -> Option<i32> {
    Some(layout.view(params)?.u32(Meaning::Descriptor)?.cast_signed())
}

/// Puts a descriptor into parameters.
pub fn set_descriptor(layout: &'static Layout, params: &mut [u8], descriptor: i32) {
    let patch = layout.patch(Meaning::Descriptor, descriptor.cast_unsigned().into());
    let _ = patch.is_some_and(|patch| patch.apply(params));
}

/// What parameters ask for; `None` if they name more objects than their arrays can hold.
#[must_use]
pub fn places(layout: &'static Layout, params: &[u8]) -> Option<Places> {
    let view = layout.view(params)?;
    let parent = view.u32(Meaning::Parent)?;
    let Some(list) = view.bytes(Meaning::List) else {
        return Some(Places { first: 0, objects: vec![view.u32(Meaning::Handle)?], parent });
    };
    let count = usize::try_from(view.u32(Meaning::Count)?).ok()?;
    let objects = list.get(..count.checked_mul(4)?)?.chunks_exact(4);
    let number = |bytes: &[u8]| bytes.try_into().map_or(0, u32::from_le_bytes);
    let first = view.u32(Meaning::Offset)?;
    Some(Places { first, objects: objects.map(number).collect(), parent })
}

/// Puts other objects in the place of those that parameters name.
pub fn set_objects(layout: &'static Layout, params: &mut [u8], objects: &[u32]) {
    let Some(field) = layout.field(Meaning::List) else {
        let handle = objects.first().copied().unwrap_or_default();
        let patch = layout.patch(Meaning::Handle, handle.into());
        let _ = patch.is_some_and(|patch| patch.apply(params));
        return;
    };
    let list = params.get_mut(field.offset..field.offset + field.width).unwrap_or_default();
    for (place, object) in list.chunks_exact_mut(4).zip(objects) {
        place.copy_from_slice(&object.to_le_bytes());
    }
}

/// Whether an import that was done made the object of that number.
#[must_use]
pub fn is_imported(layout: &'static Layout, params: &[u8], number: usize) -> bool {
    let kinds = layout.view(params).and_then(|view| view.bytes(Meaning::Kind));
    let none = NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_TYPE_NONE;
    // One alone is there, or the import fails.
    kinds.is_none_or(|kinds| kinds.get(number).is_some_and(|kind| u32::from(*kind) != none))
}

/// The parameters that clear so many places of a file
/// (`NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD`).
#[must_use]
pub fn clear(descriptor: i32, first: u16, count: u16) -> Vec<u8> {
    let mut params = vec![0; CLEAR_BYTES];
    if let Some(place) = params.get_mut(CLEAR_DESCRIPTOR) {
        place.copy_from_slice(&descriptor.to_le_bytes());
    }
    for (place, value) in [(CLEAR_COUNT, count), (CLEAR_INDEX, first)] {
        if let Some(place) = params.get_mut(place) {
            place.copy_from_slice(&value.to_le_bytes());
        }
    }
    params
}

/// The parameters that put an object into the first place of a file whose other places were
/// set up before (`NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD`).
#[must_use]
pub fn one(descriptor: i32, object: u32) -> Vec<u8> {
    let mut params = clear(descriptor, 0, 1);
    if let Some(place) = params.get_mut(FIRST_OBJECT) {
        place.copy_from_slice(&object.to_le_bytes());
    }
    params
}

/// Controls that clear the places of a file, which are in order: of each the first place and
/// how many.
#[must_use]
pub fn clearings(places: &[u32]) -> Vec<(u16, u16)> {
    let mut clearings: Vec<(u16, u16)> = Vec::new();
    // No file has places beyond.
    for place in places.iter().filter_map(|place| u16::try_from(*place).ok()) {
        match clearings.last_mut() {
            Some((first, count)) if u32::from(place - *first) < MAX_CLEARED => {
                *count = place - *first + 1;
            }
            _ => clearings.push((place, 1)),
        }
    }
    clearings
}

/// The parameters that ask what is in a file: it fails where there never was anything
/// (`NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO`).
#[must_use]
pub fn ask(release: &Release, descriptor: i32) -> Option<Vec<u8>> {
    let command = NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO;
    let layout = release.layouts(Key::Control(command)).first()?;
    let mut params = vec![0; layout.size()];
    set_descriptor(layout, &mut params, descriptor);
    Some(params)
}

/// The parameters that ask where the memory of an object is
/// (`NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE`).
#[must_use]
pub fn ask_where(release: &Release, object: u32) -> Option<Vec<u8>> {
    let layout = where_layout(release)?;
    let mut params = vec![0; layout.size()];
    let fields = [(Meaning::Handle, object.into()), (Meaning::Flags, MAPPED_DIRECTLY)];
    let done = fields.into_iter().all(|(meaning, value)| {
        layout.patch(meaning, value).is_some_and(|patch| patch.apply(&mut params))
    });
    done.then_some(params)
}

/// Whether that is memory of the host, as the driver answered.
#[must_use]
pub fn is_of_the_host(release: &Release, params: &[u8]) -> bool {
    let kind = where_layout(release).and_then(|layout| layout.view(params)?.u32(Meaning::Kind));
    kind == Some(NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE_SYSMEM)
}

/// Whether that is memory of a GPU.
#[must_use]
pub fn is_of_a_gpu(release: &Release, params: &[u8]) -> bool {
    let kind = where_layout(release).and_then(|layout| layout.view(params)?.u32(Meaning::Kind));
    kind == Some(NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE_VIDMEM)
}

fn where_layout(release: &Release) -> Option<&'static Layout> {
    release.layouts(Key::Control(NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE)).first()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn release() -> Release {
        Release::of("535.161.08".parse().unwrap()).unwrap()
    }

    const ALL: [(Does, usize, usize); 5] = [
        (Does::Report, 76, 0),
        (Does::Export, 24, 16),
        (Does::ExportList, 2128, 0),
        (Does::Import, 20, 0),
        (Does::ImportList, 652, 0),
    ];

    #[test]
    fn descriptor_is_found_and_replaced_in_every_layout() {
        for (does, size, at) in ALL {
            let mut params = vec![0xaa; size];
            params[at..at + 4].copy_from_slice(&7_i32.to_le_bytes());
            let layout = layout(&release(), does, size).unwrap();
            assert_eq!(descriptor(layout, &params), Some(7), "{does:?}");
            assert_eq!(descriptor(layout, &params[1..]), None, "{does:?}");
            set_descriptor(layout, &mut params, -1);
            assert_eq!(descriptor(layout, &params), Some(-1), "{does:?}");
            let others = params.iter().enumerate().filter(|(here, _)| !(at..at + 4).contains(here));
            assert!(others.map(|(_, byte)| *byte).all(|byte| byte == 0xaa), "{does:?}");
        }
        assert_eq!(layout(&release(), Does::Export, 20), None);
        let newer = Release::of("580.65.06".parse().unwrap()).unwrap();
        assert_eq!((ask(&release(), 1).unwrap().len(), ask(&newer, 1).unwrap().len()), (76, 80));
    }

    #[test]
    fn clearing_exports_null_objects() {
        let params = clear(9, 0x102, 3);
        let layout = layout(&release(), Does::ExportList, params.len()).unwrap();
        assert_eq!(descriptor(layout, &params), Some(9));
        assert_eq!(params.iter().filter(|byte| **byte != 0).count(), 4);
        let objects = vec![0; 3];
        let found = places(layout, &params).unwrap();
        assert_eq!(found, Places { first: 0x102, objects, parent: 0 });
        assert!([0x102, 0x104].into_iter().all(|place| found.has(place)));
        assert!([0, 0x101, 0x105].into_iter().all(|place| !found.has(place)));
        assert_eq!(found.named().count(), 0);
        let found = places(layout, &one(9, 0xcafe)).unwrap();
        assert_eq!(found.named().collect::<Vec<_>>(), [(0, 0xcafe)]);
    }

    #[test]
    fn distant_places_are_cleared_by_separate_controls() {
        assert_eq!(clearings(&[]), []);
        assert_eq!(clearings(&[0]), [(0, 1)]);
        assert_eq!(clearings(&[3, 4, 514, 515, 65_535, 65_536]), [(3, 512), (515, 1), (65_535, 1)]);
    }

    #[test]
    fn one_object_is_in_the_first_place() {
        let layout = layout(&release(), Does::Import, 20).unwrap();
        let mut params = vec![0; 20];
        set_objects(layout, &mut params, &[0xcafe]);
        params[12] = 5;
        assert_eq!(
            places(layout, &params),
            Some(Places { first: 0, objects: vec![0xcafe], parent: 5 })
        );
        assert!(is_imported(layout, &params, 0));
    }

    #[test]
    fn object_count_beyond_the_list_is_refused() {
        for (does, size, count_at, most) in
            [(Does::ExportList, 2128, 2124, 512_u16), (Does::ImportList, 652, 648, 128)]
        {
            let layout = layout(&release(), does, size).unwrap();
            let count = |count: u16| {
                let mut params = vec![1; size];
                params[count_at..count_at + 2].copy_from_slice(&count.to_le_bytes());
                places(layout, &params).map(|places| places.objects.len())
            };
            assert_eq!((count(0), count(most)), (Some(0), Some(usize::from(most))));
            assert_eq!((count(most + 1), count(u16::MAX)), (None, None));
        }
    }

    #[test]
    fn what_was_imported_stands_beside_the_objects() {
        let layout = layout(&release(), Does::ImportList, 652).unwrap();
        let mut params = vec![0; 652];
        (params[521], params[648]) = (2, 2);
        assert!(!is_imported(layout, &params, 0) && is_imported(layout, &params, 1));
        assert!(!is_imported(layout, &params, 128));
        set_objects(layout, &mut params, &[7, 8]);
        assert_eq!(places(layout, &params).unwrap().objects, [7, 8]);
        assert_eq!(params.iter().map(|byte| u32::from(*byte)).sum::<u32>(), 7 + 8 + 2 + 2);
    }

    #[test]
    fn host_memory_follows_the_drivers_report() {
        let mut params = ask_where(&release(), 0xcafe).unwrap();
        assert_eq!(params, [0xfe, 0xca, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0]);
        for kind in 0..6 {
            params[8] = kind;
            assert_eq!(is_of_the_host(&release(), &params), kind == 1);
        }
        assert!(!is_of_the_host(&release(), &params[1..]));
    }

    proptest! {
        #[test]
        fn lists_of_any_bytes_are_read_or_refused(
            seed in proptest::collection::vec(any::<u8>(), 1..300),
        ) {
            for (does, size, _) in ALL {
                let layout = layout(&release(), does, size).unwrap();
                let mut params: Vec<u8> = seed.iter().copied().cycle().take(size).collect();
                if let Some(found) = places(layout, &params) {
                    let before = params.clone();
                    set_objects(layout, &mut params, &found.objects);
                    prop_assert_eq!(&params, &before);
                    let _ = is_imported(layout, &params, found.objects.len());
                }
            }
        }

        /// All places are cleared, and none beyond the last of them.
        #[test]
        fn clearing_covers_all_places_and_none_beyond(
            places in proptest::collection::btree_set(0_u32..0x1_0000, 0..40),
        ) {
            let places: Vec<u32> = places.into_iter().collect();
            let clearings = clearings(&places);
            let covers = |place: u32| clearings.iter().any(|(first, count)| {
                (u32::from(*first)..u32::from(*first) + u32::from(*count)).contains(&place)
            });
            prop_assert!(places.iter().all(|place| covers(*place)));
            for (first, count) in &clearings {
                let last = u32::from(*first) + u32::from(*count) - 1;
                prop_assert!(u32::from(*count) <= MAX_CLEARED && places.contains(&last));
            }
        }
    }
}
