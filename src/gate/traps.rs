//! Which driver calls are trapped: [`traps`].
//!
//! Each costs the container a few microseconds, so there are no more than the quota
//! needs, and each has its reason here. Sizes are all that any release has: a bundle
//! outlives a driver's update. A size that no release has fails in the driver.

use super::seccomp::Request;
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;
use crate::rm::release::{Change, RELEASES};
use crate::rm::{Key, Layout};

/// Calls of `nvidiactl` and `nvidiaN` that are trapped, and why.
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

/// Calls of `nvidia-uvm` that are trapped, and why.
const UVM: &[(u32, &str)] = &[
    (UVM_INITIALIZE, "HMM has to be off"),
    (UVM_REGISTER_GPU, "HMM is off, or the file gets no GPU"),
    (UVM_MAP_EXTERNAL_ALLOCATION, "keeps memory alive"),
    (UVM_ALLOC_DEVICE_P2P, "keeps memory alive, and announces a range"),
    (UVM_UNMAP_EXTERNAL, "ends what a mapping kept alive"),
    (UVM_FREE, "ends what mappings kept alive"),
    (UVM_ALLOC_SEMAPHORE_POOL, "announces a range that is no managed memory"),
];

/// The calls that come to the monitor.
#[must_use]
pub fn traps() -> Vec<Request> {
    let mut requests = Vec::new();
    for (number, _) in ESCAPES {
        for size in sizes(Key::Escape(*number)) {
            if let (Ok(number), Ok(size)) = (u8::try_from(*number), u16::try_from(size)) {
                requests.push(Request::Sized { number, size });
            }
        }
    }
    requests.extend(UVM.iter().map(|(number, _)| Request::Exact(*number)));
    requests
}

/// All sizes that any release has of it, in order.
fn sizes(key: Key) -> Vec<usize> {
    let changes = RELEASES.iter().flat_map(|row| row.changes);
    let mut sizes: Vec<usize> = changes
        .filter_map(|change| match change {
            Change::Set(of, layouts) if *of == key => Some(*layouts),
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
    fn every_size_of_every_release_is_trapped_once() {
        let traps = traps();
        for size in [32, 40, 48] {
            assert!(traps.contains(&Request::Sized { number: 0x2b, size }), "{size}");
        }
        for size in [2600, 2608] {
            assert!(traps.contains(&Request::Sized { number: 217, size }), "{size}");
        }
        assert!(traps.contains(&Request::Exact(0x3000_0001)));
        for (at, trap) in traps.iter().enumerate() {
            assert!(!traps[..at].contains(trap));
        }
        for (number, why) in ESCAPES {
            assert!(!sizes(Key::Escape(*number)).is_empty(), "{number:#x} {why}");
        }
    }
}
