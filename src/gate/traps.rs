//! Which driver calls are trapped: [`escapes`] and [`uvm`], and coarser, [`TRAPS`].
//!
//! A trap costs the container a few microseconds a call, so only calls that the quota needs are trapped, each with
//! its reason here. The sizes are those of all releases, because a bundle outlives an update of the driver. The
//! driver refuses a size that no release has, unless the driver is newer than every known release. So calls of
//! NVIDIA's own libraries with an unknown size ([`may_have_grown`]) are trapped, and the monitor refuses them.

use std::sync::LazyLock;

#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;
use crate::rm::release::{Change, RELEASES};
use crate::rm::{Command, Key, Layout};

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

/// The requests that a filter which the runtime makes from the bundle sends to the monitor, as (mask, value): a
/// request is trapped where `request & mask == value`.
///
/// The masks match every call of [`is_decided_by_monitor`], and other calls too. They are few because a runtime needs a
/// tenth of a millisecond for each rule. The monitor lets the other calls continue, which is safe whatever their
/// descriptor is: the request lies in a register.
///
/// - numbers with bit 5 or 6 and a size with bit 4 or 5: every escape;
/// - numbers with bit 5 or 6, or with bit 4, and nothing else: UVM's calls;
/// - sizes with the bit of 4096, which `UVM_INITIALIZE` has;
/// - numbers with bit 5 or 6 and the type of NVIDIA's libraries, of any size: all of [`may_have_grown`].
///
/// The frequent calls of terminals and sockets have no size and have bits above the number: no mask matches them.
pub const TRAPS: [(u32, u32); 10] = [
    (BIT_5 | SIZE_16, BIT_5 | SIZE_16),
    (BIT_5 | SIZE_32, BIT_5 | SIZE_32),
    (BIT_6 | SIZE_16, BIT_6 | SIZE_16),
    (BIT_6 | SIZE_32, BIT_6 | SIZE_32),
    (BIT_5 | ABOVE_NUMBER, BIT_5),
    (BIT_6 | ABOVE_NUMBER, BIT_6),
    (BIT_4 | ABOVE_NUMBER, BIT_4),
    (SIZE_4096, SIZE_4096),
    (BIT_5 | TYPE, BIT_5 | MAGIC),
    (BIT_6 | TYPE, BIT_6 | MAGIC),
];

/// Every trapped number has bit 5 or 6, except `UVM_INITIALIZE`, and `UVM_UNREGISTER_GPU_VASPACE`, which has bit 4.
const BIT_5: u32 = 1 << 5;
const BIT_6: u32 = 1 << 6;
const BIT_4: u32 = 1 << 4;
/// Every trapped escape has one of these two bits in its size.
const SIZE_16: u32 = 16 << 16;
const SIZE_32: u32 = 32 << 16;
/// `UVM_INITIALIZE` has this bit.
const SIZE_4096: u32 = 4096 << 16;
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
const TYPE: u32 = 0xff00;
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

    fn trapped(request: u32) -> bool {
        TRAPS.iter().any(|(mask, value)| request & mask == *value)
    }

    #[test]
    fn every_call_to_decide_on_is_trapped_whatever_its_type_and_direction() {
        for (number, why) in ESCAPES {
            let sizes = sizes(Key::Escape(*number));
            assert!(!sizes.is_empty(), "{number:#x} {why}");
            for size in sizes {
                let request = u32::try_from(size).unwrap() << 16 | number;
                for garbage in [0, 0x4600, 0xff00, 0xc000_0000, 0xc000_ff00, 0x4000_5400] {
                    assert!(is_decided_by_monitor(request | garbage), "{number:#x} of {size}");
                    assert!(is_escape(request | garbage), "{number:#x} of {size}");
                    assert!(trapped(request | garbage), "{number:#x} of {size} {why}");
                }
                assert!(
                    !is_decided_by_monitor(request + (1 << 16)),
                    "another size is the driver's to refuse"
                );
            }
        }
        for (number, why) in UVM {
            assert!(trapped(*number) && is_decided_by_monitor(*number), "{number:#x} {why}");
            assert!(!is_escape(*number), "{number:#x} {why}");
            assert!(!is_decided_by_monitor(number | 0x100), "UVM looks at all of it");
        }
    }

    /// Tries every size that a later release can give a struct.
    #[test]
    fn a_struct_that_has_grown_is_trapped_by_both_filters() {
        for (number, why) in ESCAPES {
            let known = sizes(Key::Escape(*number));
            for size in (1..1 << 14).filter(|size| !known.contains(size)) {
                let request = u32::try_from(size).unwrap() << 16 | MAGIC | number;
                for direction in [0, 1 << 30, 2 << 30, 3 << 30] {
                    // Both the filter of [`super::filter`] and [`TRAPS`] trap it, and the monitor refuses it.
                    assert!(may_have_grown(request | direction), "{number:#x} of {size}");
                    assert!(trapped(request | direction), "{number:#x} of {size} {why}");
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
            assert!(!trapped(request), "{name}");
        }
    }

    #[test]
    fn a_bit_of_each_mask_is_needed() {
        let all: Vec<u32> = ESCAPES
            .iter()
            .flat_map(|(number, _)| {
                let with = move |size| u32::try_from(size).unwrap() << 16 | number;
                sizes(Key::Escape(*number)).into_iter().map(with)
            })
            .chain(UVM.iter().map(|(number, _)| *number))
            // A size that some later release may have.
            .chain(of_any_size().map(|escape| 64 << 16 | escape))
            .collect();
        for left_out in TRAPS {
            let missed = |request: &u32| {
                let mut rest = TRAPS.iter().filter(|trap| **trap != left_out);
                !rest.any(|(mask, value)| request & mask == *value)
            };
            assert!(all.iter().any(missed), "{left_out:x?} is for nothing");
        }
    }

    /// Each mask becomes a rule, and nothing joins masks on the way.
    #[test]
    fn no_two_masks_could_be_one() {
        for (place, (mask, value)) in TRAPS.iter().enumerate() {
            assert_eq!(value & !mask, 0, "{value:#x} of {mask:#x}");
            for (other, another) in &TRAPS[..place] {
                let (common, differing) = (mask & other, value ^ another);
                let has_other = (common == *mask || common == *other) && differing & common == 0;
                let is_half = mask == other && differing.is_power_of_two();
                assert!(!has_other && !is_half, "{mask:#x} {value:#x}, {other:#x} {another:#x}");
            }
        }
    }
}
