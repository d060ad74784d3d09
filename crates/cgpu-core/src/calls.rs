//! How many calls of the driver a container made, what became of them, and how long they took.

use core::time::Duration;

use serde::{Deserialize, Serialize};

/// Calls since the monitor began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calls {
    /// Passed through.
    pub continued: u64,
    /// Executed by the monitor.
    pub executed: u64,
    /// Refused for the quota.
    pub over_quota: u64,
    /// Refused for any other reason.
    pub refused: u64,
    /// Processes killed, for what they had taken bypassing the gate.
    pub killed: u64,
}

impl Calls {
    /// How many were received.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.continued + self.executed + self.over_quota + self.refused
    }
}

/// The longest that a call of each count of [`Durations`] but the last took, in microseconds.
pub const DURATIONS_US: [u64; 12] =
    [5, 10, 20, 50, 100, 200, 500, 1_000, 5_000, 20_000, 100_000, 1_000_000];

/// How long calls took, from their notification to their reply: the driver's part is in it, where the
/// monitor made the call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Durations {
    /// Calls that took at most as long as [`DURATIONS_US`] says, and longer than the one before; the
    /// last are those that took longer than all.
    pub counts: [u64; DURATIONS_US.len() + 1],
    /// All of them together, in nanoseconds.
    pub sum_ns: u64,
}

impl Durations {
    /// Which count has a call that took so long.
    #[must_use]
    pub fn place(took: Duration) -> usize {
        DURATIONS_US.partition_point(|bound| Duration::from_micros(*bound) < took)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call is counted under the first duration bound that it does not exceed.
    #[test]
    fn call_counts_under_first_bound_not_exceeded() {
        for (ns, place) in [
            (0, 0),
            (5_000, 0),
            (5_001, 1),
            (10_000, 1),
            (1_000_000, 7),
            (999_999_999, 11),
            (1_000_000_000, 11),
            (1_000_000_001, 12),
            (u64::MAX, 12),
        ] {
            assert_eq!(Durations::place(Duration::from_nanos(ns)), place, "{ns} ns");
        }
        assert!(DURATIONS_US.is_sorted());
    }
}
