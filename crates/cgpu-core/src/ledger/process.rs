//! The number of a process. Snapshots of monitors have it.

use serde::{Deserialize, Serialize};

/// The bits of a pid: `PID_MAX_LIMIT` is 2²².
const PID_BITS: u32 = 22;

/// A process, by a number that is not used again while the ledger lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Process(pub u64);

impl Process {
    /// The number of the process with that pid that started then, in ticks of the kernel's clock.
    #[must_use]
    pub fn of(pid: u32, start_ticks: u64) -> Self {
        Process(start_ticks << PID_BITS | u64::from(pid) & ((1 << PID_BITS) - 1))
    }

    /// The pid in the number.
    #[must_use]
    pub fn pid(self) -> u32 {
        u32::try_from(self.0 & ((1 << PID_BITS) - 1)).unwrap_or(0)
    }

    /// When the process started, in ticks of the kernel's clock.
    #[must_use]
    pub fn start_ticks(self) -> u64 {
        self.0 >> PID_BITS
    }
}
