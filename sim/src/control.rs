//! `NV_ESC_RM_CONTROL`: commands to objects.
//!
//! As `_rmapiRmControl` (control.c): the size must be the command's own; a command that
//! the object's class doesn't have is NV_ERR_NOT_SUPPORTED. Known are those that tell of
//! GPUs, memory and processes, that export memory (`export.rs`), and that schedule channels.

use std::time::Duration;

use crate::abi::*;
use crate::bytes::Fields;
use crate::debug;
use crate::escape::Call;
use crate::export;
use crate::fault::Lies;
use crate::object::{Object, Status};
use crate::runlist::{SAMPLE_NS, SAMPLES};
use crate::spec::Gpu;

/// What fills an unused place of a list of GPUs: `NV0000_CTRL_GPU_INVALID_ID`.
const INVALID_ID: u32 = 0xffff_ffff;

/// Bytes of a command's parameters.
fn params_bytes(abi: &Abi, command: u32) -> Option<usize> {
    Some(match command {
        NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION | NV0000_CTRL_CMD_GPU_GET_ID_INFO => 40,
        NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS => 128,
        NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2 => 32,
        NV0000_CTRL_CMD_GPU_GET_PROBED_IDS => abi.probed_ids_bytes,
        NV0000_CTRL_CMD_GPU_ATTACH_IDS => 132,
        NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD => 24,
        NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD => 20,
        NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO => abi.export_info.0,
        NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD => 2128,
        NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD => 652,
        NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE => 12,
        NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO | NV0041_CTRL_CMD_GET_SURFACE_INFO => 16,
        NV2080_CTRL_CMD_GPU_GET_GID_INFO => 268,
        NV2080_CTRL_CMD_FB_GET_INFO
        | NV2080_CTRL_CMD_BUS_GET_PCI_INFO
        | NV2080_CTRL_CMD_BUS_GET_INFO
        | NV0080_CTRL_CMD_GPU_GET_CLASSLIST
        | FIRMWARE_CTRL_CMD => 16,
        NV2080_CTRL_CMD_GR_GET_INFO | NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE => 32,
        NV2080_CTRL_CMD_FB_GET_INFO_V2 => 4 + 8 * abi.fb_info_max_list,
        NV2080_CTRL_CMD_GPU_GET_PIDS => 12 + 4 * NV2080_CTRL_GPU_GET_PIDS_MAX_COUNT,
        NV2080_CTRL_CMD_GPU_GET_PID_INFO => {
            8 + 72 * NV2080_CTRL_GPU_GET_PID_INFO_MAX_COUNT as usize
        }
        NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS => 536,
        NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2 => abi.samples.0,
        NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID => 20,
        NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID_V2 | NV2080_CTRL_CMD_GR_CTXSW_ZCULL_BIND => 24,
        NV0080_CTRL_CMD_GPU_FIND_SUBDEVICE_HANDLE
        | NV2080_CTRL_CMD_NVLINK_IS_GPU_DEGRADED
        | NVA06C_CTRL_CMD_SET_TIMESLICE
        | NVA06C_CTRL_CMD_GET_TIMESLICE => 8,
        NVA06C_CTRL_CMD_GPFIFO_SCHEDULE | NVA06F_CTRL_CMD_GPFIFO_SCHEDULE => abi.schedule_bytes,
        NVA06F_CTRL_CMD_RESTART_RUNLIST => 2,
        NV83DE_CTRL_CMD_DEBUG_READ_MEMORY | NV83DE_CTRL_CMD_DEBUG_WRITE_MEMORY => 24,
        _ => return None,
    })
}

fn object_of(call: &Call<'_>, client: u32, handle: u32) -> Result<Object, Status> {
    let driver = call.sim.driver();
    let object = driver.clients.get(&client).and_then(|entry| entry.objects.get(&handle));
    object.cloned().ok_or(NV_ERR_OBJECT_NOT_FOUND)
}

/// Entries of a list that anybody asks for.
const MOST_SURFACE_INFOS: usize = 64;

