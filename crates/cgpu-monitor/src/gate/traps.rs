//! Which driver calls are trapped: [`escapes`] and [`uvm`].
//!
//! A trap costs the container a few microseconds a call, so only calls that the quota needs are trapped, each with
//! its reason here. The sizes are those of all releases, because a bundle outlives an update of the driver. The
//! driver refuses a size that no release has, unless the driver is newer than every known release. So calls of
//! NVIDIA's own libraries with an unknown size ([`may_have_grown`]) are trapped, and the monitor refuses them.

use std::sync::LazyLock;

#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use nvrm::number::*;
use nvrm::release::{Change, RELEASES};
use nvrm::{Command, Key, Layout};

/// Calls on `nvidiactl` and `nvidiaN` that are trapped, and why.
const ESCAPES: &[(u32, &str)] = &[
    (NV_ESC_RM_ALLOC_MEMORY, "shows the GPU's memory, and makes memory"),
    (NV_ESC_RM_ALLOC_OBJECT, "makes objects"),
    (NV_ESC_RM_FREE, "ends charges"),
    (NV_ESC_RM_CONTROL, "shows memory, exports it"),
    (NV_ESC_RM_ALLOC, "makes memory"),
    (NV_ESC_RM_DUP_OBJECT, "keeps memory alive"),
    (NV_ESC_RM_VID_HEAP_CONTROL, "makes and shows memory"),
    (NV_ESC_IOCTL_XFER_CMD, "is any other call"),
    (NV_ESC_EXPORT_TO_DMABUF_FD, "keeps memory alive"),
];

/// Calls on `nvidia-uvm` that are trapped, and why.
const UVM: &[(u32, &str)] = &[
    (UVM_INITIALIZE, "HMM has to be off"),
    (UVM_REGISTER_GPU, "HMM is off, or the file gets no GPU"),
    (UVM_MAP_EXTERNAL_ALLOCATION, "keeps memory alive"),
    (UVM_ALLOC_DEVICE_P2P, "keeps memory alive, and announces a range"),
    (UVM_UNMAP_EXTERNAL, "ends what a mapping kept alive"),
    (UVM_FREE, "ends what mappings kept alive"),
    (UVM_UNREGISTER_GPU, "ends what a GPU's mappings kept alive"),
    (UVM_UNREGISTER_GPU_VASPACE, "ends what a GPU's mappings kept alive"),
    (UVM_ALLOC_SEMAPHORE_POOL, "announces a range that is no managed memory"),
];

/// All bits but the number's: they are 0 in UVM's calls.
pub(super) const ABOVE_NUMBER: u32 = !0xff;

/// Number and size of each trapped escape, at their places in a request, in the order of [`ESCAPES`].
pub(crate) fn escapes() -> Vec<u32> {
    let sized = ESCAPES.iter().flat_map(|(number, _)| {
        let sizes = sizes(Key::Escape(*number)).into_iter().filter_map(|size| size.try_into().ok());
        sizes.map(|size: u32| size << 16 | *number)
    });
    sized.collect()
}

/// The trapped requests of UVM.
pub(crate) fn uvm() -> impl Iterator<Item = u32> {
    UVM.iter().map(|(number, _)| *number)
}

/// Whether the monitor decides on the ioctl with this request, of which `request` is the lower half. `false` for the
/// driver's other calls, too.
#[must_use]
pub fn is_decided_by_monitor(request: u32) -> bool {
    is_escape(request) || UVM.iter().any(|(number, _)| *number == request)
}

/// Whether the request is an escape, a call that only `nvidiactl` and `nvidiaN` know.
#[must_use]
pub(crate) fn is_escape(request: u32) -> bool {
    static SIZES: LazyLock<Vec<(u32, Vec<usize>)>> = LazyLock::new(|| {
        ESCAPES.iter().map(|(number, _)| (*number, sizes(Key::Escape(*number)))).collect()
    });
    let command = Command::of_ioctl(request);
    let escape = SIZES.iter().find(|(number, _)| *number == command.number());
    escape.is_some_and(|(_, sizes)| sizes.contains(&command.size()))
}

