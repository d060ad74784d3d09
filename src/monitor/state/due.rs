//! When the driver is to be asked next. Knows no clock: whoever asks says what time it is.

use std::time::{Duration, Instant};

/// The next times: soon, and once more later.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Due([Option<Instant>; 2]);

impl Due {
    /// The first of them.
    pub(crate) fn next(self) -> Option<Instant> {
        self.0.into_iter().flatten().min()
    }

    /// Whether the driver is to be asked now; it is, then.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let mut is_due = false;
        for at in &mut self.0 {
            is_due |= at.take_if(|at| *at <= now).is_some();
        }
        is_due
    }

    /// The driver is to be asked soon, and once more later.
    pub(crate) fn schedule(&mut self, now: Instant) -> bool {
        let [soon, later] = self.0;
        let first = soon.is_none();
        self.0 = [
            soon.or(Some(now + Duration::from_millis(5))),
            later.max(Some(now + Duration::from_millis(200))),
        ];
        first
    }

    /// The driver is to be asked by then.
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