/// `memCtrlCmdGetSurfaceInfoLvm_IMPL`, of which we know sizes alone.
fn surface(call: &Call<'_>, of: (u32, u32), params: &[u8]) -> Result<(), Status> {
    let memory = object_of(call, of.0, of.1)?.memory;
    let bytes = memory.and_then(|memory| call.sim.driver().memory_bytes(memory));
    let bytes = bytes.ok_or(NV_ERR_NOT_SUPPORTED)?;
    let (count, list) = (params.u32_at(0) as usize, params.u64_at(8));
    if count == 0 || list == 0 {
        return Ok(());
    }
    if count > MOST_SURFACE_INFOS {
        return Err(NV_ERR_INVALID_ARGUMENT);
    }
    let mut copy = call.copy_in(list, 8 * count)?;
    for entry in copy.chunks_exact_mut(8) {
        match entry.u32_at(0) {
            NV0041_CTRL_SURFACE_INFO_INDEX_PHYS_SIZE => {
                let pages = bytes / NV0041_CTRL_SURFACE_INFO_PHYS_SIZE_SCALE_FACTOR;
                entry.set_u32(4, u32::try_from(pages).map_err(|_| NV_ERR_OUT_OF_RANGE)?);
            }
            _ => return Err(NV_ERR_INVALID_ARGUMENT),
        }
    }
    call.caller.write(list, &copy).ok_or(NV_ERR_INVALID_ADDRESS)
}

