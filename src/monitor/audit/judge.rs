//! What the driver's own figures mean: whether something went round the monitor, and who
//! is to be killed for it.
//!
//! Pure: figures in, a [`Finding`] out. The figures and what the ledger expects
//! are not of the same instant; see [`judge`] for what can be said all the same.

use crate::ledger::Expected;
use crate::rm::about::Held;

/// A process of the container, on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Figure {
    /// What the driver says of it.
    pub held: Held,
    /// What the ledger has for the clients it was seen with, in bytes.
    pub charged_bytes: u64,
}

/// What the figures say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finding {
    /// As expected, or not to be told apart from that.
    Fine,
    /// The driver has less or other than the ledger, and nothing changed meanwhile: what of the
    /// ledger's is there no more is to be looked for, and what wasn't asked for counts no more than
    /// this.
    Learn {
        /// What the driver has, in bytes.
        driver_bytes: u64,
    },
    /// The driver has less than the ledger, and a call that hangs may be why.
    Less,
    /// There is more than was asked for, by a call that was another in the end or by the
    /// driver itself, and it fits the quota: it counts from now on.
    Unasked {
        /// What counts from now on, in bytes.
        driver_bytes: u64,
    },
    /// Memory was taken past the monitor, and past the quota.
    Exceeds {
        /// Who took it, most likely: its pid.
        pid: u32,
        /// How much in all, in bytes.
        excess_bytes: u64,
        /// What counts from now on, in bytes.
        driver_bytes: u64,
    },
}

/// Whether the ledger stood still while the driver was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Underway {
    /// It did: no call was on the lane.
    Nothing,
    /// A call hangs there.
    Call,
}

/// Compares the figures of the container's processes on a GPU with what is `expected`.
///
/// The ledger reserves before the driver is asked, and frees after the driver was asked. So even beside a call that hangs the
/// driver has no more than [`Expected::peak_bytes`] of the time around the question, and more has gone past the monitor.
/// Less can be due to that call, and says something only where no call was on the lane.
///
/// What was made counts once, duplicates don't. What an export or a mapping keeps counts in the monitor's own figure,
/// `own_bytes`, when no name of it is left that made it, because a stake stands before it
/// ([`StakePlace`](crate::ledger::StakePlace)): all together there is no more than [`Expected::most_bytes`].
///
/// What nobody asked for is charged. Only where it doesn't fit the quota a process is killed for it: the quota is what
/// was promised, and the driver may count what it takes for its own ends.
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
    // What there is at least: the driver shows managed memory in no figure.
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

    /// With a quota that is used to the last byte.
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
        // 10 nobody asked for are known; a call that is to be undone was given 2 past the quota.
        let usage = Usage { limit_bytes: 100, used_bytes: 102 };
        let expected = Expected { charged_bytes: 92, usage, ..expected(92, 0, 102) };
        let judged = |made| judge(&[figure(1, made, 0)], 0, &expected, Underway::Nothing);
        assert_eq!(judged(102), Finding::Fine);
        assert!(matches!(judged(103), Finding::Exceeds { driver_bytes: 103, .. }));
    }

    #[test]
    fn what_counts_already_is_not_forgotten_while_it_shows() {
        // 30 were exported, whose makers' names are gone, and 10 nobody asked for count already, and as
        // many have gone unseen by other names.
        let usage = Usage { limit_bytes: 100, used_bytes: 80 };
        let expected = Expected { charged_bytes: 70, usage, ..expected(70, 0, 80) };
        let judged = |made, own| judge(&[figure(1, made, 0)], own, &expected, Underway::Nothing);
        assert_eq!(judged(50, 30), Finding::Fine);
        // They are no more.
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
        // 40 were exported, and their maker's name is gone; 30 whose names are gone unseen, too.
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
        // The rest shows nowhere: each object is asked for.
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