/// The type byte of requests that NVIDIA's libraries make, `NV_IOCTL_MAGIC` of nv-ioctl-numbers.h. The driver ignores
/// the type. Requests of other files with the same numbers have another type.
const MAGIC: u32 = (b'F' as u32) << 8;

/// Type and number of each trapped escape, whatever its size.
pub(crate) fn of_any_size() -> impl Iterator<Item = u32> {
    ESCAPES.iter().map(|(number, _)| MAGIC | number)
}

/// Whether the request is an escape with a size that no known release has.
#[must_use]
pub fn may_have_grown(request: u32) -> bool {
    !is_decided_by_monitor(request)
        && request & SIZE != 0
        && of_any_size().any(|escape| request & TYPE_AND_NUMBER == escape)
}

/// Parts of a request (asm-generic/ioctl.h).
pub(super) const TYPE_AND_NUMBER: u32 = 0xffff;
pub(super) const SIZE: u32 = 0x3fff << 16;

/// Every size that any release has for the struct of `key`, in ascending order.
fn sizes(key: Key) -> Vec<usize> {
    let changes = RELEASES.iter().flat_map(|row| row.changes);
    let mut sizes: Vec<usize> = changes
        .filter_map(|change| match change {
            Change::Set(changed, layouts) if *changed == key => Some(*layouts),
            Change::Set(..) | Change::Remove(_) => None,
        })
        .flatten()
        .map(Layout::size)
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_monitor_decides_whatever_type_and_direction() {
        for (number, why) in ESCAPES {
            let sizes = sizes(Key::Escape(*number));
            assert!(!sizes.is_empty(), "{number:#x} {why}");
            for size in sizes {
                let request = u32::try_from(size).unwrap() << 16 | number;
                for garbage in [0, 0x4600, 0xff00, 0xc000_0000, 0xc000_ff00, 0x4000_5400] {
                    assert!(is_decided_by_monitor(request | garbage), "{number:#x} of {size}");
                    assert!(is_escape(request | garbage), "{number:#x} of {size}");
                }
                assert!(
                    !is_decided_by_monitor(request + (1 << 16)),
                    "another size is the driver's to refuse"
                );
            }
        }
        for (number, why) in UVM {
            assert!(is_decided_by_monitor(*number), "{number:#x} {why}");
            assert!(!is_escape(*number), "{number:#x} {why}");
            assert!(!is_decided_by_monitor(number | 0x100), "UVM looks at all of it");
        }
    }

    /// Tries every size that a later release can give a struct.
    #[test]
    fn a_struct_that_has_grown_is_trapped() {
        for (number, why) in ESCAPES {
            let known = sizes(Key::Escape(*number));
            for size in (1..1 << 14).filter(|size| !known.contains(size)) {
                let request = u32::try_from(size).unwrap() << 16 | MAGIC | number;
                for direction in [0, 1 << 30, 2 << 30, 3 << 30] {
                    assert!(may_have_grown(request | direction), "{number:#x} of {size} {why}");
                }
            }
        }
    }

    #[test]
    fn calls_that_programs_make_often_are_not_trapped() {
        let often = [
            ("TCGETS", 0x5401),
            ("TCSETS", 0x5402),
            ("TIOCGWINSZ", 0x5413),
            ("FIONREAD", 0x541b),
            ("FIONBIO", 0x5421),
            ("TIOCGPTN", 0x8004_5430),
            ("TIOCGPGRP", 0x540f),
            ("FIOCLEX", 0x5451),
            ("SIOCGIFCONF", 0x8912),
            ("SIOCGIFINDEX", 0x8933),
            ("SIOCETHTOOL", 0x8946),
            ("FICLONE", 0x4004_9409),
            ("PERF_EVENT_IOC_ENABLE", 0x2400),
            ("FIBMAP", 1),
            ("BLKGETSIZE64", 0x8008_1272),
            ("RNDGETENTCNT", 0x8004_5200),
        ];
        for (name, request) in often {
            assert!(!is_decided_by_monitor(request) && !may_have_grown(request), "{name}");
        }
    }
}