/// Executes an NVOS54.
pub(crate) fn control(call: &Call<'_>, bytes: &mut [u8]) -> Result<(), Status> {
    let (client, object, command) = (bytes.u32_at(0), bytes.u32_at(4), bytes.u32_at(8));
    let (address, stated) = (bytes.u64_at(16), bytes.u32_at(24) as usize);
    let asker = call.asker();
    // NVXXXX_CTRL_CMD_NULL, of any class.
    if command & 0xffff == 0 {
        return Ok(());
    }
    let (class, gpu) = {
        let driver = call.sim.driver();
        let entry = driver.client(client, asker.file, NV_ERR_INVALID_CLIENT)?;
        if object == client {
            (NV01_ROOT, None)
        } else {
            let object = entry.objects.get(&object).ok_or(NV_ERR_OBJECT_NOT_FOUND)?;
            let class = if object.memory.is_some() && command >> 16 == NV01_ROOT_CLIENT {
                // Memory of any class has those of a user's (`NV01_ROOT_USER_MEMORY_INTERFACE_ID`).
                NV01_ROOT_CLIENT
            } else {
                object.class
            };
            (class, object.gpu)
        }
    };
    let known = params_bytes(&call.sim.abi, command);
    if (stated == 0) != (address == 0) || known.is_some_and(|known| known != stated) {
        return Err(NV_ERR_INVALID_ARGUMENT);
    }
    // A channel of any generation has the controls of the first.
    let of = command >> 16;
    let has = of == class || of == KEPLER_CHANNEL_GPFIFO_A && CHANNEL_CLASSES.contains(&class);
    let size = known.filter(|_| has).ok_or(NV_ERR_NOT_SUPPORTED)?;
    let mut params = call.copy_in(address, size)?;
    match (command, gpu) {
        (NV2080_CTRL_CMD_FB_GET_INFO, Some(gpu)) => {
            // The list is the caller's too; 0 asks for nothing (ctrl2080fb.h).
            let (count, list) = (params.u32_at(0) as usize, params.u64_at(8));
            if count > call.sim.abi.fb_info_max_list {
                return Err(NV_ERR_INVALID_ARGUMENT);
            }
            let mut copy = call.copy_in(list, 8 * count)?;
            fb_info(call, gpu, &mut copy)?;
            return call.caller.write(list, &copy).ok_or(NV_ERR_INVALID_ADDRESS);
        }
        (NV2080_CTRL_CMD_FB_GET_INFO_V2, Some(gpu)) => {
            let count = params.u32_at(0) as usize;
            let list = params.get_mut(4..4 + 8 * count).ok_or(NV_ERR_INVALID_ARGUMENT)?;
            fb_info(call, gpu, list)?;
        }
        (NV2080_CTRL_CMD_BUS_GET_INFO | NV2080_CTRL_CMD_GR_GET_INFO, _) => {
            information(call, &params)?;
        }
        (NV0080_CTRL_CMD_GPU_GET_CLASSLIST, _) => classes(call, &mut params)?,
        (FIRMWARE_CTRL_CMD, _) => {
            let answer = !params.u32_at(0);
            params.set_u32(4, answer);
        }
        (NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION, _) => build_version(call, &mut params)?,
        (NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD, _) => export::export(call, client, &params)?,
        (NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD, _) => {
            export::export_list(call, client, &params)?;
        }
        (NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO, _) => export::info(call, &mut params)?,
        (NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD, _) => {
            export::import(call, &asker, client, &mut params)?;
        }
        (NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECTS_FROM_FD, _) => {
            export::import_list(call, &asker, client, &mut params)?;
        }
        (NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE, _) => {
            export::report_address_space(call, client, &mut params)?;
        }
        (NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO, _) => {
            let object = object_of(call, client, params.u32_at(0))?;
            match params.u32_at(4) {
                NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_PARENT => {
                    params.set_u32(8, object.parent);
                }
                NV0000_CTRL_CMD_CLIENT_GET_HANDLE_INFO_INDEX_CLASSID => {
                    params.set_u32(8, object.class);
                }
                _ => return Err(NV_ERR_INVALID_ARGUMENT),
            }
        }
        (NV0041_CTRL_CMD_GET_SURFACE_INFO, _) => surface(call, (client, object), &params)?,
        (NV0080_CTRL_CMD_GPU_FIND_SUBDEVICE_HANDLE, _) => {
            if params.u32_at(0) != 0 {
                return Err(NV_ERR_OBJECT_NOT_FOUND);
            }
            let driver = call.sim.driver();
            let entry = driver.client(client, asker.file, NV_ERR_INVALID_CLIENT)?;
            params.set_u32(4, entry.subdevice(object).ok_or(NV_ERR_OBJECT_NOT_FOUND)?);
        }
        (NV2080_CTRL_CMD_GPU_GET_PIDS, Some(gpu)) => processes(call, gpu, &mut params)?,
        (NV2080_CTRL_CMD_GPU_GET_PID_INFO, Some(gpu)) => process_info(call, gpu, &mut params)?,
        // kchangrpapiCtrlCmdGpFifoSchedule_IMPL, kchannelCtrlCmdGpFifoSchedule_IMPL: of an object that
        // there is.
        (NVA06C_CTRL_CMD_GPFIFO_SCHEDULE | NVA06F_CTRL_CMD_GPFIFO_SCHEDULE, _) => {
            call.sim.driver().schedule(client, object, &params)?;
        }
        (NVA06C_CTRL_CMD_SET_TIMESLICE, _) => {
            call.sim.driver().set_timeslice(client, object, params.u64_at(0))?;
        }
        (NVA06C_CTRL_CMD_GET_TIMESLICE, _) => {
            let timeslice_us = call.sim.driver().turn(client, object)?.timeslice_us;
            params.set_u64(0, timeslice_us);
        }
        (NVA06F_CTRL_CMD_RESTART_RUNLIST, Some(_)) => {
            if !call.caller.is_nice() {
                return Err(NV_ERR_INSUFFICIENT_PERMISSIONS);
            }
        }
        (
            NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID
            | NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID_V2,
            Some(gpu),
        ) => call.sim.driver().bind_switches(client, params.u32_at(0), gpu)?,
        (NV2080_CTRL_CMD_NVLINK_IS_GPU_DEGRADED, _) => {
            if !call.caller.is_administrator() {
                return Err(NV_ERR_INSUFFICIENT_PERMISSIONS);
            }
        }
        // subdeviceCtrlCmdKGrCtxswZcullBind: whichever client has it.
        (NV2080_CTRL_CMD_GR_CTXSW_ZCULL_BIND, _) => {
            let channel = object_of(call, params.u32_at(0), params.u32_at(4))?;
            if !CHANNEL_CLASSES.contains(&channel.class) {
                return Err(NV_ERR_INVALID_CHANNEL);
            }
        }
        // flags, of which the lowest sets the compute mode; hChannel, gfxpPreemptMode, cilpPreemptMode.
        (NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE, _) if params.u32_at(0) & 1 != 0 => {
            let mode = params.u32_at(12);
            let of = params.u32_at(4);
            call.sim.driver().report(client, of, |turn| turn.compute_mode = Some(mode))?;
        }
        (NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS, _) => disable_channels(call, &params)?,
        (NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2, Some(gpu)) => {
            samples(call, gpu, &mut params);
        }
        (NV83DE_CTRL_CMD_DEBUG_READ_MEMORY | NV83DE_CTRL_CMD_DEBUG_WRITE_MEMORY, _) => {
            debug::access(call, client, command, &params)?;
        }
        _ => about_gpus(call, command, gpu, &mut params)?,
    }
    call.caller.write(address, &params).ok_or(NV_ERR_INVALID_ADDRESS)
}

