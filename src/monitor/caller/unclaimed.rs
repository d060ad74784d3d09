//! Calls that were made and whose answer nobody took: the caller was interrupted meanwhile.
//!
//! The kernel makes such a call again, or tells the program, which mostly makes it again.
//! If the same thread then asks the same, it's given what was done; if it asks for
//! something else, dies or waits too long, what was made is freed. A duplicate that is
//! kept here keeps a client alive, so there are few, and not for long.
//!
//! The next worker finds their traces in the memory that outlives this one. What came of them it
//! doesn't know: it makes them again, or undoes what they may have made.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::monitor::caller::call_id::{Print, Trace};
use crate::monitor::caller::listener::Reply;
use crate::monitor::driver::device::Device;
use crate::monitor::state::journal::SHELF_PLACES;
use crate::monitor::state::journal_map::JournalMap;
use crate::process::ProcessId;
use crate::rm::call::Object;

/// Calls that are kept.
const MOST: usize = 32;

/// How long, where something was made.
const KEPT: Duration = Duration::from_secs(1);

/// What was done for a caller that didn't wait.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// What is to be written, and where.
    pub(crate) output: Vec<(u64, Vec<u8>)>,
    pub(crate) reply: Reply,
    /// Whether the driver said so.
    pub(crate) is_ok: bool,
    /// The file that it was made through.
    pub(crate) device: Option<Device>,
    /// What was made, to be freed.
    pub(crate) made: Vec<Object>,
}

/// A call that nobody took the answer of.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) trace: Trace,
    /// `None` where a worker before had made it, or not.
    pub(crate) outcome: Option<Outcome>,
    /// Its place in the memory that outlives us, where there was one.
    place: Option<usize>,
    since: Instant,
}

impl Kept {
    fn is_to_be_undone(&self) -> bool {
        let made = self.outcome.as_ref().map(|outcome| !outcome.made.is_empty());
        made.unwrap_or_else(|| self.trace.may_have_made())
    }
}

/// The calls.
#[derive(Debug)]
pub(crate) struct Unclaimed {
    memory: &'static JournalMap,
    count: AtomicUsize,
    all: Mutex<All>,
}

#[derive(Debug)]
struct All {
    kept: VecDeque<Kept>,
    /// Whether a place is taken: also of what was taken out and isn't settled.
    taken: [bool; SHELF_PLACES],
}

/// What there is for a call.
#[derive(Debug)]
pub(crate) enum Match {
    Nothing,
    /// It was made already, or may have been.
    Same(Kept),
    /// The thread made another call in its place; this is to be undone.
    Other(Kept),
}

impl Unclaimed {
    /// What the worker before had.
    pub(crate) fn open(memory: &'static JournalMap) -> Self {
        let mut all = All { kept: VecDeque::new(), taken: [false; SHELF_PLACES] };
        for (place, trace) in memory.traces() {
            if let Some(taken) = all.taken.get_mut(place) {
                *taken = true;
            }
            let since = Instant::now();
            all.kept.push_back(Kept { trace, outcome: None, place: Some(place), since });
        }
        let count = AtomicUsize::new(all.kept.len());
        Unclaimed { memory, count, all: Mutex::new(all) }
    }

