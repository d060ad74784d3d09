//! Calls to `nvidia-uvm`.
//!
//! As `uvm_ioctl` (uvm.c): by the whole number, which has neither size nor direction; the
//! struct is copied in and out whole; its last field is the status. What keeps memory alive
//! and what says that a mapping isn't managed memory is done; all else succeeds and does
//! nothing. `rmCtrlFd` is not looked at: nor does the driver, but for GPU instances
//! (uvm_map_external.c, uvm_gpu.c keep it and don't use it).

use libc::{EFAULT, EINVAL};

use crate::abi::*;
use crate::bytes::Fields;
use crate::driver::Driver;
use crate::escape::{Call, Errno, Met};
use crate::fault::Kind;
use crate::object::{File, Range, Status, Uvm};

/// `uvm_ioctl`; `address` is where the caller has the struct.
pub(crate) fn ioctl(call: &Call<'_>, number: u32, address: u64) -> Result<(), Errno> {
    let met = call.meet(Kind::Uvm, number)?;
    if number == UVM_DEINITIALIZE {
        return Ok(());
    }
    let (size, status_at) = call.sim.abi.uvm(number).ok_or(EINVAL)?;
    let mut params = vec![0; size];
    call.caller.read(address, &mut params).ok_or(EFAULT)?;
    let status = match met {
        Met::Status(status) => status,
        _ => execute(call, number, &params).err().unwrap_or(NV_OK),
    };
    params.set_u32(status_at, status);
    call.caller.write(address, &params).ok_or(EFAULT)
}

fn execute(call: &Call<'_>, number: u32, params: &[u8]) -> Result<(), Status> {
    match number {
        UVM_INITIALIZE => return initialize(call, params.u64_at(0)),
        UVM_MM_INITIALIZE => {
            let other = call.descriptor(params.u32_at(0)).ok_or(NV_ERR_INVALID_ARGUMENT)?;
            let mut driver = call.sim.driver();
            if driver.uvm.get(&other).is_none_or(|uvm| uvm.flags.is_none()) {
                return Err(NV_ERR_INVALID_ARGUMENT);
            }
            let uvm = space(&mut driver, call.file)?;
            if uvm.flags.is_some() || uvm.is_mm {
                return Err(NV_ERR_INVALID_ARGUMENT);
            }
            uvm.is_mm = true;
            return Ok(());
        }
        _ => {}
    }
    let process = call.caller.process();
    let asker = call.asker();
    let mut driver = call.sim.driver();
    if space(&mut driver, call.file)?.flags.is_none() {
        return Err(NV_ERR_ILLEGAL_ACTION);
    }
    let uuid: [u8; 16] = params.first_chunk().copied().unwrap_or_default();
    let (base, bytes) = (params.u64_at(0), params.u64_at(8));
    match number {
        // nvGpuOpsGetGpuInfo (nv_gpu_ops.c) asks for it as the making of a device does.
        UVM_REGISTER_GPU => {
            let gpu = driver.gpus.iter().position(|gpu| gpu.uuid == uuid);
            driver.accessible(&asker, gpu.ok_or(NV_ERR_INVALID_DEVICE)?)?;
            space(&mut driver, call.file)?.gpus.insert(uuid);
        }
        UVM_UNREGISTER_GPU => {
            let uvm = space(&mut driver, call.file)?;
            if !uvm.gpus.remove(&uuid) {
                return Err(NV_ERR_INVALID_DEVICE);
            }
            uvm.vaspaces.remove(&uuid);
        }
        UVM_REGISTER_GPU_VASPACE => {
            let (client, vaspace) = (params.u32_at(20), params.u32_at(24));
            let from = driver.clients.get(&client).ok_or(NV_ERR_INVALID_OBJECT_HANDLE)?;
            let object = from.objects.get(&vaspace).ok_or(NV_ERR_OBJECT_NOT_FOUND)?;
            if from.process != process {
                return Err(NV_ERR_INSUFFICIENT_PERMISSIONS);
            }
            if object.class != FERMI_VASPACE_A {
                return Err(NV_ERR_INVALID_OBJECT);
            }
            let uvm = space(&mut driver, call.file)?;
            if !uvm.gpus.contains(&uuid) {
                return Err(NV_ERR_INVALID_DEVICE);
            }
            uvm.vaspaces.insert(uuid);
        }
        UVM_UNREGISTER_GPU_VASPACE => {
            let known = space(&mut driver, call.file)?.vaspaces.remove(&uuid);
            return if known { Ok(()) } else { Err(NV_ERR_INVALID_DEVICE) };
        }
        UVM_CREATE_EXTERNAL_RANGE => add(&mut driver, call.file, base, bytes, Range::External)?,
        UVM_ALLOC_SEMAPHORE_POOL => add(&mut driver, call.file, base, bytes, Range::SemaphorePool)?,
        UVM_ALLOC_DEVICE_P2P => add(&mut driver, call.file, base, bytes, Range::DeviceP2p)?,
        UVM_MAP_EXTERNAL_ALLOCATION => map_external(call, &mut driver, process, params)?,
        UVM_UNMAP_EXTERNAL => {
            let within =
                |(at, (len, _)): (&u64, &(u64, u64))| *at >= base && at + len <= base + bytes;
            unmap(&mut driver, call.file, within)?;
        }
        UVM_FREE => {
            let uvm = space(&mut driver, call.file)?;
            let (len, _) = uvm.ranges.remove(&base).ok_or(NV_ERR_INVALID_ADDRESS)?;
            unmap(&mut driver, call.file, |(at, _)| *at >= base && at - base < len)?;
        }
        _ => {}
    }
    Ok(())
}