/// How long an H100 was seen to take for it.
const TAKES_OFF: Duration = Duration::from_micros(670);
const TAKES_ON: Duration = Duration::from_micros(360);

/// `subdeviceCtrlCmdFifoDisableChannels_IMPL` (kernel_fifo_ctrl.c) and what its header says: all
/// or none of the listed channels, and none keeps running.
fn disable_channels(call: &Call<'_>, params: &[u8]) -> Result<(), Status> {
    const EVENT: usize = 16;
    const CLIENTS: usize = 24;
    const CHANNELS: usize = 280;
    if params.u64_at(EVENT) != 0 {
        return Err(NV_ERR_INSUFFICIENT_PERMISSIONS);
    }
    let count = params.u32_at(4);
    if count > NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES {
        return Err(NV_ERR_INVALID_ARGUMENT);
    }
    let listed: Vec<(u32, u32)> = (0..count as usize)
        .map(|at| (params.u32_at(CLIENTS + 4 * at), params.u32_at(CHANNELS + 4 * at)))
        .collect();
    let disabled = params.first().is_some_and(|byte| *byte != 0);
    call.late.set(if disabled { TAKES_OFF } else { TAKES_ON });
    call.sim.driver().set_disabled(&listed, disabled)
}

/// Samples of the GPU's processes: five a second, each of the process that was there last, and for how many
/// ten-thousandths of that time it was at work. If a fault says which are busy, these in turn.
fn samples(call: &Call<'_>, gpu: usize, params: &mut [u8]) {
    let (_, sample, engine) = call.sim.abi.samples;
    let mut driver = call.sim.driver();
    let busy = driver.lies.busy.iter().copied().cycle();
    let busy = (0..).zip(busy);
    let mut checks: Vec<(u64, Option<u32>, bool)> =
        busy.map(|(number, pid)| (1 + SAMPLE_NS * number, Some(pid), true)).take(SAMPLES).collect();
    if checks.is_empty() {
        checks = driver.checks(gpu);
    }
    let starts = (16..params.len()).step_by(sample);
    for (at, (when_ns, pid, is_busy)) in starts.zip(checks) {
        params.set_u64(at, when_ns);
        params.set_u32(at + 8 + engine, if is_busy { 10_000 } else { 0 });
        params.set_u32(at + 8 + engine + 8, pid.unwrap_or(NV2080_GPUMON_PID_INVALID));
    }
}

