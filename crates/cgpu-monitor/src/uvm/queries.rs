//! The monitor's own calls to `nvidia-uvm` on a file: whether the file is initialized, with which flags, and which
//! ranges it has; and to take a GPU from it.

use crate::node::{Buffer, Device};
use nvrm::number::{
    NV_ERR_ILLEGAL_ACTION, NV_ERR_INVALID_ADDRESS, NV_ERR_UVM_ADDRESS_IN_USE, NV_OK,
    UVM_CLEAN_UP_ZOMBIE_RESOURCES, UVM_CREATE_EXTERNAL_RANGE, UVM_DISABLE_READ_DUPLICATION,
    UVM_FREE, UVM_INITIALIZE, UVM_UNMAP_EXTERNAL, UVM_UNREGISTER_GPU, UVM_VALIDATE_VA_RANGE,
};
use nvrm::uvm::{self, Range};
use nvrm::{Key, Layout, Meaning, Release};

/// The size of UVM's smallest pages, in bytes.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// The status of unregistering a GPU; `None` where UVM can't be asked.
pub(crate) fn unregister_gpu(release: &Release, device: &Device, uuid: &[u8; 16]) -> Option<u32> {
    uvm_status(release, device, UVM_UNREGISTER_GPU, |layout, bytes| {
        uvm::set_uuid(layout, bytes, *uuid)
    })
}

/// Whether a file is initialized; `None` if that can't be determined. The monitor must not ask by initializing the
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
fn uvm_status(
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

/// The ranges of a file. An answer is `None` where UVM can't be asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ranges<'a> {
    release: &'a Release,
    device: &'a Device,
}

impl<'a> Ranges<'a> {
    pub(crate) fn of(release: &'a Release, device: &'a Device) -> Self {
        Ranges { release, device }
    }

    /// Whether these addresses are exactly one range, of any kind: managed memory, too
    /// (`uvm_api_validate_va_range`, `uvm_va_range.c`).
    pub(crate) fn is_whole(self, range: Range) -> Option<bool> {
        Some(self.call(UVM_VALIDATE_VA_RANGE, range)? == NV_OK)
    }

    /// Whether a range in which memory can be mapped (an external range) is at an address.
    ///
    /// The monitor asks UVM to unmap from a GPU that doesn't exist. UVM refuses that for the address where no such
    /// range is, and otherwise for the GPU (`uvm_map_external.c`, `uvm_unmap_external`).
    pub(crate) fn is_external(self, address: u64) -> Option<bool> {
        let page = Range { base: address, length: PAGE_BYTES };
        Some(self.call(UVM_UNMAP_EXTERNAL, page)? != NV_ERR_INVALID_ADDRESS)
    }

    /// Tries whether managed memory is at an address. This sets the page's policy where it is, and may make and free a
    /// range.
    ///
    /// The monitor gives an advice that only managed memory takes: a page isn't to be in two places at once. UVM
    /// refuses it for the address where no managed memory is (`uvm_policy.c`, `uvm_api_range_type_check`). On machines
    /// where the GPU reads all of a process's memory (ATS), UVM takes the advice for other memory, too. So the monitor
    /// then tries to make a range at the address: only a range of the same file prevents that.
    pub(crate) fn probe_managed(self, address: u64) -> bool {
        let page = Range { base: address, length: procfs::page_size() };
        if self.call(UVM_DISABLE_READ_DUPLICATION, page) != Some(NV_OK) {
            return false;
        }
        match self.call(UVM_CREATE_EXTERNAL_RANGE, page) {
            Some(NV_OK) => {
                self.free(page);
                false
            }
            // The range in the way may be an external one that the container has made since: the advice is given again.
            Some(NV_ERR_UVM_ADDRESS_IN_USE) => {
                self.call(UVM_DISABLE_READ_DUPLICATION, page) == Some(NV_OK)
            }
            _ => false,
        }
    }

    /// Ends managed memory of processes that have ended, which a file for several processes keeps alive
    /// (`uvm_api_clean_up_zombie_resources`).
    pub(crate) fn end_zombies(self) {
        let _ = self.call(UVM_CLEAN_UP_ZOMBIE_RESOURCES, Range { base: 0, length: 0 });
    }

    /// Frees a range, if there is one.
    pub(crate) fn free(self, range: Range) {
        let _ = self.call(UVM_FREE, range);
    }

    /// The status of a call for a range, and for a GPU that doesn't exist.
    fn call(self, number: u32, Range { base, length }: Range) -> Option<u32> {
        uvm_status(self.release, self.device, number, |layout, bytes| {
            // Later drivers free a range without a length, and not every call has a range or a GPU.
            for (meaning, value) in [(Meaning::Base, base), (Meaning::Length, length)] {
                let _ = layout.patch(meaning, value).is_some_and(|patch| patch.apply(bytes));
            }
            let _ = uvm::set_uuid(layout, bytes, [0xff; 16]);
            true
        })
    }
}
