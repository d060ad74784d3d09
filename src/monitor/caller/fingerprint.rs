//! How a call is recognized when its thread makes it again.

use std::hash::{DefaultHasher, Hasher};

/// A hash of a call: its registers, and its struct and parameters as they were at some time. A caller whose two calls
/// have the same hash deceives only itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fingerprint(pub(super) u64);

impl Fingerprint {
    /// The hash of a call's registers, its struct, and the parameters that the struct points at.
    pub(crate) fn of(registers: Registers, bytes: &[u8], params: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write_u64(registers.0);
        hasher.write_u64(registers.1);
        hasher.write(bytes);
        hasher.write(params);
        Fingerprint(hasher.finish())
    }
}

/// The registers of a call: descriptor and request in one word, and the argument.
pub(crate) type Registers = (u64, u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_known_by_its_registers_and_by_what_was_read() {
        let read = Fingerprint::of((7, 2), &[1, 2], &[]);
        assert_eq!(read, Fingerprint::of((7, 2), &[1], &[2]), "read at once, or in two parts");
        assert_ne!(read, Fingerprint::of((7, 2), &[1], &[3]));
        assert_ne!(read, Fingerprint::of((7, 3), &[1], &[2]));
    }
}
