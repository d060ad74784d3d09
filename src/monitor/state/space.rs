//! The address spaces that ranges belong to: of a process, or of a file of nvidia-uvm. Pure.

use crate::ledger::Process;

/// These bits tell a process's managed ranges from the ranges of UVM's files. No process's number and no range's
/// address has them.
pub(crate) const MANAGED: u64 = 1 << 63;
pub(crate) const OF_FILE: u64 = 1 << 62;

/// The owner of address ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    /// A process that mapped managed memory.
    Managed(Process),
    /// The number of a kept file of UVM's, through which the driver made the ranges. What this file maps there is no
    /// managed memory.
    File(u32),
}

impl Space {
    /// The space's number in the journal, and in [`Hold::Mapping`](crate::ledger::Hold::Mapping).
    pub(crate) fn number(self) -> u64 {
        match self {
            Self::Managed(process) => process.0 | MANAGED,
            Self::File(number) => u64::from(number) | OF_FILE,
        }
    }
}
