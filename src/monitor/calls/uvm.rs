//! Calls to `nvidia-uvm`.
//!
//! UVM keeps memory alive by a duplicate of the kernel's, which no process's figure
//! shows. So what is mapped has to be what was looked at, and the monitor maps it
//! itself. The kernel duplicates for the process that owns the client: the memory is
//! first duplicated into a client of the monitor's, which the caller's object is shared
//! with for as long as that takes, and mapped from there. What is mapped where is entered as
//! UVM keeps it: by file, GPU and addresses, in pieces where mappings were cut. So are ranges that
//! the driver was had to make, which aren't managed memory where they're mapped.

use std::collections::BTreeSet;

use nix::errno::Errno;

use crate::events::Event;
use crate::gate::settings::Managed;
use crate::ledger::{Span, Tree};
use crate::monitor::caller::listener::Reply;
use crate::monitor::caller::scratch::Copy;
use crate::monitor::calls::case::retry::wait_for_turn;
use crate::monitor::calls::case::{Case, Over};
use crate::monitor::calls::initialize::{initialize, is_initialized};
use crate::monitor::calls::policy::{self, Verdict};
use crate::monitor::calls::uvm_file::{
    ask, control_file, gpu_of, on_lane_with_file, refuse_orphaned,
};
use crate::monitor::calls::uvm_maps::{map_in, mapping_gpus};
use crate::monitor::calls::uvm_ranges::{
    NO_GPU, end_mappings, free_range, make_range, span, unmap, withdraw_gone,
};
use crate::monitor::node::device::Device;
use crate::monitor::uvm::files::UvmFile;
use crate::rm::number::{
    NV_ERR_ILLEGAL_ACTION, NV_ERR_INVALID_ADDRESS, NV_ERR_INVALID_ARGUMENT, NV_ERR_INVALID_DEVICE,
    NV_ERR_NOT_SUPPORTED, NV_ERR_UVM_ADDRESS_IN_USE, NV_OK, UVM_INIT_FLAGS_DISABLE_HMM,
    UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE,
};
use crate::rm::uvm::{self, Call};
use crate::rm::{Answer, Meaning};

/// Flags that an initialized file may have. HMM is off, or the host's memory would move to the GPU
/// by itself.
const ALONE: u64 = UVM_INIT_FLAGS_DISABLE_HMM as u64;

/// The same for several processes: the managed memory of one that ends stays until the file is
/// closed, and no mapping shows it (`uvm_vm_close_managed`, `uvm.c`).
const SHARED: u64 = ALONE | UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE as u64;

pub(crate) fn uvm(case: &mut Case<'_>, request: u64, argument: u64) -> Result<Reply, Over> {
    let release = &case.parts.state.release;
    let number = uvm::number(request);
    let size = uvm::params_size(release, number);
    let size = size.map_err(|refusal| case.refused(&refusal))?;
    case.read_struct(argument, size)?;
    let decoded = uvm::decode(release, number, &case.scratch.bytes);
    let decoded = decoded.map_err(|refusal| case.refused(&refusal))?;
    case.still_waits()?;
    if size > 0 {
        case.write_back(0, argument, Copy::Struct);
    }
    case.effects.status_layout = decoded.layout.map(|head| (head, done_already(&decoded.call)));
    match policy::judge_uvm(&decoded.call) {
        Verdict::Refuse(answer) => return Err(case.answer(answer)),
        Verdict::Continue(passed) => {
            return match (decoded.call, decoded.layout) {
                (Call::Initialize { flags }, Some(_)) => initialize(case, argument, flags),
                _ => Ok(case.continued(passed)),
            };
        }
        Verdict::Execute => wait_for_turn(case)?,
    }
    if decoded.layout.is_none() {
        return Err(Errno::EINVAL.into());
    }
    match decoded.call {
        // Before anything can be on a GPU by it, its file is kept.
        Call::RegisterGpu { partition, .. } => {
            let control = match partition.descriptor {
                0.. => control_file(case, partition.descriptor).ok().flatten(),
                _ => None,
            };
            on_lane_with_file(case, |case, _, file| {
                register(case, file, (partition.descriptor, control.as_ref()))
            })
        }
        Call::MapExternal { range, memory, .. } => {
            let gpus = mapping_gpus(case)?;
            let span = span(case, range)?;
            let control = control_file(case, memory.descriptor)?;
            on_lane_with_file(case, |case, lane, UvmFile { number: file, .. }| {
                let tree = |gpu: &u16| Tree { file: *file, gpu: *gpu };
                let trees = gpus.iter().map(tree).collect();
                map_in(case, lane, &trees, span, (memory, control.as_ref()))
            })
        }
        Call::AllocDeviceP2p { range, memory, .. } => {
            let span = span(case, range)?;
            let control = control_file(case, memory.descriptor)?;
            make_range(case, range, |case, lane, file| {
                let trees = BTreeSet::from([Tree { file, gpu: NO_GPU }]);
                map_in(case, lane, &trees, span, (memory, control.as_ref()))
            })
        }
        Call::AllocSemaphorePool(range) => make_range(case, range, |case, _, _| {
            ask(case)?;
            Ok(case.executed(None))
        }),
        Call::UnmapExternal { range, uuid } => unmap(case, uuid, range),
        Call::UnregisterGpu { uuid } | Call::UnregisterVaSpace { uuid } => unregister(case, uuid),
        Call::Free { base, length } => free_range(case, base, length),
        // None of these is the monitor's to make (`policy::judge_uvm`).
        Call::Initialize { .. }
        | Call::MmInitialize { .. }
        | Call::RegisterVaSpace { .. }
        | Call::RegisterChannel { .. }
        | Call::CreateExternalRange(_)
        | Call::MapDynamicParallelism(_)
        | Call::Other { .. } => Err(case.answer(Answer::Status(NV_ERR_NOT_SUPPORTED))),
    }
}

