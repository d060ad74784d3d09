//! MiB, the unit people see, against bytes, the unit we count in.
//!
//! A MiB is 2²⁰ bytes. It exists at the edges only: environment variables,
//! configuration, inventory files and output. Everything between is bytes.

/// Bytes in one MiB.
pub const MIB: u64 = 1 << 20;

/// Bytes in `mib` MiB, or `None` where that is no `u64`.
#[must_use]
pub fn mib_to_bytes(mib: u64) -> Option<u64> {
    mib.checked_mul(MIB)
}

/// Whole MiB in `bytes`, rounded down.
#[must_use]
pub fn bytes_to_mib(bytes: u64) -> u64 {
    bytes / MIB
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mib_count_beyond_u64_bytes_is_no_number() {
        assert_eq!(mib_to_bytes(16130), Some(16130 * 1024 * 1024));
        assert_eq!(mib_to_bytes(u64::MAX / MIB + 1), None);
        assert_eq!(bytes_to_mib(MIB - 1), 0);
    }
}
