//! Spaces of addresses that ranges are in: a process's, or a file's of nvidia-uvm. Pure.

use crate::ledger::Process;

/// The bits that tell managed ranges of a process from those that a file of UVM's has: no process
/// has such a number, and no range such an address.
pub(crate) const MANAGED: u64 = 1 << 63;
pub(crate) const OF_FILE: u64 = 1 << 62;

/// What ranges are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    /// A process, which mapped managed memory there.
    Managed(Process),
    /// A file of UVM's that is kept, by its number: it had the driver make them, and what is
    /// mapped there by it is no managed memory.
    File(u32),
}

impl Space {
    /// Its number in the journal, and in [`Hold::Mapping`](crate::ledger::Hold::Mapping).
    pub(crate) fn number(self) -> u64 {
        match self {
            Self::Managed(process) => process.0 | MANAGED,
            Self::File(number) => u64::from(number) | OF_FILE,
        }
    }
}
