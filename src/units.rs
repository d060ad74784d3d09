//! MiB, the unit people see, against bytes, the unit we count in; and a container's weight of the processor.
//!
//! A MiB is 2²⁰ bytes. It exists at the edges only: environment variables,
//! configuration, inventory files and output. Everything between is bytes.

use serde::{Deserialize, Serialize};

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

/// The MiB that `text` says: `4096`, `4096MiB` or `4GiB`; `None` where it says none.
#[must_use]
pub fn mib_said(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, factor) = match text.strip_suffix("GiB") {
        Some(number) => (number, 1024),
        None => (text.strip_suffix("MiB").unwrap_or(text), 1),
    };
    let number = number.trim_end();
    let is_plain = number.bytes().all(|byte| byte.is_ascii_digit());
    number.parse::<u64>().ok().filter(|_| is_plain)?.checked_mul(factor)
}

/// The processor's weight of a container, in `cpu.shares` of version 1: from 2 to 262,144, and 1024 by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessorShares(pub u64);

impl ProcessorShares {
    /// The shares for `cpu.weight` of version 2: from 1 to 10,000, and 100 by default.
    #[must_use]
    pub fn of_weight(weight: u64) -> Self {
        ProcessorShares(2 + weight.clamp(1, 10_000).saturating_sub(1) * 262_142 / 9999)
    }

    /// The `cpu.weight` for these shares, as the kubelet and runc have converted them (`ConvertCPUProcessorSharesToCgroupV2Value`
    /// of opencontainers/cgroups, until its version 0.0.3).
    #[must_use]
    pub fn weight(self) -> u64 {
        1 + (self.0.clamp(2, 262_144) - 2) * 9999 / 262_142
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_a_number_of_mib_or_gib() {
        let all = [("4096", 4096), ("4GiB", 4096), (" 3 MiB\n", 3), ("0MiB", 0)];
        for (text, mib) in all {
            assert_eq!(mib_said(text), Some(mib), "{text}");
        }
        for text in ["", "GiB", "4GB", "4G", "-1", "+1", "1.5GiB", "18446744073709551615GiB"] {
            assert_eq!(mib_said(text), None, "{text}");
        }
    }

    #[test]
    fn a_mib_count_beyond_u64_bytes_is_no_number() {
        assert_eq!(mib_to_bytes(16130), Some(16130 * 1024 * 1024));
        assert_eq!(mib_to_bytes(u64::MAX / MIB + 1), None);
        assert_eq!(bytes_to_mib(MIB - 1), 0);
    }

    #[test]
    fn shares_and_weights_are_those_of_the_engines() {
        for (shares, weight) in [(2, 1), (1024, 39), (512, 20), (262_144, 10_000), (0, 1)] {
            assert_eq!(ProcessorShares(shares).weight(), weight, "{shares}");
        }
        for weight in [1, 20, 39, 100, 10_000] {
            let back = ProcessorShares::of_weight(weight).weight();
            assert!(back.abs_diff(weight) <= 1, "{weight} became {back}");
        }
        assert_eq!(ProcessorShares::of_weight(0), ProcessorShares(2));
    }
}
