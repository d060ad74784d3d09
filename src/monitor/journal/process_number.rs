//! A process as the ledger and the journal know it: a number. Knows no process.

use crate::ledger::Process;
use crate::process::ProcessId;

/// Bits of a pid; `PID_MAX_LIMIT` is 2²².
const PID_BITS: u32 = 22;

/// The number of a process: when it started, and its pid.
pub(crate) fn number(process: ProcessId) -> Process {
    let pid = u64::from(process.pid.cast_unsigned()) & ((1 << PID_BITS) - 1);
    Process(process.start_ticks << PID_BITS | pid)
}

/// The process of a number.
pub(crate) fn process_id(process: Process) -> ProcessId {
    let pid = i32::try_from(process.0 & ((1 << PID_BITS) - 1)).unwrap_or(0);
    ProcessId { pid, start_ticks: process.0 >> PID_BITS }
}