/// A GPU is registered only where the file's flags are such as may be: initializing with others
/// than it has fails. And where its maker lives, with whom it ends, which is entered before.
fn register(
    case: &mut Case<'_>,
    file: &UvmFile,
    (descriptor, control): (i32, Option<&Device>),
) -> Result<Reply, Over> {
    if !is_initialized(case)? {
        return Err(case.answer(Answer::Status(NV_ERR_ILLEGAL_ACTION)));
    }
    let is_alone = case.parts.uvm.has_flags(case.device()?, ALONE);
    if !is_alone {
        judge_flags(case)?;
    } else if !case.parts.uvm.bind_to_maker(file) {
        return Err(refuse_orphaned(case));
    }
    let number_of = control.map_or(-1, Device::descriptor);
    case.patch(Meaning::Descriptor, u64::from(number_of.cast_unsigned()));
    // The GPU's node must be open in the process that asks (`osIsGpuAccessible`, nv_gpu_ops.c).
    let own = case.parts.driver.own_client();
    let asked = ask(case);
    drop(own);
    case.patch(Meaning::Descriptor, u64::from(descriptor.cast_unsigned()));
    asked?;
    if case.asked_before && case.was_done_already() {
        // By the worker before.
        case.patch(Meaning::Status, NV_OK.into());
    }
    // What was no memory of a GPU's may become such.
    case.parts.mappings.spaces.look_at_all();
    if is_alone && case.status() == NV_OK && case.parts.uvm.is_orphaned(file) {
        case.parts.uvm.unregister_gpus(case.device()?);
        return Err(refuse_orphaned(case));
    }
    Ok(case.executed(None))
}

/// Whether a file may have a GPU that isn't of one memory without HMM.
fn judge_flags(case: &mut Case<'_>) -> Result<(), Over> {
    let is_shared = case.parts.uvm.has_flags(case.device()?, SHARED);
    if is_shared && case.parts.state.settings.managed == Managed::Refuse {
        return Ok(());
    }
    if is_shared {
        case.log("a file of nvidia-uvm for several processes, where managed memory is charged");
    } else {
        case.log("nvidia-uvm was initialized with HMM all the same");
        case.parts.processes.kill(case.target()?.process, Event::killed_past_the_monitor());
    }
    Err(case.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT)))
}

/// All of a GPU's mappings end; one that isn't registered has none.
fn unregister(case: &mut Case<'_>, uuid: [u8; 16]) -> Result<Reply, Over> {
    end_mappings(
        case,
        |_, _| true,
        |case, file| {
            if let Some(gpu) = gpu_of(case, uuid) {
                case.books().unmap(Tree { file, gpu }, Span::ALL);
            }
            // Pools go with the GPU that they were made for, where that is confidential.
            withdraw_gone(case, file);
        },
    )
}

/// What UVM says of a call that has been done: of a range that is gone or there, of a GPU that is
/// registered or not (`uvm_va_space.c`). What else it maps once more.
fn done_already(call: &Call) -> &'static [u32] {
    match call {
        Call::Free { .. } => &[NV_ERR_INVALID_ADDRESS],
        Call::AllocSemaphorePool(_) | Call::AllocDeviceP2p { .. } => &[NV_ERR_UVM_ADDRESS_IN_USE],
        Call::RegisterGpu { .. } | Call::UnregisterGpu { .. } | Call::UnregisterVaSpace { .. } => {
            &[NV_ERR_INVALID_DEVICE]
        }
        _ => &[],
    }
}
