//! What the books know of names of memory.

/// Names of memory, of which each shows in the figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KnownNames {
    /// What those that are known name, in bytes.
    pub known_bytes: u64,
    /// Memory may have an owner that no figure has, the monitor's neither.
    pub are_needed: bool,
}
