//! When the keeper may start a worker: after each failed start, and after each worker that crashed soon, it waits longer.

use std::time::{Duration, Instant};

use crate::monitor::worker::Former;

/// How long the keeper waits after a failed start: the first pause doubles with each failure, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// After this many failed starts, the program that the keeper itself was started from is tried: an upgrade may have
/// installed a program that can't run.
const STARTS_BEFORE_FALLBACK: u32 = 3;

/// How long the first worker's start is delayed while nobody needs it: the container is being made meanwhile, and
/// there may be few processors for both.
const FIRST_START_DELAY: Duration = Duration::from_millis(50);

/// A worker that crashes within this time after it has begun counts as a failed start: a call that crashes each worker
/// would otherwise keep a processor busy.
const SOON: Duration = Duration::from_secs(1);

/// When a worker may be started.
#[derive(Debug)]
pub(crate) struct WorkerStarts {
    /// Failed starts in a row.
    failed: u32,
    not_before: Option<Instant>,
    /// When the present worker has begun.
    begun: Option<Instant>,
}

impl WorkerStarts {
    /// No worker was started yet.
    pub(crate) fn new(now: Instant) -> Self {
        WorkerStarts { failed: 0, not_before: Some(now + FIRST_START_DELAY), begun: None }
    }

    /// Whether a worker may be started now.
    pub(crate) fn are_due(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|then| now >= then)
    }

    /// Whether the program that is installed is to be started, and not the one that the keeper was started from.
    pub(crate) fn uses_installed(&self) -> bool {
        self.failed < STARTS_BEFORE_FALLBACK
    }

    /// Lets the first worker start without the delay: something needs it.
    pub(crate) fn end_first_delay(&mut self) {
        if self.failed == 0 {
            self.not_before = None;
        }
    }

    /// Notes a worker that couldn't be started, or couldn't begin.
    pub(crate) fn note_failed(&mut self, now: Instant) {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failed.min(10)).min(LONGEST_PAUSE);
        self.failed = self.failed.saturating_add(1);
        self.not_before = Some(now + pause);
    }

    /// Notes that a worker has begun.
    pub(crate) fn note_begun(&mut self, now: Instant) {
        (self.not_before, self.begun) = (None, Some(now));
    }

    /// Notes that a worker that had begun has ended, as `former` says, without an order to.
    pub(crate) fn note_ended(&mut self, now: Instant, former: Former) {
        let began = self.begun.take();
        if former == Former::Crashed && began.is_some_and(|began| now < began + SOON) {
            return self.note_failed(now);
        }
        self.failed = 0;
    }

    /// Has the installed program tried again, because another may be installed now.
    pub(crate) fn forget_failures(&mut self) {
        self.failed = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_start_is_delayed_until_somebody_needs_the_worker() {
        let now = Instant::now();
        let mut starts = WorkerStarts::new(now);
        assert!(!starts.are_due(now) && starts.are_due(now + FIRST_START_DELAY));
        starts.end_first_delay();
        assert!(starts.are_due(now));
    }

    #[test]
    fn each_failed_start_is_followed_by_a_longer_pause_up_to_the_longest() {
        let now = Instant::now();
        let mut starts = WorkerStarts::new(now);
        let mut last = Duration::ZERO;
        for failure in 0..20 {
            starts.note_failed(now);
            // Nobody's need shortens it.
            starts.end_first_delay();
            let pause = (FIRST_PAUSE * 2_u32.pow(failure.min(10))).min(LONGEST_PAUSE);
            assert!(pause > last || pause == LONGEST_PAUSE);
            let almost = now + pause - Duration::from_nanos(1);
            assert!(!starts.are_due(almost) && starts.are_due(now + pause), "{failure}");
            last = pause;
        }
        starts.note_begun(now);
        assert!(starts.are_due(now));
        starts.note_ended(now + SOON, Former::Crashed);
        assert!(starts.are_due(now + SOON) && starts.uses_installed());
    }

    #[test]
    fn workers_that_crash_soon_are_started_ever_later() {
        let mut now = Instant::now();
        let mut starts = WorkerStarts::new(now);
        let mut pauses = Vec::new();
        for _ in 0..9 {
            starts.note_begun(now);
            starts.note_ended(now, Former::Crashed);
            let ended = now;
            while !starts.are_due(now) {
                now += Duration::from_millis(1);
            }
            pauses.push((now - ended).as_millis());
        }
        assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 640, 1280, 2000]);
        // Whoever kills workers says nothing of the next one.
        starts.note_begun(now);
        starts.note_ended(now, Former::Ended);
        assert!(starts.are_due(now));
    }

    #[test]
    fn a_program_that_cannot_run_is_given_up_until_another_may_be_installed() {
        let now = Instant::now();
        let mut starts = WorkerStarts::new(now);
        let tried: Vec<bool> = (0..5)
            .map(|_| {
                let installed = starts.uses_installed();
                starts.note_failed(now);
                installed
            })
            .collect();
        assert_eq!(tried, [true, true, true, false, false]);
        starts.forget_failures();
        assert!(starts.uses_installed());
    }
}
