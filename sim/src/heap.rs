//! The older ways to memory: `NV_ESC_RM_ALLOC_MEMORY` and `NV_ESC_RM_VID_HEAP_CONTROL`.
//!
//! The driver turns them into allocations of objects, and so do we.

use crate::abi::*;
use crate::bytes::Fields;
use crate::escape::{Call, Errno, Met, page_bytes, status_of};
use crate::fault::Kind;
use crate::object::{Allocation, Status, Wanted};

/// `NV_ESC_RM_ALLOC_MEMORY` (rmapi_deprecated_allocmemory.c).
pub(crate) fn allocate_memory(call: &Call<'_>, bytes: &mut [u8]) -> Result<(), Errno> {
    let class = bytes.u32_at(12);
    let status = match call.meet(Kind::AllocMemory, class)? {
        Met::Status(status) => status,
        _ => status_of(legacy_memory(call, bytes, class)),
    };
    bytes.set_u32(40, status);
    Ok(())
}

fn legacy_memory(call: &Call<'_>, bytes: &mut [u8], class: u32) -> Result<(), Status> {
    let class = match class {
        // `_rmAllocMemoryLocalUser`: a query of the heap's size in disguise; the handle is
        // a dummy that takes nothing, or all of the memory to look at for root.
        NV01_MEMORY_LOCAL_USER => NV01_MEMORY_VIRTUAL,
        NV01_MEMORY_SYSTEM_OS_DESCRIPTOR => {
            check_os_descriptor(call, bytes.u64_at(24), bytes.u64_at(32))?;
            class
        }
        NV01_MEMORY_SYSTEM
        | NV01_MEMORY_VIRTUAL
        | NV01_MEMORY_LOCAL_PRIVILEGED
        | NV01_MEMORY_LIST_SYSTEM
        | NV01_MEMORY_LIST_FBMEM
        | NV01_MEMORY_LIST_OBJECT => class,
        _ => return Err(NV_ERR_INVALID_CLASS),
    };
    let asked = Allocation {
        client: bytes.u32_at(0),
        parent: bytes.u32_at(4),
        handle: bytes.u32_at(8),
        class,
    };
    let asker = call.asker();
    let mut driver = call.sim.driver();
    let made = driver.allocate(&asker, asked, Wanted::default())?;
    if bytes.u32_at(12) == NV01_MEMORY_LOCAL_USER {
        let client = driver.client(asked.client, asker.file, NV_ERR_INVALID_CLIENT)?;
        let gpu = client.objects.get(&made.handle).and_then(|object| object.gpu);
        let total = gpu.and_then(|gpu| driver.gpus.get(gpu)).map_or(0, |gpu| gpu.memory_bytes);
        bytes.set_u64(32, total.wrapping_sub(1));
    }
    Ok(())
}

/// `NV_ESC_RM_VID_HEAP_CONTROL` (rmapi_deprecated_vidheapctrl.c).
pub(crate) fn control(call: &Call<'_>, bytes: &mut [u8], met: &Met) -> Result<(), Status> {
    let asker = call.asker();
    let (client, parent, function) = (bytes.u32_at(0), bytes.u32_at(4), bytes.u32_at(8));
    if function == NVOS32_FUNCTION_ALLOC_OS_DESCRIPTOR {
        check_os_descriptor(call, bytes.u64_at(64), bytes.u64_at(72))?;
    }
    let mut driver = call.sim.driver();
    let entry = driver.client(client, asker.file, NV_ERR_INVALID_OBJECT_HANDLE)?;
    let device = entry.objects.get(&parent).ok_or(NV_ERR_INVALID_OBJECT_PARENT)?;
    let gpu = device.gpu.ok_or(NV_ERR_INVALID_OBJECT_PARENT)?;
    // Offsets of size, and of limit; the offset lies eight before the limit.
    let places = match function {
        NVOS32_FUNCTION_ALLOC_SIZE | NVOS32_FUNCTION_ALLOC_TILED_PITCH_HEIGHT => Some((88, 112)),
        NVOS32_FUNCTION_ALLOC_SIZE_RANGE => Some((80, 104)),
        _ => None,
    };
    match (function, places) {
        (_, Some((size_at, limit_at))) => {
            // stdmemValidateParams: no owner, and the driver's own.
            if matches!(bytes.u32_at(40), 0 | u32::MAX) {
                return Err(NV_ERR_INVALID_OWNER);
            }
            let flags = bytes.u32_at(52);
            let attributes = bytes
                .u32_at(if function == NVOS32_FUNCTION_ALLOC_TILED_PITCH_HEIGHT { 64 } else { 56 });
            let class = if flags & NVOS32_ALLOC_FLAGS_VIRTUAL != 0 {
                NV50_MEMORY_VIRTUAL
            } else if attributes >> NVOS32_ATTR_LOCATION_SHIFT & 3 == 0 {
                NV01_MEMORY_LOCAL_USER
            } else {
                NV01_MEMORY_SYSTEM
            };
            let provided = flags & NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED != 0;
            let handle = if provided { bytes.u32_at(44) } else { 0 };
            let size = if function == NVOS32_FUNCTION_ALLOC_TILED_PITCH_HEIGHT {
                u64::from(bytes.u32_at(56)) * u64::from(bytes.u32_at(60))
            } else {
                bytes.u64_at(size_at)
            };
            let wanted =
                Wanted { bytes: size, page_bytes: page_bytes(attributes), ..Wanted::default() };
            let made =
                driver.allocate(&asker, Allocation { client, parent, handle, class }, wanted)?;
            let given = if class == NV01_MEMORY_LOCAL_USER { made.bytes } else { size };
            bytes.set_u32(44, made.handle);
            bytes.set_u64(size_at, given);
            bytes.set_u64(limit_at - 8, made.offset);
            bytes.set_u64(limit_at, given.wrapping_sub(1));
        }
        (NVOS32_FUNCTION_FREE, _) => {
            driver.free(asker.file, client, bytes.u32_at(44), matches!(met, Met::Lose))?;
        }
        (NVOS32_FUNCTION_INFO, _) => {
            bytes.set_u64(48, 0);
            bytes.set_u64(56, driver.free_bytes(gpu));
            bytes.set_u64(64, 0);
        }
        (NVOS32_FUNCTION_ALLOC_OS_DESCRIPTOR, _) => {
            let class = NV01_MEMORY_SYSTEM_OS_DESCRIPTOR;
            let provided = bytes.u32_at(48) & NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED != 0;
            let handle = if provided { bytes.u32_at(40) } else { 0 };
            let asked = Allocation { client, parent, handle, class };
            let made = driver.allocate(&asker, asked, Wanted::default())?;
            bytes.set_u32(40, made.handle);
        }
        _ => return Err(NV_ERR_NOT_SUPPORTED),
    }
    let total = driver.gpus.get(gpu).map_or(0, |gpu| gpu.memory_bytes);
    bytes.set_u64(24, total);
    bytes.set_u64(32, driver.free_bytes(gpu));
    Ok(())
}

/// `RmCreateOsDescriptor` (escape.c): the caller's own memory, which must be mapped.
pub(crate) fn check_os_descriptor(call: &Call<'_>, address: u64, limit: u64) -> Result<(), Status> {
    if address & 0xfff != 0 {
        return Err(NV_ERR_NOT_SUPPORTED);
    }
    let bytes = limit.checked_add(1).ok_or(NV_ERR_INVALID_LIMIT)?;
    if call.caller.has_mapped(address, bytes) { Ok(()) } else { Err(NV_ERR_INVALID_ADDRESS) }
}
