//! What the driver's own figures mean: whether something went round the monitor, and who
//! is to be killed for it.
//!
//! Pure: figures in, a [`Finding`] out. The figures and what the ledger expects
//! are not of the same instant; see [`judge`] for what can be said all the same.

use crate::ledger::Expected;
use crate::monitor::state::known_names::KnownNames;
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
/// The ledger reserves before the driver is asked and frees after it was: so even beside a call that
/// hangs the driver has no more than [`Expected::peak_bytes`] of the time around the question, and more
/// has gone round us. Less can be that call, and says something only where there was none.
///
/// What was made counts once, duplicates don't; and what an export or a mapping keeps counts in the
/// monitor's own figure, `own_bytes`, when no name of it is left that made it: there is no more in all
/// than [`Expected::most_bytes`].
///
/// But a worker before may have left memory whose owner is an export's or a mapping's object. All
/// others show it as duplicated, so the sum of both is the most there can be; and so it makes room
/// for as much among what was made. Then names are compared with names: each that the driver shows
/// somebody asked us for.
///
/// What nobody asked us for is charged. Only where it doesn't fit the quota somebody is
/// killed for it: the quota is what was promised, and the driver may count what it takes
/// for its own ends.
#[must_use]
pub(crate) fn judge(
    figures: &[Figure],
    own_bytes: u64,
    expected: &Expected,
    named: Option<KnownNames>,
    underway: Underway,
) -> Finding {
    let made = sum(figures.iter().map(|figure| figure.held.made_bytes));
    let most = sum(figures.iter().map(|figure| figure.held.bytes()));
    let (hidden, used) = (expected.hidden_bytes, expected.usage.used_bytes);
    let over_peak = made.saturating_sub(expected.peak_bytes);
    let over_most = made.saturating_add(own_bytes).saturating_sub(expected.most_bytes);
    let bytes = over_peak.max(over_most);
    // What there is at least.
    let owned = match (over_peak, over_most) {
        (0, 0) => made.saturating_add(own_bytes),
        (_, 0) => made.saturating_add(hidden),
        _ => made.saturating_add(hidden).max(expected.charged_bytes.saturating_add(over_most)),
    };
    // Or it counts already.
    let by_made = (bytes > 0 && owned > used)
        .then(|| More { bytes, driver_bytes: owned }.of(figures, |held| held.made_bytes, expected));
    let are_more = |named: &KnownNames| named.are_needed && most > named.known_bytes;
    let by_names = named.filter(are_more).and_then(|named| {
        let bytes = most - named.known_bytes;
        let driver_bytes = expected.charged_bytes.saturating_add(bytes);
        (driver_bytes > used)
            .then(|| More { bytes, driver_bytes }.of(figures, Held::bytes, expected))
    });
    match (by_made, by_names) {
        (Some(exceeds @ Finding::Exceeds { .. }), _) => return exceeds,
        (
            Some(Finding::Unasked { driver_bytes: a }),
            Some(Finding::Unasked { driver_bytes: b }),
        ) => {
            return Finding::Unasked { driver_bytes: a.max(b) };
        }
        (Some(unasked), None) => return unasked,
        (_, Some(finding)) => return finding,
        (None, None) => {}
    }
    // All that shows is known: what wasn't asked for once is no more.
    let is_all = |named: KnownNames| named.known_bytes == most;
    let charged = expected.charged_bytes.max(owned);
    let learnt = charged.saturating_add(expected.pending_bytes) < used;
    if learnt && underway == Underway::Nothing && named.is_some_and(is_all) {
        return Finding::Learn { driver_bytes: charged };
    }
    let driver_bytes = most.saturating_add(hidden).max(owned);
    let with_pending = driver_bytes.saturating_add(expected.pending_bytes);
    match underway {
        _ if with_pending >= used => Finding::Fine,
        Underway::Call => Finding::Less,
        Underway::Nothing => Finding::Learn { driver_bytes },
    }
}

/// So many bytes are in use that nobody asked for, of so many.
struct More {
    bytes: u64,
    driver_bytes: u64,
}

impl More {
    /// What that means, where a process `has` so much.
    fn of(self, figures: &[Figure], has: impl Fn(&Held) -> u64, expected: &Expected) -> Finding {
        let More { bytes: excess_bytes, driver_bytes } = self;
        if driver_bytes <= expected.usage.limit_bytes {
            return Finding::Unasked { driver_bytes };
        }
        let excess = |figure: &&Figure| has(&figure.held).saturating_sub(figure.charged_bytes);
        let worst = figures.iter().max_by_key(excess);
        worst.map_or(Finding::Fine, |worst| {
            let pid = worst.held.pid;
            Finding::Exceeds { pid, excess_bytes, driver_bytes }
        })
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
        let finding = judge(&figures, 0, &expected(100, 5, 105), None, Underway::Call);
        let wanted = Finding::Exceeds { pid: 2, excess_bytes: 40, driver_bytes: 145 };
        assert_eq!(finding, wanted);
    }

    #[test]
    fn what_nobody_asked_for_is_charged_where_it_fits_the_quota() {
        let usage = Usage { limit_bytes: 145, used_bytes: 105 };
        let mut expected = Expected { usage, ..expected(100, 5, 105) };
        let figures = [figure(1, 90, 90), figure(2, 50, 10)];
        for underway in [Underway::Call, Underway::Nothing] {
            let finding = judge(&figures, 0, &expected, None, underway);
            assert_eq!(finding, Finding::Unasked { driver_bytes: 145 });
        }
        expected.usage.limit_bytes = 144;
        let finding = judge(&figures, 0, &expected, None, Underway::Nothing);
        assert!(matches!(finding, Finding::Exceeds { pid: 2, .. }), "{finding:?}");
    }

