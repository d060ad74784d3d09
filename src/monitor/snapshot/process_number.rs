//! The number of a process in the ledger. This file asks the kernel nothing.

use crate::ledger::Process;
use crate::process::ProcessId;

/// The bits of a pid: `PID_MAX_LIMIT` is 2²².
const PID_BITS: u32 = 22;

/// A process's number has its start time and its pid.
impl From<ProcessId> for Process {
    fn from(process: ProcessId) -> Self {
        let pid = u64::from(process.pid.cast_unsigned()) & ((1 << PID_BITS) - 1);
        Process(process.start_ticks << PID_BITS | pid)
    }
}

impl Process {
    /// The pid in the process's number.
    pub(crate) fn pid(self) -> u32 {
        u32::try_from(self.0 & ((1 << PID_BITS) - 1)).unwrap_or(0)
    }
}

/// The process with this number.
impl From<Process> for ProcessId {
    fn from(process: Process) -> Self {
        ProcessId { pid: process.pid().cast_signed(), start_ticks: process.0 >> PID_BITS }
    }
}
