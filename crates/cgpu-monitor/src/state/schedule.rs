//! When the container is audited: whether it is idle, how often it is audited then, when the driver is to be asked
//! next, and for which reason. This file knows no clock: the caller gives the time.

use std::time::{Duration, Instant};

/// A container that has called nothing for this long is idle.
const IDLE_AFTER: Duration = Duration::from_secs(5);

/// How often a container is audited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AuditInterval {
    /// How often the driver is asked what the container's processes have, and what is in use.
    pub(crate) interval: Duration,
    /// How often all processes of the host are checked although no driver usage has changed: one process may have taken
    /// what another gave back.
    pub(crate) scan_interval: Duration,
}

/// The interval while the container calls.
const BUSY: AuditInterval = audit_interval_ms(250, 600);

/// The pace while the container is idle: a call would be noticed, so only processes that the monitor doesn't know could
/// have taken memory.
const IDLE: AuditInterval = audit_interval_ms(2_000, 60_000);

/// The pace while no process of the container has ever called: a process outside could have a descriptor that was never
/// used.
const UNCALLED: AuditInterval = audit_interval_ms(30_000, 300_000);

const fn audit_interval_ms(interval: u64, scan_interval: u64) -> AuditInterval {
    AuditInterval {
        interval: Duration::from_millis(interval),
        scan_interval: Duration::from_millis(scan_interval),
    }
}

/// The number of calls of a container, and since when it has not changed.
#[derive(Debug)]
pub(crate) struct Idleness {
    calls: u64,
    since: Instant,
}

impl Idleness {
    /// Begins with the number of calls until now.
    pub(crate) fn new(calls: u64, now: Instant) -> Self {
        Idleness { calls, since: now }
    }

    /// Takes the number of calls until `now`.
    pub(crate) fn note(&mut self, calls: u64, now: Instant) {
        if calls != self.calls {
            *self = Idleness { calls, since: now };
        }
    }

    pub(crate) fn is_idle(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= IDLE_AFTER
    }

    /// How often the container is audited; `has_called`: whether any of its processes has ever called.
    pub(crate) fn audit_interval(&self, has_called: bool, now: Instant) -> AuditInterval {
        match has_called {
            false => UNCALLED,
            true if self.is_idle(now) => IDLE,
            true => BUSY,
        }
    }
}

/// The next two times: one soon, and one later.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Schedule([Option<Instant>; 2]);

impl Schedule {
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

/// The reason for an audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// No process died and no call waits: it is time for the regular audit, or an audit was scheduled.
    Tick,
    Death,
    /// A call is about to be refused: releasing what no longer exists would free quota.
    Refusal,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_ends_idleness() {
        let start = Instant::now();
        let mut idleness = Idleness::new(7, start);
        assert!(!idleness.is_idle(start));
        idleness.note(7, start + IDLE_AFTER);
        assert!(idleness.is_idle(start + IDLE_AFTER));
        idleness.note(8, start + IDLE_AFTER);
        assert!(!idleness.is_idle(start + IDLE_AFTER));
        assert!(!idleness.is_idle(start), "a clock that goes back");
        assert!(idleness.is_idle(start + 2 * IDLE_AFTER));
    }

    #[test]
    fn an_idle_container_is_audited_less_often() {
        let start = Instant::now();
        let idleness = Idleness::new(0, start);
        let after =
            |after: Duration| [true, false].map(|has| idleness.audit_interval(has, start + after));
        assert_eq!(after(Duration::ZERO), [BUSY, UNCALLED]);
        assert_eq!(after(IDLE_AFTER), [IDLE, UNCALLED]);
    }

    #[test]
    fn scheduled_check_is_due_once_and_again_later() {
        let (mut due, now) = (Schedule::default(), Instant::now());
        assert!(due.next().is_none() && !due.take(now));
        assert!(due.schedule(now) && !due.schedule(now), "only the first one reports it");
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
