//! Names of memory, as the driver shows them and as the books have them: when they are counted and
//! asked for, and for how long there may be more than are known.
//!
//! Knows no verdicts: what the numbers mean is judged in [`crate::monitor::audit::judge`].

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::monitor::audit::holdings::DOUBT;
use crate::monitor::lock::Lock;

/// Objects that are asked for one by one.
pub(crate) const MOST_ASKED: usize = 2048;

/// How often they are asked for.
const OFTEN: Duration = Duration::from_millis(400);

/// How long there may be more than are known.
pub(crate) const NAMES_DOUBT: Duration = Duration::from_millis(60);

/// What was seen of names.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// None show but their makers', so that none are to be counted.
    are_hidden: AtomicBool,
    /// And figures alone don't tell all.
    are_needed: AtomicBool,
    /// When they were asked for.
    last: Lock<Option<Instant>>,
    /// How many of a GPU's were, or of all those that have company.
    asked: Lock<BTreeMap<Option<usize>, usize>>,
    /// GPUs that show more than are known: since when, and when that was seen last.
    doubts: Lock<BTreeMap<usize, (Instant, Instant)>>,
}

impl Names {
    /// Whether they are to be counted.
    pub(crate) fn show(&self) -> bool {
        !self.are_hidden.load(Ordering::Relaxed)
    }

    /// Whether any show that aren't their makers', and whether they are needed.
    pub(crate) fn note(&self, show: bool, are_needed: bool) {
        self.are_hidden.store(!show, Ordering::Relaxed);
        self.are_needed.store(show && are_needed, Ordering::Relaxed);
    }

    /// There aren't more than are known.
    pub(crate) fn dispel(&self, gpu: usize) {
        self.doubts.lock().remove(&gpu);
    }

    /// Takes note of a look that showed more than are known: whether that has been so for too long.
    pub(crate) fn note_more(&self, gpu: usize) -> bool {
        let now = Instant::now();
        let mut doubts = self.doubts.lock();
        let (first, last) = doubts.entry(gpu).or_insert((now, now));
        // Of two looks, and not of one now and one of another day.
        if last.elapsed() > DOUBT {
            *first = now;
        }
        *last = now;
        first.elapsed() > NAMES_DOUBT
    }

    /// Whether they are to be asked for now: also where as many show as are known, of which some may
    /// have gone just when others came.
    pub(crate) fn take_due(&self) -> bool {
        if !self.are_needed.load(Ordering::Relaxed) {
            return false;
        }
        let mut last = self.last.lock();
        let due = last.is_none_or(|last| last.elapsed() > OFTEN);
        if due {
            *last = Some(Instant::now());
        }
        due
    }

    /// Puts first those of `all` whose turn it is, of that GPU's or of those that have company: of
    /// many no more than the first are asked for.
    pub(crate) fn in_turn<T>(&self, of: Option<usize>, mut all: Vec<T>) -> Vec<T> {
        if all.len() > MOST_ASKED {
            let mut asked = self.asked.lock();
            let asked = asked.entry(of).or_default();
            let first = *asked % all.len();
            all.rotate_left(first);
            *asked = first + MOST_ASKED;
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_each_has_its_turn() {
        let names = Names::default();
        let all: Vec<usize> = (0..2 * MOST_ASKED + 1).collect();
        let first = |of, all: Vec<usize>| names.in_turn(of, all).into_iter().take(MOST_ASKED);
        let mut seen = [const { Vec::new() }; 3];
        // Each list by itself, however they take turns.
        for _ in 0..3 {
            for (of, seen) in [None, Some(0), Some(1)].into_iter().zip(&mut seen) {
                seen.extend(first(of, all.clone()));
            }
        }
        for mut seen in seen {
            assert_eq!(seen.len(), 3 * MOST_ASKED);
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen, all);
        }
        assert_eq!(names.in_turn(None, vec![1, 2]), [1, 2]);
    }

    #[test]
    fn they_are_asked_for_while_they_are_needed_and_not_all_the_time() {
        let names = Names::default();
        for (show, are_needed) in [(false, true), (true, false)] {
            names.note(show, are_needed);
            assert!(!names.take_due());
        }
        names.note(true, true);
        assert!(names.take_due() && !names.take_due());
    }

    #[test]
    fn more_than_are_known_must_last() {
        let names = Names::default();
        assert!(!names.note_more(0));
        std::thread::sleep(NAMES_DOUBT + Duration::from_millis(1));
        assert!(names.note_more(0));
        assert!(!names.note_more(1), "another GPU");
        assert!(names.note_more(0), "there still are");
        names.dispel(0);
        assert!(!names.note_more(0), "there weren't meanwhile");
    }
}
