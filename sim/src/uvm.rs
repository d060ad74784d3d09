//! Calls to `nvidia-uvm`.
//!
//! As `uvm_ioctl` (uvm.c): by the whole number, which has neither size nor direction; the
//! struct is copied in and out whole; its last field is the status. What keeps memory alive
//! and what says that a mapping isn't managed memory is done, by file and GPU and with what is
//! left of mappings that are cut (uvm_map_external.c); all else succeeds and does nothing. `rmCtrlFd` is not looked at: nor does the driver, but for GPU instances
//! (uvm_map_external.c, uvm_gpu.c keep it and don't use it).

use std::collections::BTreeMap;

use libc::{EFAULT, EINVAL};

use crate::abi::*;
use crate::bytes::Fields;
use crate::driver::Driver;
use crate::escape::{Call, Errno, Met};
use crate::fault::Kind;
use crate::object::{Changes, File, Holder, Range, Status, Uvm};

/// Bytes that what is advised of managed memory is asked for.
const PAGE_BYTES: u64 = 4096;

/// `uvm_ioctl`; `address` is where the caller has the struct.
pub(crate) fn ioctl(call: &Call<'_>, number: u32, address: u64) -> Result<(), Errno> {
    let met = call.meet(Kind::Uvm, number)?;
    if number == UVM_DEINITIALIZE {
        return Ok(());
    }
    let (size, status_at) = call.sim.abi.uvm(number).ok_or(EINVAL)?;
    // `UVM_ROUTE_CMD_STACK_INIT_CHECK` copies as many bytes as its own struct has.
    let mut params = vec![0; size + call.sim.driver().lies.grown_bytes];
    call.caller.read(address, &mut params).ok_or(EFAULT)?;
    let status = match met {
        Met::Status(status) => status,
        _ => execute(call, number, &params).err().unwrap_or(NV_OK),
    };
    params.set_u32(status_at, status);
    call.answer_in_new_fields(&mut params, size);
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
            space(&mut driver, other)?.has_mm = true;
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
            // uvm_va_space_register_gpu, where pageable memory can be given to GPUs.
            let of = space(&mut driver, call.file)?;
            let is_shared = of
                .flags
                .is_some_and(|flags| flags & UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE != 0);
            if call.sim.abi.has_uvm_mm && !is_shared && !of.has_mm {
                return Err(NV_ERR_PAGE_TABLE_NOT_AVAIL);
            }
            let gpu = driver.gpus.iter().position(|gpu| gpu.uuid == uuid);
            driver.accessible(&asker, gpu.ok_or(NV_ERR_INVALID_DEVICE)?)?;
            // init_parent_gpu (uvm_gpu.c) takes the access counters, or gives the GPU up.
            if !driver.is_registered(gpu) && driver.has_access_counters(gpu) {
                return Err(NV_ERR_INVALID_STATE);
            }
            let uvm = space(&mut driver, call.file)?;
            uvm.gpus.insert(uuid);
            uvm.has_lost = false;
        }
        UVM_UNREGISTER_GPU => {
            let uvm = space(&mut driver, call.file)?;
            if !uvm.gpus.remove(&uuid) {
                return Err(NV_ERR_INVALID_DEVICE);
            }
            uvm.vaspaces.remove(&uuid);
            // It moves to the host.
            uvm.has_lost = uvm.gpus.is_empty();
            let moved =
                if uvm.has_lost { std::mem::take(&mut uvm.managed) } else { BTreeMap::new() };
            driver.forget_managed(moved.len());
            end(&mut driver, call.file, uuid)?;
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
            if !space(&mut driver, call.file)?.vaspaces.remove(&uuid) {
                return Err(NV_ERR_INVALID_DEVICE);
            }
            end(&mut driver, call.file, uuid)?;
        }
        UVM_CREATE_EXTERNAL_RANGE => add(&mut driver, call.file, base, bytes, Range::External)?,
        UVM_ALLOC_SEMAPHORE_POOL => add(&mut driver, call.file, base, bytes, Range::SemaphorePool)?,
        UVM_ALLOC_DEVICE_P2P => {
            add(&mut driver, call.file, base, bytes, Range::DeviceP2p)?;
            let memory = driver.kernel_duplicate(process, params.u32_at(44), params.u32_at(48));
            let uvm = space(&mut driver, call.file)?;
            match memory {
                Ok(memory) => drop(uvm.p2p.insert(base, memory)),
                Err(_) => drop(uvm.ranges.remove(&base)),
            }
            memory?;
        }
        UVM_MAP_EXTERNAL_ALLOCATION => map_external(call, &mut driver, process, params)?,
        UVM_UNMAP_EXTERNAL => {
            let uuid: [u8; 16] = array(params, 16);
            let uvm = space(&mut driver, call.file)?;
            if !within_external(uvm, base, bytes) {
                return Err(NV_ERR_INVALID_ADDRESS);
            }
            if !uvm.gpus.contains(&uuid) {
                return Err(NV_ERR_INVALID_DEVICE);
            }
            let changes = uvm.trees.entry(uuid).or_default().unmap(base, bytes);
            follow(&mut driver, &changes);
        }
        // A page of it, as `uvm_api_range_type_check` finds it.
        UVM_DISABLE_READ_DUPLICATION => {
            let uvm = space(&mut driver, call.file)?;
            if bytes != PAGE_BYTES || !is_managed(uvm, |from, to| (from..to).contains(&base), base)
            {
                return Err(NV_ERR_INVALID_ADDRESS);
            }
        }
        UVM_VALIDATE_VA_RANGE => {
            let uvm = space(&mut driver, call.file)?;
            let made = uvm.ranges.get(&base).is_some_and(|(len, _)| *len == bytes);
            let end = base.saturating_add(bytes);
            if !made && !is_managed(uvm, |from, to| (from, to) == (base, end), base) {
                return Err(NV_ERR_INVALID_ADDRESS);
            }
        }
        UVM_FREE => {
            let has_length = call.sim.abi.uvm_free_status == 16;
            let uvm = space(&mut driver, call.file)?;
            let of = uvm.ranges.get(&base).filter(|(len, _)| !has_length || *len == bytes);
            let (len, _) = *of.ok_or(NV_ERR_INVALID_ADDRESS)?;
            uvm.ranges.remove(&base);
            let mut changes: Vec<Changes> =
                uvm.trees.values_mut().map(|tree| tree.unmap(base, len)).collect();
            let ended = uvm.p2p.remove(&base).into_iter().collect();
            changes.push(Changes { made: Vec::new(), ended });
            changes.iter().for_each(|changes| follow(&mut driver, changes));
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
    if is_managed(uvm, |from, to| (from..to).contains(&base), base) {
        return Err(NV_ERR_UVM_ADDRESS_IN_USE);
    }
    let end = base.checked_add(bytes).filter(|end| *end > base && (base | bytes) & 0xfff == 0);
    let end = end.ok_or(NV_ERR_INVALID_ADDRESS)?;
    let below = uvm.ranges.range(..end).next_back();
    if below.is_some_and(|(at, (len, _))| at + len > base) {
        return Err(NV_ERR_UVM_ADDRESS_IN_USE);
    }
    uvm.ranges.insert(base, (bytes, kind));
    Ok(())
}