    #[test]
    fn what_counts_already_is_taken_by_nobody() {
        // 10 nobody asked for are known; a call that is to be undone was given 2 past the quota.
        let usage = Usage { limit_bytes: 100, used_bytes: 102 };
        let expected = Expected { charged_bytes: 92, usage, ..expected(92, 0, 102) };
        let judged = |made| judge(&[figure(1, made, 0)], 0, &expected, None, Underway::Nothing);
        assert_eq!(judged(102), Finding::Fine);
        assert!(matches!(judged(103), Finding::Exceeds { driver_bytes: 103, .. }));
    }

    #[test]
    fn what_counts_already_is_not_forgotten_while_it_shows() {
        // 30 were exported, whose makers' names are gone, and 10 nobody asked for count already, and as
        // many have gone unseen by other names.
        let usage = Usage { limit_bytes: 100, used_bytes: 80 };
        let expected = Expected { charged_bytes: 70, usage, ..expected(70, 0, 80) };
        let named = Some(KnownNames { known_bytes: 50, are_needed: false });
        let judged =
            |made, own| judge(&[figure(1, made, 0)], own, &expected, named, Underway::Nothing);
        assert_eq!(judged(50, 30), Finding::Fine);
        // They are no more.
        assert_eq!(judged(50, 20), Finding::Learn { driver_bytes: 70 });
        assert_eq!(judged(40, 35), Finding::Learn { driver_bytes: 75 }, "rather too much");
    }

    #[test]
    fn less_is_learnt_only_where_nothing_was_underway() {
        let figures = [figure(1, 40, 90)];
        let expected = expected(90, 10, 100);
        assert_eq!(judge(&figures, 0, &expected, None, Underway::Call), Finding::Less);
        let learnt = Finding::Learn { driver_bytes: 50 };
        assert_eq!(judge(&figures, 0, &expected, None, Underway::Nothing), learnt);
    }

    #[test]
    fn what_hangs_may_yet_be_given_and_is_no_less() {
        let figures = [figure(1, 40, 90)];
        let expected = |pending_bytes| Expected { pending_bytes, ..expected(90, 10, 100) };
        let learnt = Finding::Learn { driver_bytes: 50 };
        assert_eq!(judge(&figures, 0, &expected(49), None, Underway::Nothing), learnt);
        assert_eq!(judge(&figures, 0, &expected(50), None, Underway::Nothing), Finding::Fine);
    }

    #[test]
    fn hidden_memory_is_no_excuse_for_more_in_sight() {
        let finding = judge(&[figure(1, 60, 0)], 0, &expected(0, 60, 60), None, Underway::Nothing);
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
        let named = Some(KnownNames { known_bytes: 100, are_needed: false });
        let judged = |own, taken| judge(&figures(taken), own, &expected, named, Underway::Nothing);
        let exceeds = Finding::Exceeds { pid: 2, excess_bytes: 30, driver_bytes: 100 };
        assert_eq!(judged(40, 60), exceeds);
        assert_eq!(judged(40, 30), Finding::Fine);
        assert_eq!(judged(0, 60), Finding::Fine, "nobody owns the rest");
    }

    #[test]
    fn memory_by_two_names_makes_no_room_for_what_nobody_asked_for() {
        // 40 were made, whose maker's name is gone: two duplicates show them. 30 more were taken.
        let duplicate = Held { pid: 1, made_bytes: 0, duplicated_bytes: 80 };
        let figures = [
            Figure { held: duplicate, charged_bytes: 80 },
            Figure { held: Held { pid: 2, made_bytes: 30, duplicated_bytes: 0 }, charged_bytes: 0 },
        ];
        let mut expected = expected(40, 0, 40);
        let named = |known_bytes| Some(KnownNames { known_bytes, are_needed: true });
        let judged =
            |expected: &Expected, named| judge(&figures, 0, expected, named, Underway::Nothing);
        let exceeds = Finding::Exceeds { pid: 2, excess_bytes: 30, driver_bytes: 70 };
        assert_eq!(judged(&expected, named(80)), exceeds);
        let needless = named(80).map(|named| KnownNames { are_needed: false, ..named });
        assert_eq!(judged(&expected, needless), Finding::Fine, "our figure would tell");
        assert_eq!(judged(&expected, named(110)), Finding::Fine);
        assert_eq!(judged(&expected, None), Finding::Fine);
        expected.usage.limit_bytes = 70;
        let unasked = Finding::Unasked { driver_bytes: 70 };
        assert_eq!(judged(&expected, named(80)), unasked);
        expected.usage.used_bytes = 70;
        assert_eq!(judged(&expected, named(80)), Finding::Fine, "it counts already");
        // Once all that shows is known it counts no more.
        let learnt = Finding::Learn { driver_bytes: 40 };
        assert_eq!(judged(&expected, named(110)), learnt);
        assert_eq!(judged(&expected, named(111)), Finding::Fine);
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
                let finding = judge(&figures, 0, &expected(peak, hidden, peak + hidden), None, underway);
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
            let finding = judge(&figures, 0, &expected(sum - short, 0, 0), None, Underway::Call);
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
