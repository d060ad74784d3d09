//! Judges the driver's figures: whether memory was taken past the monitor, and which process is to be killed for that.
//!
//! Pure: figures go in, a [`Finding`] comes out. The figures and the ledger's expectation are not of the same instant;
//! [`judge`] says what can be concluded all the same.

use crate::ledger::Expected;
use crate::rm::about::Held;

/// The figure of one of the container's processes on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Figure {
    /// The driver's figure of the process.
    pub held: Held,
    /// What the ledger charges the clients of the process, in bytes.
    pub charged_bytes: u64,
}

/// What the figures of a GPU mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finding {
    /// The figures are as expected, or can't be told apart from that.
    Fine,
    /// The driver has less memory than counts, and no call was on the lane. The audit is to look which of the ledger's
    /// objects are gone. Afterwards no more counts than this, or than the ledger's charges where these are more.
    Learn {
        /// The memory that the driver has, in bytes.
        driver_bytes: u64,
    },
    /// The driver has less memory than counts, and a call that hangs may be the reason.
    Less,
    /// There is more memory than was asked for, and the quota has room for it, so it counts from now on. A call that
    /// changed after the monitor looked took it, or the driver itself.
    Unasked {
        /// The memory that counts from now on, in bytes.
        driver_bytes: u64,
    },
    /// Memory was taken past the monitor, and past the quota.
    Exceeds {
        /// The pid of the process that most likely took it.
        pid: u32,
        /// How much was taken in all, in bytes.
        excess_bytes: u64,
        /// The memory that counts from now on, in bytes.
        driver_bytes: u64,
    },
}

/// Whether the ledger stood still while the driver was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Underway {
    /// The ledger stood still: no call was on the lane.
    Nothing,
    /// A call hangs on the lane.
    Call,
}

/// Compares the figures of the container's processes on a GPU with what the ledger expects.
///
/// The ledger reserves memory before the driver is asked for it, and frees the charge after the driver has freed the
/// memory. So even beside a call that hangs, the processes show no more than [`Expected::peak_bytes`], the peak
/// around the question; memory above the peak has gone past the monitor. A figure below the expected one may be due
/// to the call that hangs, so it means something only where no call was on the lane.
///
/// Memory counts once, as made; duplicates don't count. Memory that an export or a mapping made by a call keeps, and
/// that no process shows as made any more, shows in the monitor's own figure, `own_bytes`, because a stake stands
/// before the export or mapping ([`StakePlace`](crate::ledger::StakePlace)). Managed memory has no stake, and shows in
/// no figure. The processes and the monitor together show no more than [`Expected::most_bytes`].
///
/// Memory that nobody asked for is charged. A process is killed for such memory only where it doesn't fit the quota:
/// the quota is the promise, and the driver may count memory that it takes for itself.
#[must_use]
pub(crate) fn judge(
    figures: &[Figure],
    own_bytes: u64,
    expected: &Expected,
    underway: Underway,
) -> Finding {
    let made = sum(figures.iter().map(|figure| figure.held.made_bytes));
    let used = expected.usage.used_bytes;
    let over_peak = made.saturating_sub(expected.peak_bytes);
    let over_most = made.saturating_add(own_bytes).saturating_sub(expected.most_bytes);
    // The driver has at least this much. The hidden bytes count where they are more than the monitor's figure: they
    // contain managed memory, which is in no figure.
    let mut driver_bytes = made.saturating_add(own_bytes.max(expected.hidden_bytes));
    if over_most > 0 {
        driver_bytes = driver_bytes.max(expected.charged_bytes.saturating_add(over_most));
    }
    let excess_bytes = over_peak.max(over_most);
    if excess_bytes > 0 && driver_bytes > used {
        let is_within_quota = driver_bytes <= expected.usage.limit_bytes;
        let excess = |of: &&Figure| of.held.made_bytes.saturating_sub(of.charged_bytes);
        let worst = figures.iter().max_by_key(excess).map(|worst| worst.held.pid);
        return match worst {
            _ if is_within_quota => Finding::Unasked { driver_bytes },
            Some(pid) => Finding::Exceeds { pid, excess_bytes, driver_bytes },
            None => Finding::Fine,
        };
    }
    match underway {
        _ if driver_bytes.saturating_add(expected.pending_bytes) >= used => Finding::Fine,
        Underway::Call => Finding::Less,
        Underway::Nothing => Finding::Learn { driver_bytes },
    }
}

fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ledger::Usage;

    fn figure(pid: u32, made_bytes: u64, charged_bytes: u64) -> Figure {
        Figure { held: Held { pid, made_bytes, duplicated_bytes: 0 }, charged_bytes }
    }

    /// An expectation with a quota that is used to the last byte.
    fn expected(peak_bytes: u64, hidden_bytes: u64, used_bytes: u64) -> Expected {
        let usage = Usage { limit_bytes: used_bytes, used_bytes };
        let most_bytes = peak_bytes + hidden_bytes;
        let charged_bytes = used_bytes;
        Expected { peak_bytes, most_bytes, hidden_bytes, pending_bytes: 0, charged_bytes, usage }
    }

    #[test]
    fn who_has_most_beyond_its_charges_is_named() {
        let figures = [figure(1, 90, 90), figure(2, 50, 10)];
        let finding = judge(&figures, 0, &expected(100, 5, 105), Underway::Call);
        let wanted = Finding::Exceeds { pid: 2, excess_bytes: 40, driver_bytes: 145 };
        assert_eq!(finding, wanted);
    }

    #[test]
    fn what_nobody_asked_for_is_charged_where_it_fits_the_quota() {
        let usage = Usage { limit_bytes: 145, used_bytes: 105 };
        let mut expected = Expected { usage, ..expected(100, 5, 105) };
        let figures = [figure(1, 90, 90), figure(2, 50, 10)];
        for underway in [Underway::Call, Underway::Nothing] {
            let finding = judge(&figures, 0, &expected, underway);
            assert_eq!(finding, Finding::Unasked { driver_bytes: 145 });
        }
        expected.usage.limit_bytes = 144;
        let finding = judge(&figures, 0, &expected, Underway::Nothing);
        assert!(matches!(finding, Finding::Exceeds { pid: 2, .. }), "{finding:?}");
    }

    #[test]
    fn what_counts_already_is_taken_by_nobody() {
        // 10 that nobody asked for count already. A call that is to be undone was given 2 past the quota.
        let usage = Usage { limit_bytes: 100, used_bytes: 102 };
        let expected = Expected { charged_bytes: 92, usage, ..expected(92, 0, 102) };
        let judged = |made| judge(&[figure(1, made, 0)], 0, &expected, Underway::Nothing);
        assert_eq!(judged(102), Finding::Fine);
        assert!(matches!(judged(103), Finding::Exceeds { driver_bytes: 103, .. }));
    }

    #[test]
    fn what_counts_already_is_not_forgotten_while_it_shows() {
        // 30 were exported, and their makers' objects are freed. 10 that nobody asked for count already, and other
        // objects of as many were freed unseen.
        let usage = Usage { limit_bytes: 100, used_bytes: 80 };
        let expected = Expected { charged_bytes: 70, usage, ..expected(70, 0, 80) };
        let judged = |made, own| judge(&[figure(1, made, 0)], own, &expected, Underway::Nothing);
        assert_eq!(judged(50, 30), Finding::Fine);
        // The 10 that nobody asked for are gone.
        assert_eq!(judged(50, 20), Finding::Learn { driver_bytes: 70 });
        assert_eq!(judged(40, 35), Finding::Learn { driver_bytes: 75 }, "rather too much");
    }

    #[test]
    fn less_is_learnt_only_where_nothing_was_underway() {
        let figures = [figure(1, 40, 90)];
        let expected = expected(90, 10, 100);
        assert_eq!(judge(&figures, 0, &expected, Underway::Call), Finding::Less);
        let learnt = Finding::Learn { driver_bytes: 50 };
        assert_eq!(judge(&figures, 0, &expected, Underway::Nothing), learnt);
    }

    #[test]
    fn what_hangs_may_yet_be_given_and_is_no_less() {
        let figures = [figure(1, 40, 90)];
        let expected = |pending_bytes| Expected { pending_bytes, ..expected(90, 10, 100) };
        let learnt = Finding::Learn { driver_bytes: 50 };
        assert_eq!(judge(&figures, 0, &expected(49), Underway::Nothing), learnt);
        assert_eq!(judge(&figures, 0, &expected(50), Underway::Nothing), Finding::Fine);
    }

    #[test]
    fn hidden_memory_is_no_excuse_for_more_in_sight() {
        let finding = judge(&[figure(1, 60, 0)], 0, &expected(0, 60, 60), Underway::Nothing);
        assert!(matches!(finding, Finding::Exceeds { pid: 1, excess_bytes: 60, .. }));
    }

    #[test]
    fn memory_that_we_own_makes_no_room_for_what_nobody_asked_for() {
        // 40 were exported, and their maker's object is freed. The objects of another 30 were freed unseen.
        let duplicate = Held { pid: 1, made_bytes: 0, duplicated_bytes: 40 };
        let figures = |taken| {
            let taken = Held { pid: 2, made_bytes: taken, duplicated_bytes: 0 };
            [duplicate, taken].map(|held| Figure { held, charged_bytes: 0 })
        };
        let expected = expected(70, 0, 70);
        let judged = |own, taken| judge(&figures(taken), own, &expected, Underway::Nothing);
        let exceeds = Finding::Exceeds { pid: 2, excess_bytes: 30, driver_bytes: 100 };
        assert_eq!(judged(40, 60), exceeds);
        assert_eq!(judged(40, 30), Finding::Fine);
        // 10 of the charged bytes show nowhere: the driver is to be asked for each object.
        assert_eq!(judged(0, 60), Finding::Learn { driver_bytes: 60 });
    }

    proptest! {
        #[test]
        fn nobody_is_killed_while_the_driver_has_no_more_than_the_peak(
            made in proptest::collection::vec(0..100_u64, 1..5),
            slack in 0..50_u64,
            hidden in 0..50_u64,
        ) {
            let figures: Vec<Figure> = made.iter().map(|made| figure(1, *made, 0)).collect();
            let peak = made.iter().sum::<u64>() + slack;
            for underway in [Underway::Call, Underway::Nothing] {
                let finding = judge(&figures, 0, &expected(peak, hidden, peak + hidden), underway);
                let killed = matches!(finding, Finding::Exceeds { .. });
                prop_assert!(!killed);
            }
        }

        #[test]
        fn whatever_is_beyond_the_peak_is_found(
            made in proptest::collection::vec(0..100_u64, 1..5),
            short in 1..50_u64,
        ) {
            let figures: Vec<Figure> = made.iter().map(|made| figure(1, *made, 0)).collect();
            let sum = made.iter().sum::<u64>();
            prop_assume!(sum >= short);
            let finding = judge(&figures, 0, &expected(sum - short, 0, 0), Underway::Call);
            let excess = match finding {
                Finding::Exceeds { excess_bytes, .. } => excess_bytes,
                Finding::Fine
                | Finding::Learn { .. }
                | Finding::Less
                | Finding::Unasked { .. } => 0,
            };
            prop_assert_eq!(excess, short);
        }
    }
}
