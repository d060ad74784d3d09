//! Serves calls to `nvidia-uvm`.
//!
//! UVM keeps mapped memory alive by a duplicate of the kernel's own, which no process's driver usage shows. So the
//! mapped memory has to be the memory that the monitor checked, and the monitor makes the mapping itself. The kernel
//! duplicates only for the process that owns the client. So the memory is first duplicated into the monitor's client,
//! with which the caller's object is shared meanwhile, and is then mapped from the monitor's client. The state has
//! mappings as UVM has them: by file, GPU and addresses, in mapped ranges where mappings were cut. The state also has
//! the ranges that calls made: a mapping of such a range is no managed memory.

use std::collections::BTreeSet;

use nix::errno::Errno;

use crate::caller::{Copy, Reply};
use crate::case::{Case, EarlyReply, wait_for_earlier_call};
use crate::decide::{self, NO_GPU, RefusalReason, Verdict};
use crate::driver::own_client;
use crate::gate::settings::Managed;
use crate::node::Device;
use crate::processes::kill_process;
use crate::uvm::callers_file::{call_uvm, change_under_rm_lock, control_file, gpu_of};
use crate::uvm::file_creators::{bind_to_creator, is_orphaned};
use crate::uvm::files::UvmFile;
use crate::uvm::initialize::{initialize, is_initialized};
use crate::uvm::queries::has_flags;
use crate::uvm::range_calls::{
    end_mappings, free_range, make_range, map_memory, mapping_gpus, remove_gone_ranges, span, unmap,
};
use crate::uvm::retained_files::unregister_gpus;
use cgpu_core::ledger::{Span, Tree};
use cgpu_host::events::Event;
use nvrm::number::{
    NV_ERR_ILLEGAL_ACTION, NV_ERR_INVALID_ADDRESS, NV_ERR_INVALID_DEVICE, NV_ERR_NOT_SUPPORTED,
    NV_ERR_UVM_ADDRESS_IN_USE, NV_OK, UVM_INIT_FLAGS_DISABLE_HMM,
    UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE,
};
use nvrm::uvm::{self, Call};
use nvrm::{Answer, Meaning};

/// The flags of a file for one process. HMM is off: otherwise the driver would move the host's memory to the GPU by
/// itself.
const ONE_PROCESS_FLAGS: u64 = UVM_INIT_FLAGS_DISABLE_HMM as u64;

/// The flags of a file for several processes, with HMM off. Managed memory of a process that ends stays until the file
/// is closed, and no mapping shows it (`uvm_vm_close_managed`, `uvm.c`).
const SHARED_FLAGS: u64 = ONE_PROCESS_FLAGS | UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE as u64;

pub(crate) fn serve_uvm(
    case: &mut Case<'_>,
    number: u32,
    argument: u64,
) -> Result<Reply, EarlyReply> {
    let release = &case.monitor.release;
    let size = case.or_deny(uvm::params_size(release, number))?;
    case.read_struct(argument, size)?;
    let decoded = case.or_deny(uvm::decode(release, number, &case.scratch.bytes))?;
    case.still_waits()?;
    if size > 0 {
        case.write_back(0, argument, Copy::Struct);
    }
    case.effects.status_layout = decoded.layout.map(|head| (head, done_statuses(&decoded.call)));
    match decide::judge_uvm(&decoded.call) {
        Verdict::Refuse(answer) => return Err(case.answer(answer)),
        Verdict::Continue(passed) => {
            return match (decoded.call, decoded.layout) {
                (Call::Initialize { flags }, Some(_)) => initialize(case, argument, flags),
                _ => Ok(case.continued(passed)),
            };
        }
        Verdict::Execute => wait_for_earlier_call(case)?,
    }
    if decoded.layout.is_none() {
        return Err(Errno::EINVAL.into());
    }
    match decoded.call {
        // The file is retained before anything can be on a GPU by it.
        Call::RegisterGpu { descriptor } => {
            let control = match descriptor {
                0.. => control_file(case, descriptor).ok().flatten(),
                _ => None,
            };
            change_under_rm_lock(case, |case, _, file| {
                register_gpu(case, file, (descriptor, control.as_ref()))
            })
        }
        Call::MapExternal { range, memory } => {
            let gpus = mapping_gpus(case)?;
            let span = span(case, range)?;
            let control = control_file(case, memory.descriptor)?;
            change_under_rm_lock(case, |case, rm_lock, UvmFile { number: file, .. }| {
                let tree = |gpu: &u16| Tree { file: *file, gpu: *gpu };
                let trees = gpus.iter().map(tree).collect();
                map_memory(case, rm_lock, &trees, span, (memory, control.as_ref()))
            })
        }
        Call::AllocDeviceP2p { range, memory } => {
            let span = span(case, range)?;
            let control = control_file(case, memory.descriptor)?;
            make_range(case, range, |case, rm_lock, file| {
                let trees = BTreeSet::from([Tree { file, gpu: NO_GPU }]);
                map_memory(case, rm_lock, &trees, span, (memory, control.as_ref()))
            })
        }
        Call::AllocSemaphorePool(range) => make_range(case, range, |case, _, _| {
            call_uvm(case)?;
            Ok(case.executed(None))
        }),
        Call::UnmapExternal { range, uuid } => unmap(case, uuid, range),
        Call::UnregisterGpu { uuid } | Call::UnregisterVaSpace { uuid } => {
            unregister_gpu(case, uuid)
        }
        Call::Free { base, length } => free_range(case, base, length),
        // None of these is the monitor's to make (`decide::judge_uvm`).
        Call::Initialize { .. } | Call::Other => {
            Err(case.answer(Answer::Status(NV_ERR_NOT_SUPPORTED)))
        }
    }
}

