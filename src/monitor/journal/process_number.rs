//! The number of a process in the ledger and the journal. This file asks the kernel nothing.

use crate::ledger::Process;
use crate::process::ProcessId;

/// The bits of a pid: `PID_MAX_LIMIT` is 2²².
const PID_BITS: u32 = 22;

/// The number of a process, made of its start time and its pid.
pub(crate) fn number(process: ProcessId) -> Process {
    let pid = u64::from(process.pid.cast_unsigned()) & ((1 << PID_BITS) - 1);
    Process(process.start_ticks << PID_BITS | pid)
}

/// The process with this number.
pub(crate) fn process_id(process: Process) -> ProcessId {
    let pid = i32::try_from(process.0 & ((1 << PID_BITS) - 1)).unwrap_or(0);
    ProcessId { pid, start_ticks: process.0 >> PID_BITS }
}