fn space(driver: &mut Driver, file: File) -> Result<&mut Uvm, Status> {
    driver.uvm.get_mut(&file).ok_or(NV_ERR_INVALID_STATE)
}

/// `uvm_api_initialize`: the same flags again are fine.
fn initialize(call: &Call<'_>, flags: u64) -> Result<(), Status> {
    let process = call.caller.process();
    let mut driver = call.sim.driver();
    let uvm = space(&mut driver, call.file)?;
    if uvm.is_mm || flags & !UVM_INIT_FLAGS_MASK != 0 {
        return Err(NV_ERR_INVALID_ARGUMENT);
    }
    match uvm.flags {
        Some(before) if before != flags => Err(NV_ERR_INVALID_ARGUMENT),
        Some(_) => Ok(()),
        None => {
            uvm.flags = Some(flags);
            uvm.process = process;
            Ok(())
        }
    }
}

fn add(driver: &mut Driver, file: File, base: u64, bytes: u64, kind: Range) -> Result<(), Status> {
    let uvm = space(driver, file)?;
    let end = base.checked_add(bytes).filter(|end| *end > base && (base | bytes) & 0xfff == 0);
    let end = end.ok_or(NV_ERR_INVALID_ADDRESS)?;
    let below = uvm.ranges.range(..end).next_back();
    if below.is_some_and(|(at, (len, _))| at + len > base) {
        return Err(NV_ERR_UVM_ADDRESS_IN_USE);
    }
    uvm.ranges.insert(base, (bytes, kind));
    Ok(())
}

/// `uvm_api_map_external_allocation`: takes a duplicate of the memory.
fn map_external(
    call: &Call<'_>,
    driver: &mut Driver,
    process: u32,
    params: &[u8],
) -> Result<(), Status> {
    let tail = call.sim.abi.uvm_map_external_tail();
    let (base, bytes) = (params.u64_at(0), params.u64_at(8));
    let count = params.u64_at(tail);
    if count == 0 || count > call.sim.abi.uvm_gpu_attributes as u64 || bytes == 0 {
        return Err(NV_ERR_INVALID_ARGUMENT);
    }
    let uuid: [u8; 16] =
        params.get(24..).and_then(|rest| rest.first_chunk()).copied().unwrap_or_default();
    let uvm = space(driver, call.file)?;
    if !uvm.vaspaces.contains(&uuid) {
        return Err(NV_ERR_INVALID_DEVICE);
    }
    let range = uvm.ranges.range(..=base).next_back();
    let inside = range
        .is_some_and(|(at, (len, kind))| *kind == Range::External && base - at + bytes <= *len);
    if !inside {
        return Err(NV_ERR_INVALID_ADDRESS);
    }
    let (client, handle) = (params.u32_at(tail + 12), params.u32_at(tail + 16));
    let memory = driver.kernel_duplicate(process, client, handle)?;
    let before = space(driver, call.file)?.mappings.insert(base, (bytes, memory));
    if let Some((_, memory)) = before {
        driver.unrefer(memory);
    }
    Ok(())
}

fn unmap(
    driver: &mut Driver,
    file: File,
    doomed: impl Fn((&u64, &(u64, u64))) -> bool,
) -> Result<(), Status> {
    let uvm = space(driver, file)?;
    let bases: Vec<u64> =
        uvm.mappings.iter().filter(|entry| doomed(*entry)).map(|(at, _)| *at).collect();
    let gone: Vec<u64> =
        bases.iter().filter_map(|at| uvm.mappings.remove(at)).map(|(_, m)| m).collect();
    gone.into_iter().for_each(|memory| driver.unrefer(memory));
    Ok(())
}