/// What identifies GPUs.
fn about_gpus(
    call: &Call<'_>,
    command: u32,
    gpu: Option<usize>,
    params: &mut [u8],
) -> Result<(), Status> {
    let driver = call.sim.driver();
    let gpus = &driver.gpus;
    match command {
        NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS | NV0000_CTRL_CMD_GPU_GET_PROBED_IDS => {
            params.fill(0xff);
            let ids = gpus.iter().map(Gpu::id).chain(std::iter::repeat(INVALID_ID));
            params
                .chunks_exact_mut(4)
                .take(32)
                .zip(ids)
                .for_each(|(place, id)| place.set_u32(0, id));
        }
        NV0000_CTRL_CMD_GPU_GET_ID_INFO | NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2 => {
            let id = params.u32_at(0);
            let index =
                gpus.iter().position(|gpu| gpu.id() == id).ok_or(NV_ERR_INVALID_ARGUMENT)?;
            let index = u32::try_from(index).map_err(|_| NV_ERR_INVALID_ARGUMENT)?;
            let (instance_at, numa_at) =
                if command == NV0000_CTRL_CMD_GPU_GET_ID_INFO { (32, 36) } else { (24, 28) };
            params.set_u32(4, 0);
            params.set_u32(8, index);
            params.set_u32(12, 0);
            params.set_u32(instance_at, index);
            params.set_u32(numa_at, INVALID_ID);
        }
        NV0000_CTRL_CMD_GPU_ATTACH_IDS => {}
        NV2080_CTRL_CMD_GPU_GET_GID_INFO => {
            let gpu = gpu.and_then(|gpu| gpus.get(gpu)).ok_or(NV_ERR_INVALID_DEVICE)?;
            let id = if params.u32_at(4) & 3 == 2 {
                gpu.uuid.to_vec()
            } else {
                gpu.uuid_text().into_bytes().into_iter().chain([0]).collect()
            };
            params.set_u32(8, u32::try_from(id.len()).map_err(|_| NV_ERR_INVALID_STATE)?);
            let data = params.get_mut(12..).unwrap_or_default();
            data.iter_mut().zip(id).for_each(|(to, from)| *to = from);
        }
        NV2080_CTRL_CMD_BUS_GET_PCI_INFO => {
            params.set_u32(0, 0x1db1_10de);
            params.set_u32(4, 0x1212_10de);
            params.set_u32(8, 0xa1);
            params.set_u32(12, 0x1db1);
        }
        _ => return Err(NV_ERR_NOT_SUPPORTED),
    }
    Ok(())
}

/// Fills a list of indices and data (`kmemsysGetFbInfos` and below it). All memory is heap.
fn fb_info(call: &Call<'_>, gpu: usize, list: &mut [u8]) -> Result<(), Status> {
    let driver = call.sim.driver();
    let total = driver.gpus.get(gpu).map_or(0, |gpu| gpu.memory_bytes);
    let free = driver.free_bytes(gpu);
    let Lies { fb_info, .. } = &driver.lies;
    let kib = |bytes: u64| u32::try_from(bytes >> 10).unwrap_or(u32::MAX);
    let most = u32::try_from(call.sim.abi.fb_info_max_list).unwrap_or(u32::MAX);
    for entry in list.chunks_exact_mut(8) {
        let index = entry.u32_at(0);
        let lie = fb_info.iter().rev().find(|(lied, _)| *lied == index);
        let value = match index {
            _ if lie.is_some() => lie.map_or(0, |(_, value)| *value),
            NV2080_CTRL_FB_INFO_INDEX_RAM_SIZE
            | NV2080_CTRL_FB_INFO_INDEX_TOTAL_RAM_SIZE
            | NV2080_CTRL_FB_INFO_INDEX_HEAP_SIZE
            | NV2080_CTRL_FB_INFO_INDEX_USABLE_RAM_SIZE
            | NV2080_CTRL_FB_INFO_INDEX_MAPPABLE_HEAP_SIZE => kib(total),
            NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE
            | NV2080_CTRL_FB_INFO_INDEX_LARGEST_FREE_REGION_SIZE_KB => kib(free),
            NV2080_CTRL_FB_INFO_INDEX_BAR1_SIZE => 256 << 10,
            NV2080_CTRL_FB_INFO_INDEX_BUS_WIDTH => 4096,
            index if index < most => 0,
            _ => return Err(NV_ERR_INVALID_ARGUMENT),
        };
        entry.set_u32(4, value);
    }
    Ok(())
}

/// A list elsewhere of indices and data: twice the index.
fn information(call: &Call<'_>, params: &[u8]) -> Result<(), Status> {
    /// Entries at most, here.
    const MOST: usize = 0x80;
    let (count, list) = (params.u32_at(0) as usize, params.u64_at(8));
    if count > MOST || (count == 0) != (list == 0) {
        return Err(NV_ERR_INVALID_ARGUMENT);
    }
    let mut copy = call.copy_in(list, 8 * count)?;
    copy.chunks_exact_mut(8).for_each(|entry| entry.set_u32(4, 2 * entry.u32_at(0)));
    call.caller.write(list, &copy).ok_or(NV_ERR_INVALID_ADDRESS)
}

