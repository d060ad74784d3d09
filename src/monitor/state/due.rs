//! When the driver is to be asked next. This file knows no clock: the caller gives the time.

use std::time::{Duration, Instant};

/// The next two times: one soon, and one later.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Due([Option<Instant>; 2]);

impl Due {
    /// The earlier of the two times.
    pub(crate) fn next(self) -> Option<Instant> {
        self.0.into_iter().flatten().min()
    }

    /// Whether the driver is to be asked at `now`. Forgets the times that have come.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let mut is_due = false;
        for at in &mut self.0 {
            is_due |= at.take_if(|at| *at <= now).is_some();
        }
        is_due
    }

    /// Schedules a question 5 ms from now, unless one is scheduled, and one 200 ms from now. Returns whether the first
    /// one is new.
    pub(crate) fn schedule(&mut self, now: Instant) -> bool {
        let [soon, later] = self.0;
        let first = soon.is_none();
        self.0 = [
            soon.or(Some(now + Duration::from_millis(5))),
            later.max(Some(now + Duration::from_millis(200))),
        ];
        first
    }

    /// Schedules a question at `at` or earlier.
    pub(crate) fn schedule_by(&mut self, at: Instant) {
        let [soon, _] = &mut self.0;
        *soon = Some(soon.map_or(at, |soon| soon.min(at)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_due_is_due_once_and_once_more_later() {
        let (mut due, now) = (Due::default(), Instant::now());
        assert!(due.next().is_none() && !due.take(now));
        assert!(due.schedule(now) && !due.schedule(now), "the first one tells it");
        let soon = due.next().unwrap();
        assert!(soon > now && !due.take(now));
        assert!(due.take(soon) && !due.take(soon));
        let later = due.next().unwrap();
        assert!(later > soon);
        due.schedule_by(soon);
        assert_eq!(due.next(), Some(soon));
        due.schedule_by(later);
        assert_eq!(due.next(), Some(soon), "never later than it was");
        assert!(due.take(later) && due.next().is_none());
    }
}
