//! What a debugger reads and writes of memory.
//!
//! As `_nv83deCtrlCmdDebugAccessMemory` (kernel_sm_debugger_session_ctrl.c): the memory is one of the
//! caller's client, length and offset lie within it, or nothing is done. All bytes are copied first
//! that are written, and last that were read.

use crate::abi::*;
use crate::bytes::Fields;
use crate::escape::Call;
use crate::object::Status;

/// Both controls.
pub(crate) fn access(
    call: &Call<'_>,
    client: u32,
    command: u32,
    params: &[u8],
) -> Result<(), Status> {
    let (handle, length) = (params.u32_at(0), params.u32_at(4) as usize);
    let (offset, buffer) = (params.u64_at(8), params.u64_at(16));
    let writes = command == NV83DE_CTRL_CMD_DEBUG_WRITE_MEMORY;
    let mut bytes = vec![0; length];
    if writes {
        bytes = call.copy_in(buffer, length)?;
    }
    {
        let mut driver = call.sim.driver();
        let object = driver.clients.get(&client).and_then(|client| client.objects.get(&handle));
        let object = object.ok_or(NV_ERR_INSUFFICIENT_PERMISSIONS)?;
        let memory = object.memory.ok_or(NV_ERR_INVALID_ARGUMENT)?;
        let size = driver.memory_bytes(memory).ok_or(NV_ERR_INVALID_STATE)?;
        let end = offset.checked_add(length as u64).filter(|end| *end <= size && length > 0);
        let end = end.ok_or(NV_ERR_INVALID_ARGUMENT)?;
        let place = |at: u64| usize::try_from(at).map_err(|_| NV_ERR_INVALID_ARGUMENT);
        let (from, to, size) = (place(offset)?, place(end)?, place(size)?);
        let content = driver.contents.entry(memory).or_default();
        content.resize(size, 0);
        let there = content.get_mut(from..to).ok_or(NV_ERR_INVALID_ARGUMENT)?;
        match writes {
            true => there.copy_from_slice(&bytes),
            false => bytes.copy_from_slice(there),
        }
    }
    if writes {
        return Ok(());
    }
    call.caller.write(buffer, &bytes).ok_or(NV_ERR_INVALID_ADDRESS)
}