/// Registers a GPU, if the file has allowed flags: initializing the file again fails with other flags than it has. The
/// creator of a file for one process must live: the state binds the file to it first, and the file ends with it.
fn register_gpu(
    case: &mut Case<'_>,
    file: &UvmFile,
    (descriptor, control): (i32, Option<&Device>),
) -> Result<Reply, EarlyReply> {
    if !is_initialized(case)? {
        return Err(case.answer(Answer::Status(NV_ERR_ILLEGAL_ACTION)));
    }
    let is_alone = has_flags(&case.monitor.release, case.device()?, ONE_PROCESS_FLAGS);
    if !is_alone {
        enforce_flags(case)?;
    } else if !bind_to_creator(case.monitor, file) {
        return Err(case.deny(&RefusalReason::UvmOrphaned));
    }
    let number_of = control.map_or(-1, Device::descriptor);
    case.patch(Meaning::Descriptor, u64::from(number_of.cast_unsigned()));
    // The GPU's node must be open in the process that asks (`osIsGpuAccessible`, nv_gpu_ops.c).
    let own = own_client(case.monitor);
    let asked = call_uvm(case);
    drop(own);
    case.patch(Meaning::Descriptor, u64::from(descriptor.cast_unsigned()));
    asked?;
    // Mapped memory that was on no GPU may be on this GPU from now on.
    case.monitor.spaces.check_all();
    if is_alone && case.status() == NV_OK && is_orphaned(case.monitor, file) {
        unregister_gpus(case.monitor, case.device()?);
        return Err(case.deny(&RefusalReason::UvmOrphaned));
    }
    Ok(case.executed(None))
}

/// Refuses a GPU to a file that lacks [`ONE_PROCESS_FLAGS`], unless the file has [`SHARED_FLAGS`] and managed memory is
/// refused anyway. Kills the calling process where the file has other flags than these two.
fn enforce_flags(case: &mut Case<'_>) -> Result<(), EarlyReply> {
    let monitor = case.monitor;
    let is_shared = has_flags(&monitor.release, case.device()?, SHARED_FLAGS);
    let refuses_managed = monitor.settings.managed == Managed::Refuse;
    let decision = decide::uvm_flags(is_shared, refuses_managed);
    if decision == Err(RefusalReason::UvmWithHmm) {
        kill_process(monitor, case.target()?.process, Event::killed_past_the_monitor());
    }
    case.or_deny(decision)
}

/// Unregisters a GPU, which ends all its mappings. A GPU that isn't registered has none.
fn unregister_gpu(case: &mut Case<'_>, uuid: [u8; 16]) -> Result<Reply, EarlyReply> {
    end_mappings(case, |case, file| {
        if let Some(gpu) = gpu_of(case, uuid) {
            case.state().unmap(Tree { file, gpu }, Span::ALL);
        }
        // On a GPU with confidential computing, the driver frees semaphore pools with the GPU that they are for.
        remove_gone_ranges(case, file);
    })
}

/// The statuses of a call that was done already: its range was freed or exists, its GPU is registered or not
/// (`uvm_va_space.c`). Other calls have none: UVM maps the same memory once more.
fn done_statuses(call: &Call) -> &'static [u32] {
    match call {
        Call::Free { .. } => &[NV_ERR_INVALID_ADDRESS],
        Call::AllocSemaphorePool(_) | Call::AllocDeviceP2p { .. } => &[NV_ERR_UVM_ADDRESS_IN_USE],
        Call::RegisterGpu { .. } | Call::UnregisterGpu { .. } | Call::UnregisterVaSpace { .. } => {
            &[NV_ERR_INVALID_DEVICE]
        }
        _ => &[],
    }
}
