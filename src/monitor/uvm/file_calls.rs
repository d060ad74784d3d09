//! The monitor's own calls to `nvidia-uvm` on a file: whether the file is initialized, with which flags, and to take a
//! GPU from it.

use crate::monitor::node::{Buffer, Device};
use crate::rm::number::{NV_ERR_ILLEGAL_ACTION, NV_OK, UVM_INITIALIZE, UVM_UNREGISTER_GPU};
use crate::rm::{Key, Layout, Meaning, Release, uvm};

/// The status of unregistering a GPU; `None` where UVM can't be asked.
pub(crate) fn unregister_gpu(release: &Release, device: &Device, uuid: &[u8; 16]) -> Option<u32> {
    uvm_status(release, device, UVM_UNREGISTER_GPU, |layout, bytes| {
        uvm::set_uuid(layout, bytes, *uuid)
    })
}

/// Whether a file is initialized; `None` where that can't be told. The monitor must not ask by initializing the
/// file: that would bind the file to the monitor's address space.
pub(crate) fn was_initialized(release: &Release, device: &Device) -> Option<bool> {
    unregister_gpu(release, device, &[0; 16]).map(|status| status != NV_ERR_ILLEGAL_ACTION)
}

/// Whether an initialized file has exactly these flags. The file must be initialized: this initializes it again,
/// and would otherwise bind the file to the monitor's address space.
pub(crate) fn has_flags(release: &Release, device: &Device, flags: u64) -> bool {
    let fill = |layout: &Layout, bytes: &mut [u8]| {
        layout.patch(Meaning::Flags, flags).is_some_and(|patch| patch.apply(bytes))
    };
    uvm_status(release, device, UVM_INITIALIZE, fill) == Some(NV_OK)
}

/// The status of a UVM call of the monitor's own, whose zeroed struct `fill` fills. `None` where the release has no
/// such call, `fill` returns `false`, or the system call fails.
pub(crate) fn uvm_status(
    release: &Release,
    device: &Device,
    number: u32,
    fill: impl FnOnce(&Layout, &mut [u8]) -> bool,
) -> Option<u32> {
    let layout: &Layout = release.layouts(Key::Uvm(number)).first()?;
    let mut bytes = Buffer::zeroed(layout.size());
    if !fill(layout, &mut bytes) {
        return None;
    }
    device.call_uvm(release, number, &mut bytes).ok()?;
    layout.view(&bytes)?.u32(Meaning::Status)
}
