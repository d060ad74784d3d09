//! Judges the driver usage: whether memory was taken untracked, or given back unseen.
//!
//! Pure: driver usage goes in, a [`Finding`] comes out. The driver usage and the ledger's expectation are not of the
//! same instant; [`judge`] says what can be concluded all the same.

use cgpu_core::ledger::Expected;

/// What the driver usage of a GPU means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finding {
    /// The driver usage is as expected, or can't be distinguished from that.
    Fine,
    /// The driver reports less memory than counts. The audit must check which of the ledger's objects are gone.
    /// Afterwards no more counts than this, or than the ledger's charges if these are more.
    LessShown {
        /// The memory that the driver has, in bytes.
        driver_bytes: u64,
    },
    /// There is more memory than was asked for, and it fits the quota, so it counts from now on. A call that changed
    /// after the monitor checked it took the memory, or the driver itself.
    Unasked {
        /// The memory that counts from now on, in bytes.
        driver_bytes: u64,
    },
    /// Memory was taken untracked, and beyond the quota.
    Exceeds {
        /// How much was taken in all, in bytes.
        excess_bytes: u64,
        /// The memory that counts from now on, in bytes.
        driver_bytes: u64,
    },
}

/// Compares the driver usage of a GPU with what the ledger expects: `made_bytes` of all processes of the container
/// together, and `own_bytes` of the monitor.
///
/// The ledger reserves memory before the driver is asked for it, and frees the charge after the driver has freed the
/// memory. So even next to a call that hangs, no more is attributed to the processes than [`Expected::peak_bytes`], the
/// peak around the query; memory above the peak was taken untracked. A usage below the expected one may be due to the
/// call that hangs, so that [`Finding::LessShown`] means something only if no call held the RM lock.
///
/// Memory counts once, as made; duplicates don't count. Memory that is retained by an export or a mapping made by a
/// call, and that is attributed to no process as made any more, is attributed to the monitor itself, in `own_bytes`,
/// because a pin stands before the export or mapping ([`PinPlace`](cgpu_core::ledger::PinPlace)). Managed memory has no
/// pin, and is in no driver usage. No more than [`Expected::most_bytes`] is attributed to the processes and the monitor
/// together.
///
/// Untracked memory is charged. A process is killed for such memory only if it doesn't fit the quota: the quota is the
/// promise, and the driver may count memory that it takes for itself.
#[must_use]
pub(crate) fn judge(made_bytes: u64, own_bytes: u64, expected: &Expected) -> Finding {
    let over_peak = made_bytes.saturating_sub(expected.peak_bytes);
    let over_most = made_bytes.saturating_add(own_bytes).saturating_sub(expected.most_bytes);
    // The driver has at least this much. The hidden bytes count if they are more than the monitor's usage: they
    // contain managed memory, which is in no driver usage.
    let mut driver_bytes = made_bytes.saturating_add(own_bytes.max(expected.hidden_bytes));
    if over_most > 0 {
        driver_bytes = driver_bytes.max(expected.charged_bytes.saturating_add(over_most));
    }
    let excess_bytes = over_peak.max(over_most);
    let used_bytes = expected.usage.used_bytes;
    match driver_bytes {
        _ if excess_bytes > 0 && driver_bytes > expected.usage.limit_bytes.max(used_bytes) => {
            Finding::Exceeds { excess_bytes, driver_bytes }
        }
        _ if excess_bytes > 0 && driver_bytes > used_bytes => Finding::Unasked { driver_bytes },
        _ if driver_bytes.saturating_add(expected.pending_bytes) < used_bytes => {
            Finding::LessShown { driver_bytes }
        }
        _ => Finding::Fine,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use cgpu_core::ledger::Usage;

    /// An expectation with a quota that is used to the last byte.
    fn expected(peak_bytes: u64, hidden_bytes: u64, used_bytes: u64) -> Expected {
        let usage = Usage { limit_bytes: used_bytes, used_bytes };
        let most_bytes = peak_bytes + hidden_bytes;
        let charged_bytes = used_bytes;
        Expected { peak_bytes, most_bytes, hidden_bytes, pending_bytes: 0, charged_bytes, usage }
    }

    /// Memory that no call asked for is charged if it fits the quota, and is an excess otherwise.
    #[test]
    fn untracked_memory_is_charged_if_quota_permits() {
        let exceeds = Finding::Exceeds { excess_bytes: 40, driver_bytes: 145 };
        assert_eq!(judge(140, 0, &expected(100, 5, 105)), exceeds);
        let usage = Usage { limit_bytes: 145, used_bytes: 105 };
        let mut expected = Expected { usage, ..expected(100, 5, 105) };
        assert_eq!(judge(140, 0, &expected), Finding::Unasked { driver_bytes: 145 });
        expected.usage.limit_bytes = 144;
        assert_eq!(judge(140, 0, &expected), exceeds);
    }

    /// Untracked memory that counts already is not judged as taken again.
    #[test]
    fn charged_untracked_memory_is_no_new_excess() {
        // 10 untracked bytes count already. A call that is to be undone was given 2 beyond the quota.
        let usage = Usage { limit_bytes: 100, used_bytes: 102 };
        let expected = Expected { charged_bytes: 92, usage, ..expected(92, 0, 102) };
        assert_eq!(judge(102, 0, &expected), Finding::Fine);
        let exceeds = Finding::Exceeds { excess_bytes: 11, driver_bytes: 103 };
        assert_eq!(judge(103, 0, &expected), exceeds);
    }

    /// Untracked memory that counts already stays charged while the driver reports it.
    #[test]
    fn reported_untracked_memory_stays_charged() {
        // 30 were exported, and their creators' objects are freed. 10 untracked bytes count already, and other objects
        // of as many were freed unseen.
        let usage = Usage { limit_bytes: 100, used_bytes: 80 };
        let expected = Expected { charged_bytes: 70, usage, ..expected(70, 0, 80) };
        assert_eq!(judge(50, 30, &expected), Finding::Fine);
        // The 10 untracked bytes are gone.
        assert_eq!(judge(50, 20, &expected), Finding::LessShown { driver_bytes: 70 });
        let too_much = Finding::LessShown { driver_bytes: 75 };
        assert_eq!(judge(40, 35, &expected), too_much, "rather too much");
    }

    /// Memory of a call that hangs may yet be given, so the driver's lower usage is no deficit.
    #[test]
    fn pending_calls_explain_a_lower_driver_usage() {
        let expected = |pending_bytes| Expected { pending_bytes, ..expected(90, 10, 100) };
        assert_eq!(judge(40, 0, &expected(49)), Finding::LessShown { driver_bytes: 50 });
        assert_eq!(judge(40, 0, &expected(50)), Finding::Fine);
    }

    #[test]
    fn hidden_memory_excuses_no_visible_excess() {
        let exceeds = Finding::Exceeds { excess_bytes: 60, driver_bytes: 120 };
        assert_eq!(judge(60, 0, &expected(0, 60, 60)), exceeds);
    }

    /// Memory attributed to the monitor itself leaves no space for memory that no call asked for.
    #[test]
    fn monitors_own_memory_hides_no_untracked_memory() {
        // 40 were exported, and their creator's object is freed. The objects of another 30 were freed unseen.
        let expected = expected(70, 0, 70);
        let exceeds = Finding::Exceeds { excess_bytes: 30, driver_bytes: 100 };
        assert_eq!(judge(60, 40, &expected), exceeds);
        assert_eq!(judge(30, 40, &expected), Finding::Fine);
        // 10 of the charged bytes are attributed nowhere: the driver is to be asked for each object.
        assert_eq!(judge(60, 0, &expected), Finding::LessShown { driver_bytes: 60 });
    }

    proptest! {
        #[test]
        fn driver_usage_within_the_peak_kills_no_process(
            made in 0..500_u64, slack in 0..50_u64, hidden in 0..50_u64,
        ) {
            let peak = made + slack;
            let finding = judge(made, 0, &expected(peak, hidden, peak + hidden));
            let killed = matches!(finding, Finding::Exceeds { .. });
            prop_assert!(!killed);
        }

        #[test]
        fn whatever_is_beyond_the_peak_is_found(made in 0..500_u64, short in 1..50_u64) {
            prop_assume!(made >= short);
            let exceeds = Finding::Exceeds { excess_bytes: short, driver_bytes: made };
            prop_assert_eq!(judge(made, 0, &expected(made - short, 0, 0)), exceeds);
        }
    }
}
