//! How many lines of the log a container may cause.

use std::collections::BTreeSet;
use std::time::Instant;

use crate::events::Bucket;
use crate::monitor::lock::Lock;

/// How many lines may be written at once, and the time in microseconds until one more may be.
const LINES: (u32, u64) = (20, 1_000_000);

/// The most topics that are remembered.
const MOST_TOLD: usize = 256;

/// What is logged once, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Topic {
    Control(u32),
    Class(u32),
    Uvm(u32),
    /// No thread can be started.
    NoThread,
}

/// Counts the lines that a container causes.
#[derive(Debug)]
pub(crate) struct LogLimit {
    began: Instant,
    lines: Lock<Bucket>,
    told: Lock<BTreeSet<Topic>>,
}

impl LogLimit {
    pub(crate) fn new() -> Self {
        let lines = Lock::new(Bucket::new(LINES.0, LINES.1));
        LogLimit { began: Instant::now(), lines, told: Lock::default() }
    }

    /// Takes a line for `topic`: `true` where the line may be written, which is once for each topic. Topics beyond
    /// [`MOST_TOLD`] get no line.
    pub(crate) fn take_first_line(&self, topic: Topic) -> bool {
        let mut told = self.told.lock();
        let is_new = told.len() < MOST_TOLD && !told.contains(&topic);
        is_new && self.take_line() && told.insert(topic)
    }

    /// Takes a line: `true` where it may be written.
    pub(crate) fn take_line(&self) -> bool {
        let now_us = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.lines.lock().take(now_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_off() {
        let limit = LogLimit::new();
        let lines = (0..1000).filter(|_| limit.take_line()).count();
        assert!((20..=21).contains(&lines), "{lines}");
    }

    #[test]
    fn what_is_new_is_told_once_and_a_flood_of_it_is_cut_off() {
        let limit = LogLimit::new();
        assert!(
            limit.take_first_line(Topic::Control(7)) && !limit.take_first_line(Topic::Control(7))
        );
        assert!(limit.take_first_line(Topic::Class(7)));
        let told =
            (8..1000).filter(|number| limit.take_first_line(Topic::Control(*number))).count();
        assert!((18..=19).contains(&told), "{told}");
        // A topic that got no line in a flood gets its line later.
        *limit.lines.lock() = Bucket::new(LINES.0, LINES.1);
        assert!(limit.take_first_line(Topic::Control(999)));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let limit = LogLimit::new();
        for number in 0..1000 {
            *limit.lines.lock() = Bucket::new(LINES.0, LINES.1);
            let told = limit.take_first_line(Topic::Class(number));
            assert_eq!(told, usize::try_from(number).unwrap() < MOST_TOLD, "{number}");
        }
    }
}
