//! A container's weight of the processor, as cgroups of version 1 and of version 2 have it. Pure.

use serde::{Deserialize, Serialize};

/// The processor's weight of a container, in `cpu.shares` of version 1: from 2 to 262,144, and 1024 by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessorShares(pub u64);

impl ProcessorShares {
    /// The shares for `cpu.weight` of version 2: from 1 to 10,000, and 100 by default.
    #[must_use]
    pub fn of_weight(weight: u64) -> Self {
        ProcessorShares(2 + weight.clamp(1, 10_000).saturating_sub(1) * 262_142 / 9999)
    }

    /// The `cpu.weight` for these shares, as the kubelet and runc have converted them (`ConvertCPUSharesToCgroupV2Value` of
    /// opencontainers/cgroups, until its version 0.0.3).
    #[must_use]
    pub fn weight(self) -> u64 {
        1 + (self.0.clamp(2, 262_144) - 2) * 9999 / 262_142
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