    fn all(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a call; the one that has to make room is to be undone.
    pub(crate) fn keep(&self, trace: Trace, outcome: Option<Outcome>) -> Option<Kept> {
        let mut all = self.all();
        let free = all.taken.iter_mut().enumerate().find(|(_, taken)| !**taken);
        let place = free.map(|(place, taken)| {
            *taken = true;
            self.memory.keep_trace(place, &trace);
            place
        });
        all.kept.push_back(Kept { trace, outcome, place, since: Instant::now() });
        let oldest = if all.kept.len() > MOST { all.kept.pop_front() } else { None };
        self.count.store(all.kept.len(), Ordering::Release);
        oldest
    }

    /// Takes what there is for a call of `thread`; to be settled when it has become of it what it
    /// is to.
    pub(crate) fn take(&self, thread: ProcessId, asked: (u64, u64), read: Print) -> Match {
        let mut all = self.all();
        let Some(at) = all.kept.iter().position(|kept| kept.trace.thread == thread) else {
            return Match::Nothing;
        };
        let Some(kept) = all.kept.remove(at) else { return Match::Nothing };
        self.count.store(all.kept.len(), Ordering::Release);
        let same = kept.trace.is_again(asked, read);
        if same { Match::Same(kept) } else { Match::Other(kept) }
    }

    /// Whether there is that call, of the same object.
    pub(crate) fn has(&self, one: &Trace) -> bool {
        let of =
            |trace: &Trace| (trace.thread, trace.asked, trace.object.client, trace.object.handle);
        self.all().kept.iter().any(|kept| of(&kept.trace) == of(one))
    }

    /// The next worker needs to know nothing more of what was taken out.
    pub(crate) fn settle(&self, kept: &Kept) {
        if let Some(place) = kept.place {
            let mut all = self.all();
            self.memory.forget_trace(place);
            if let Some(taken) = all.taken.get_mut(place) {
                *taken = false;
            }
        }
    }

    /// Takes one that was kept long enough, or whose thread is gone.
    pub(crate) fn expired(&self, now: Instant, lives: impl Fn(ProcessId) -> bool) -> Option<Kept> {
        if self.is_empty() {
            return None;
        }
        let mut all = self.all();
        let over = |kept: &Kept| {
            let is_old = now.saturating_duration_since(kept.since) > KEPT;
            is_old && kept.is_to_be_undone() || !lives(kept.trace.thread)
        };
        let at = all.kept.iter().position(over)?;
        let kept = all.kept.remove(at);
        self.count.store(all.kept.len(), Ordering::Release);
        kept
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// Whether there is something that may have to be undone soon.
    pub(crate) fn is_pending(&self) -> bool {
        !self.is_empty() && self.all().kept.iter().any(Kept::is_to_be_undone)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::monitor::caller::call_id::{Making, tests::trace};
    use crate::monitor::state::journal::JOURNAL_BYTES;

    fn memory() -> &'static JournalMap {
        let journal = File::from(memfd_create("journal", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&journal, JOURNAL_BYTES as u64).unwrap();
        Box::leak(Box::new(JournalMap::map(&journal).unwrap()))
    }

    fn outcome() -> Option<Outcome> {
        let made = vec![Object { client: 5, parent: 5, handle: 6 }];
        Some(Outcome { output: vec![], reply: Reply::Done, is_ok: true, device: None, made })
    }

    #[test]
    fn the_same_call_of_the_same_thread_finds_what_was_done_once() {
        let unclaimed = Unclaimed::open(memory());
        let Trace { thread, asked, before, after, .. } = trace(7);
        assert!(unclaimed.keep(trace(7), outcome()).is_none());
        let other = Trace { object: Making::one(5, 9, false), ..trace(7) };
        assert!(unclaimed.has(&trace(7)) && !unclaimed.has(&other));
        let stranger = ProcessId { start_ticks: 6, ..thread };
        for other in [trace(8).thread, stranger] {
            assert!(matches!(unclaimed.take(other, asked, before), Match::Nothing));
            assert!(!unclaimed.has(&Trace { thread: other, ..trace(7) }));
        }
        assert!(matches!(unclaimed.take(thread, asked, before), Match::Same(_)));
        assert!(matches!(unclaimed.take(thread, asked, before), Match::Nothing));
        assert!(unclaimed.keep(trace(7), outcome()).is_none());
        assert!(matches!(unclaimed.take(thread, asked, after), Match::Same(_)), "half answered");
        for (asked, read) in [((1, 9), before), (asked, Print(4))] {
            assert!(unclaimed.keep(trace(7), outcome()).is_none());
            assert!(matches!(unclaimed.take(thread, asked, read), Match::Other(_)));
        }
    }

    #[test]
    fn it_stays_small_and_forgets() {
        let unclaimed = Unclaimed::open(memory());
        for tid in 0..i32::try_from(MOST).unwrap() {
            assert!(unclaimed.keep(trace(tid), outcome()).is_none());
        }
        let oldest = unclaimed.keep(trace(99), outcome());
        assert_eq!(oldest.map(|kept| kept.trace), Some(trace(0)));
        let gone = unclaimed.expired(Instant::now(), |of| of != trace(5).thread);
        assert_eq!(gone.map(|kept| kept.trace), Some(trace(5)));
        let later = Instant::now() + KEPT * 2;
        let mut left = 0;
        while unclaimed.expired(later, |_| true).is_some() {
            left += 1;
        }
        assert_eq!((left, unclaimed.is_empty()), (MOST - 1, true));
    }

    /// An answer costs nothing, and a signal's handler may take as long as it likes.
    #[test]
    fn what_made_nothing_waits_as_long_as_its_thread_lives() {
        let unclaimed = Unclaimed::open(memory());
        unclaimed.keep(Trace { object: Making::one(5, 6, true), ..trace(1) }, None);
        unclaimed.keep(trace(2), outcome().map(|outcome| Outcome { made: vec![], ..outcome }));
        assert!(!unclaimed.is_pending());
        unclaimed.keep(trace(3), None);
        assert!(unclaimed.is_pending());
        let later = Instant::now() + KEPT * 2;
        let gone = unclaimed.expired(later, |_| true);
        assert_eq!(gone.map(|kept| kept.trace), Some(trace(3)));
        assert!(unclaimed.expired(later, |_| true).is_none() && !unclaimed.is_pending());
        assert!(unclaimed.expired(later, |_| false).is_some());
    }

    #[test]
    fn the_next_worker_finds_what_was_not_settled() {
        let memory = memory();
        let unclaimed = Unclaimed::open(memory);
        let was_there = Trace { object: Making::one(5, 6, true), ..trace(2) };
        for trace in [trace(1), was_there, trace(3)] {
            assert!(unclaimed.keep(trace, outcome()).is_none());
        }
        let Match::Same(first) = unclaimed.take(trace(1).thread, trace(1).asked, Print(3)) else {
            panic!("it is the same");
        };
        let traces = || memory.traces().map(|(_, trace)| trace).collect::<Vec<_>>();
        assert_eq!(traces(), [trace(1), was_there, trace(3)], "nothing became of it yet");
        unclaimed.settle(&first);
        assert_eq!(traces(), [was_there, trace(3)]);

        let next = Unclaimed::open(memory);
        assert!(next.has(&trace(3)));
        // None of theirs is overwritten, and what there is no place for is kept all the same.
        for tid in 10..60 {
            next.keep(trace(tid), outcome());
        }
        assert_eq!(traces().len(), SHELF_PLACES);
        assert!(traces().contains(&was_there) && traces().contains(&trace(3)));
    }
}
