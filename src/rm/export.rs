//! Memory in files: controls that put it into one, and take it out.
//!
//! Each names the file by a descriptor of whoever makes the call (`ctrl0000unix.h`), and the
//! driver keeps the memory while the file is open. An export of nothing in the place of what a
//! file has frees that (`cliresCtrlCmdOsUnixExportObjectsToFd_IMPL` in `os.c`).

use super::layout::{Layout, Meaning};
use super::number::{
    NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD, NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO,
    NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD,
};
use super::release::{Key, Release};

/// What one of these does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    /// Puts an object into a file.
    Export,
    /// Makes an object of what is in a file.
    Import,
    /// Tells what is in a file.
    Tell,
}

/// Where the one that only tells has its descriptor, in all releases.
const TOLD_DESCRIPTOR: std::ops::Range<usize> = 0..4;

/// Bytes of `NV0000_CTRL_OS_UNIX_EXPORT_OBJECTS_TO_FD_PARAMS`, of which the descriptor comes
/// first and all but `numObjects` is 0 here.
const CLEAR_BYTES: usize = 2128;
const CLEAR_COUNT: std::ops::Range<usize> = 2124..2126;

/// What a control does; `None` where it is none of these.
#[must_use]
pub fn does(command: u32) -> Option<Does> {
    match command {
        NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD => Some(Does::Export),
        NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD => Some(Does::Import),
        NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO => Some(Does::Tell),
        _ => None,
    }
}

/// The struct of an export or an import, where parameters have its size.
#[must_use]
pub fn layout(release: &Release, does: Does, size: usize) -> Option<&'static Layout> {
    let command = match does {
        Does::Export => NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD,
        Does::Import => NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD,
        Does::Tell => return None,
    };
    release.layouts(Key::Control(command)).iter().find(|layout| layout.size() == size)
}

/// The descriptor in parameters.
#[must_use]
pub fn descriptor(layout: Option<&'static Layout>, params: &[u8]) -> Option<i32> {
    let bits = match layout {
        Some(layout) => layout.view(params)?.u32(Meaning::Descriptor)?,
        None => u32::from_le_bytes(params.get(TOLD_DESCRIPTOR)?.try_into().ok()?),
    };
    Some(bits.cast_signed())
}

/// Puts a descriptor into parameters.
pub fn set_descriptor(layout: Option<&'static Layout>, params: &mut [u8], descriptor: i32) {
    let bits = descriptor.cast_unsigned();
    match layout {
        Some(layout) => {
            let patch = layout.patch(Meaning::Descriptor, bits.into());
            let _ = patch.is_some_and(|patch| patch.apply(params));
        }
        None => {
            if let Some(place) = params.get_mut(TOLD_DESCRIPTOR) {
                place.copy_from_slice(&bits.to_le_bytes());
            }
        }
    }
}

/// The parameters that clear a file (`NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD`).
#[must_use]
pub fn clear(descriptor: i32) -> Vec<u8> {
    let mut params = vec![0; CLEAR_BYTES];
    set_descriptor(None, &mut params, descriptor);
    if let Some(place) = params.get_mut(CLEAR_COUNT) {
        place.copy_from_slice(&1_u16.to_le_bytes());
    }
    params
}

#[cfg(test)]
mod tests {
    use super::*;

    fn release() -> Release {
        Release::of("535.161.08".parse().unwrap()).unwrap()
    }

    #[test]
    fn the_descriptor_is_found_and_replaced_wherever_it_is() {
        for (does, size, at) in [(Does::Export, 24, 16), (Does::Import, 20, 0)] {
            let mut params = vec![0xaa; size];
            params[at..at + 4].copy_from_slice(&7_i32.to_le_bytes());
            let layout = layout(&release(), does, size);
            assert_eq!(descriptor(layout, &params), Some(7), "{does:?}");
            set_descriptor(layout, &mut params, -1);
            assert_eq!(descriptor(layout, &params), Some(-1), "{does:?}");
            let others = params.iter().enumerate().filter(|(here, _)| !(at..at + 4).contains(here));
            assert!(others.map(|(_, byte)| *byte).all(|byte| byte == 0xaa), "{does:?}");
        }
        assert_eq!(layout(&release(), Does::Export, 20), None);
        assert_eq!(descriptor(None, &[1, 0, 0]), None);
    }

    #[test]
    fn clearing_is_an_export_of_one_object_that_is_none() {
        let params = clear(9);
        assert_eq!((params.len(), descriptor(None, &params)), (2128, Some(9)));
        assert_eq!(params.iter().filter(|byte| **byte != 0).count(), 2);
        assert_eq!(params[2124], 1);
    }
}
