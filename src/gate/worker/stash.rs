//! Outcomes that nobody took: of calls whose caller was interrupted meanwhile.
//!
//! The kernel makes such a call again, or tells the program, which mostly makes it again.
//! If the same thread then asks the same, it's given what was done; if it asks for
//! something else, dies or waits too long, what was made is freed. A duplicate that is
//! kept here keeps a client alive, so there are few, and not for long.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::device::Device;
use super::listener::Reply;
use super::serve::Made;
use crate::process::ProcessId;

/// Outcomes that are kept.
const MOST: usize = 32;

/// How long.
const KEPT: Duration = Duration::from_secs(1);

/// What was done for a caller that didn't wait.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) thread: ProcessId,
    /// Request and argument.
    pub(super) asked: (u64, u64),
    /// What was asked, as it was read.
    pub(super) input: Vec<u8>,
    /// The same with what was done: that may have been written already, and be asked again.
    pub(super) after: Vec<u8>,
    /// What is to be written, and where.
    pub(super) output: Vec<(u64, Vec<u8>)>,
    pub(super) reply: Reply,
    /// The file that it was made through.
    pub(super) device: Option<Device>,
    /// What was made, to be freed.
    pub(super) made: Vec<Made>,
    /// The slot and the notification by which the next worker would find what was made, and
    /// free it. To be forgotten before anything becomes of it: then it can at worst be left
    /// over, and counts.
    pub(super) mark: (usize, u64),
    pub(super) since: Instant,
}

/// A call that a worker before may have made, for a caller that didn't wait, and that can't be
/// undone: a free, or an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Doubtful {
    pub(super) thread: ProcessId,
    /// Request and argument.
    pub(super) asked: (u64, u64),
    /// What its slot says: the object, and whether it was there before.
    pub(super) object: (u32, u32),
    pub(super) was_there: bool,
}

/// The outcomes.
#[derive(Debug, Default)]
pub(super) struct Stash {
    count: AtomicUsize,
    all: Mutex<VecDeque<Outcome>>,
    doubtful: Mutex<VecDeque<Doubtful>>,
}

/// What there is for a call.
#[derive(Debug)]
pub(super) enum Found {
    Nothing,
    /// It was made already.
    Same(Outcome),
    /// The thread made another call in its place; this is to be undone.
    Other(Outcome),
}

impl Stash {
    /// Keeps an outcome; the one that has to make room is to be undone.
    pub(super) fn keep(&self, outcome: Outcome) -> Option<Outcome> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.push_back(outcome);
        let oldest = if all.len() > MOST { all.pop_front() } else { None };
        self.count.store(all.len(), Ordering::Release);
        oldest
    }

    /// Takes what there is for a call of `thread`.
    pub(super) fn take(&self, thread: ProcessId, asked: (u64, u64), input: &[u8]) -> Found {
        if self.count.load(Ordering::Acquire) == 0 {
            return Found::Nothing;
        }
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = all.iter().position(|outcome| outcome.thread == thread) else {
            return Found::Nothing;
        };
        let Some(outcome) = all.remove(at) else { return Found::Nothing };
        self.count.store(all.len(), Ordering::Release);
        let read = outcome.input == input || outcome.after == input;
        let same = outcome.asked == asked && read;
        if same { Found::Same(outcome) } else { Found::Other(outcome) }
    }

    /// Remembers a call that may have been made.
    pub(super) fn doubt(&self, call: Doubtful) {
        let mut all = self.doubtful.lock().unwrap_or_else(PoisonError::into_inner);
        all.push_back(call);
        if all.len() > MOST {
            all.pop_front();
        }
    }

    /// Whether a call that `thread` makes is one that may have been made; if it asks for something
    /// else, no later one is.
    pub(super) fn doubted(&self, thread: ProcessId, asked: (u64, u64)) -> Option<Doubtful> {
        let mut all = self.doubtful.lock().unwrap_or_else(PoisonError::into_inner);
        let at = all.iter().position(|call| call.thread == thread)?;
        all.remove(at).filter(|call| call.asked == asked)
    }

    /// Takes one that was kept long enough, or whose thread is gone.
    pub(super) fn expired(
        &self,
        now: Instant,
        lives: impl Fn(ProcessId) -> bool,
    ) -> Option<Outcome> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let over = |outcome: &Outcome| {
            now.saturating_duration_since(outcome.since) > KEPT || !lives(outcome.thread)
        };
        let at = all.iter().position(over)?;
        let outcome = all.remove(at);
        self.count.store(all.len(), Ordering::Release);
        outcome
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(pid: i32) -> ProcessId {
        ProcessId { pid, start_ticks: 5 }
    }

    fn outcome(tid: i32) -> Outcome {
        Outcome {
            thread: thread(tid),
            asked: (1, 2),
            input: vec![3],
            after: vec![9],
            output: vec![],
            reply: Reply::Done,
            device: None,
            made: vec![],
            mark: (0, 1),
            since: Instant::now(),
        }
    }

    #[test]
    fn the_same_call_of_the_same_thread_finds_what_was_done_once() {
        let stash = Stash::default();
        assert!(stash.keep(outcome(7)).is_none());
        let stranger = ProcessId { start_ticks: 6, ..thread(7) };
        for other in [thread(8), stranger] {
            assert!(matches!(stash.take(other, (1, 2), &[3]), Found::Nothing));
        }
        assert!(matches!(stash.take(thread(7), (1, 2), &[3]), Found::Same(_)));
        assert!(matches!(stash.take(thread(7), (1, 2), &[3]), Found::Nothing));
        assert!(stash.keep(outcome(7)).is_none());
        assert!(matches!(stash.take(thread(7), (1, 2), &[9]), Found::Same(_)), "half answered");
        for (asked, input) in [((1, 9), [3]), ((1, 2), [4])] {
            assert!(stash.keep(outcome(7)).is_none());
            assert!(matches!(stash.take(thread(7), asked, &input), Found::Other(_)));
        }
    }

    #[test]
    fn it_stays_small_and_forgets() {
        let stash = Stash::default();
        for tid in 0..i32::try_from(MOST).unwrap() {
            assert!(stash.keep(outcome(tid)).is_none());
        }
        assert_eq!(stash.keep(outcome(99)).map(|outcome| outcome.thread), Some(thread(0)));
        let gone = stash.expired(Instant::now(), |of| of != thread(5));
        assert_eq!(gone.map(|gone| gone.thread), Some(thread(5)));
        let later = Instant::now() + KEPT * 2;
        let mut left = 0;
        while stash.expired(later, |_| true).is_some() {
            left += 1;
        }
        assert_eq!((left, stash.is_empty()), (MOST - 1, true));
    }

    #[test]
    fn a_call_that_may_have_been_made_is_known_once_and_only_if_nothing_else_was_asked() {
        let stash = Stash::default();
        let call =
            |pid| Doubtful { thread: thread(pid), asked: (1, 2), object: (3, 4), was_there: true };
        stash.doubt(call(1));
        stash.doubt(call(2));
        assert_eq!(stash.doubted(thread(3), (1, 2)), None);
        assert_eq!(stash.doubted(thread(1), (1, 2)), Some(call(1)));
        assert_eq!(stash.doubted(thread(1), (1, 2)), None);
        assert_eq!(stash.doubted(thread(2), (1, 3)), None);
        assert_eq!(stash.doubted(thread(2), (1, 2)), None);
    }
}