/// The classes of a device: how many if there is no list, else as many as fit into it.
fn classes(call: &Call<'_>, params: &mut [u8]) -> Result<(), Status> {
    const CLASSES: [u32; 4] =
        [NV20_SUBDEVICE_0, KEPLER_CHANNEL_GROUP_A, AMPERE_CHANNEL_GPFIFO_A, AMPERE_COMPUTE_A];
    let (count, list) = (params.u32_at(0) as usize, params.u64_at(8));
    if (count == 0) != (list == 0) {
        return Err(NV_ERR_INVALID_ARGUMENT);
    }
    let mut copy = call.copy_in(list, 4 * count.min(CLASSES.len()))?;
    copy.chunks_exact_mut(4).zip(CLASSES).for_each(|(entry, class)| entry.set_u32(0, class));
    params.set_u32(0, u32::try_from(CLASSES.len()).map_err(|_| NV_ERR_INVALID_STATE)?);
    call.caller.write(list, &copy).ok_or(NV_ERR_INVALID_ADDRESS)
}

/// Three strings by pointer, each with space for `sizeOfStrings`.
fn build_version(call: &Call<'_>, params: &mut [u8]) -> Result<(), Status> {
    let version = call.sim.version.to_string();
    let texts = [(8, version.as_str()), (16, "sim"), (24, "cgpu-sim")];
    let size = params.u32_at(0) as usize;
    for (at, text) in texts {
        let text: Vec<u8> = text.bytes().chain([0]).take(size).collect();
        if params.u64_at(at) != 0 {
            call.caller.write(params.u64_at(at), &text).ok_or(NV_ERR_INVALID_ADDRESS)?;
        }
    }
    Ok(())
}

/// `subdeviceCtrlCmdGpuGetPids_IMPL`: of processes with a subdevice, or with an object of
/// that class on a channel.
fn processes(call: &Call<'_>, gpu: usize, params: &mut [u8]) -> Result<(), Status> {
    if params.u32_at(0) > 1 {
        return Err(NV_ERR_INVALID_ARGUMENT);
    }
    let class = params.u32_at(4);
    let namespace = call.caller.pid_namespace();
    let driver = call.sim.driver();
    let found = driver.processes(gpu, namespace, |client, object| match class {
        NV20_SUBDEVICE_0 => object.class == NV20_SUBDEVICE_0,
        class => {
            let parent = client.objects.get(&object.parent);
            object.class == class
                && parent.is_some_and(|parent| CHANNEL_CLASSES.contains(&parent.class))
        }
    });
    params.get_mut(12..).unwrap_or_default().fill(0);
    let count = found.len().min(NV2080_CTRL_GPU_GET_PIDS_MAX_COUNT);
    params.set_u32(8, u32::try_from(count).unwrap_or(0));
    for (place, number) in found.into_iter().take(count).enumerate() {
        params.set_u32(12 + 4 * place, number);
    }
    Ok(())
}

/// `subdeviceCtrlCmdGpuGetPidInfo_IMPL`: video memory of processes.
fn process_info(call: &Call<'_>, gpu: usize, params: &mut [u8]) -> Result<(), Status> {
    let count = params.u32_at(0);
    if count == 0 || count > NV2080_CTRL_GPU_GET_PID_INFO_MAX_COUNT {
        return Err(NV_ERR_INVALID_ARGUMENT);
    }
    let namespace = call.caller.pid_namespace();
    let driver = call.sim.driver();
    for entry in params.get_mut(8..).unwrap_or_default().chunks_exact_mut(72).take(count as usize) {
        let (number, index) = (entry.u32_at(0), entry.u32_at(4));
        if number == 0 || index != 0 {
            entry.set_u32(8, NV_ERR_INVALID_ARGUMENT);
            continue;
        }
        entry.set_u32(8, NV_OK);
        entry.get_mut(16..64).unwrap_or_default().fill(0);
        let bytes = driver.process_bytes(gpu, namespace, number);
        bytes.into_iter().enumerate().for_each(|(at, bytes)| entry.set_u64(16 + 8 * at, bytes));
    }
    Ok(())
}