/// `uvm_api_map_external_allocation`: takes a duplicate of the memory for each GPU, in the place of
/// what is mapped there; where one fails, those before are undone.
fn map_external(
    call: &Call<'_>,
    driver: &mut Driver,
    process: u32,
    params: &[u8],
) -> Result<(), Status> {
    let tail = call.sim.abi.uvm_map_external_tail();
    let (base, bytes) = (params.u64_at(0), params.u64_at(8));
    let count = usize::try_from(params.u64_at(tail)).map_err(|_| NV_ERR_INVALID_ARGUMENT)?;
    if bytes == 0 || (base | bytes) & 0xfff != 0 || base.checked_add(bytes).is_none() {
        return Err(NV_ERR_INVALID_ADDRESS);
    }
    if count == 0 || count > call.sim.abi.uvm_gpu_attributes {
        return Err(NV_ERR_INVALID_ARGUMENT);
    }
    if !within_external(space(driver, call.file)?, base, bytes) {
        return Err(NV_ERR_INVALID_ADDRESS);
    }
    let (client, handle) = (params.u32_at(tail + 12), params.u32_at(tail + 16));
    let mut done: Vec<[u8; 16]> = Vec::new();
    for at in 0..count {
        let uuid: [u8; 16] = array(params, 24 + at * UVM_GPU_MAPPING_ATTRIBUTES_BYTES);
        let uvm = space(driver, call.file)?;
        let mapped = if uvm.vaspaces.contains(&uuid) {
            let changes = uvm.trees.entry(uuid).or_default().unmap(base, bytes);
            follow(driver, &changes);
            driver.kernel_duplicate(process, client, handle)
        } else {
            Err(NV_ERR_INVALID_DEVICE)
        };
        match mapped {
            Ok(memory) => {
                let tree = space(driver, call.file)?.trees.entry(uuid).or_default();
                tree.0.insert(base, (bytes, memory));
                done.push(uuid);
            }
            Err(status) => {
                for uuid in done {
                    let tree = space(driver, call.file)?.trees.entry(uuid).or_default();
                    let changes = tree.unmap(base, bytes);
                    follow(driver, &changes);
                }
                return Err(status);
            }
        }
    }
    Ok(())
}

/// Whether that lies in one external range.
fn within_external(uvm: &Uvm, base: u64, bytes: u64) -> bool {
    let range = uvm.ranges.range(..=base).next_back();
    let end = base.checked_add(bytes);
    range.zip(end).is_some_and(|((at, (len, kind)), end)| {
        *kind == Range::External && bytes > 0 && end <= at + len
    })
}

/// Whether managed memory that was touched is mapped at such addresses. The kernel doesn't report
/// what is mapped, so we check what the process that touched it has there.
fn is_managed(uvm: &Uvm, fits: impl Fn(u64, u64) -> bool, at: u64) -> bool {
    let Some(process) = uvm.managed.get(&at) else { return false };
    // A thread that has ended shows none.
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
    let maps = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("maps")).ok());
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    maps.into_iter().any(|text| {
        text.lines().any(|line| {
            let addresses = line.split(' ').next().and_then(|range| range.split_once('-'));
            let range = addresses.and_then(|(from, to)| hex(from).zip(hex(to)));
            range.is_some_and(|(from, to)| fits(from, to))
        })
    })
}

/// All that a GPU maps ends.
fn end(driver: &mut Driver, file: File, uuid: [u8; 16]) -> Result<(), Status> {
    let changes = space(driver, file)?.trees.remove(&uuid).unwrap_or_default().unmap(0, u64::MAX);
    follow(driver, &changes);
    Ok(())
}

fn follow(driver: &mut Driver, changes: &Changes) {
    changes.made.iter().for_each(|memory| driver.refer(*memory, Holder::Kernel, None));
    changes.ended.iter().for_each(|memory| driver.unrefer(*memory, Holder::Kernel));
}

fn array(params: &[u8], at: usize) -> [u8; 16] {
    params.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or_default()
}
