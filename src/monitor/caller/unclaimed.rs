//! Replies that no caller took, because a signal ended the caller's wait.
//!
//! The kernel makes such a call again, or tells the program, which mostly makes it again. Where the thread makes the
//! same call next, it is given the kept reply. Where the thread makes another call, or ends, what the first call made
//! is freed. A thread has one such reply at most. A device file that is kept here keeps its client alive, so few
//! replies are kept.
//!
//! The next worker finds traces of these calls in the journal. It doesn't know the replies: it frees what a call may
//! have made, and serves the same call anew where the thread makes it again.

use std::collections::VecDeque;

use crate::monitor::caller::listener::Reply;
use crate::monitor::journal::{Fingerprint, JournalMap, Registers, Trace};
use crate::monitor::lock::Lock;
use crate::monitor::node::Device;
use crate::process::ProcessId;
use crate::rm::call::Object;

/// How many calls are kept.
const MOST_KEPT: usize = 32;

/// The result of a call whose caller didn't wait for the reply.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The call as it was read, and as it was answered: the caller's memory has one or the other.
    pub(crate) seen: [Fingerprint; 2],
    /// What is to be written to the caller's memory: addresses and bytes.
    pub(crate) output: Vec<(u64, Vec<u8>)>,
    pub(crate) reply: Reply,
    /// Whether the driver had done the call.
    pub(crate) is_ok: bool,
    /// The file that the call was made through.
    pub(crate) device: Option<Device>,
    /// The objects that the call made, to be freed where nobody takes the reply.
    pub(crate) made: Vec<Object>,
}

/// A call whose reply nobody took.
#[derive(Debug)]
pub(crate) struct UnclaimedCall {
    pub(crate) trace: Trace,
    /// `None` where a worker before received the call, and may have made it or not.
    pub(crate) outcome: Option<Outcome>,
    /// The trace's place in the journal; `None` where the journal has no place left.
    place: Option<usize>,
}

impl UnclaimedCall {
    /// Whether the thread's next call, by its registers and as it was read, is this call and goes on where this one
    /// ended. What a worker before may have made is freed instead, and made anew: the program may have changed the
    /// call's struct since.
    fn goes_on(&self, registers: Registers, read: Fingerprint) -> bool {
        match &self.outcome {
            Some(outcome) => outcome.seen.contains(&read),
            None => self.trace.registers == registers && !self.trace.may_have_made(),
        }
    }
}

/// The calls whose reply nobody took.
#[derive(Debug)]
pub(crate) struct Unclaimed {
    memory: &'static JournalMap,
    kept: Lock<VecDeque<UnclaimedCall>>,
}

/// What is kept for the thread of a call.
#[derive(Debug)]
pub(crate) enum Match {
    Nothing,
    /// The same call, which was made already or may have been.
    Same(UnclaimedCall),
    /// A call that is to be undone first: another one, or one for which a worker before may have made something.
    Undo(UnclaimedCall),
}

impl Unclaimed {
    /// The calls that the worker before left in the journal.
    pub(crate) fn open(memory: &'static JournalMap) -> Self {
        let kept = |(place, trace)| UnclaimedCall { trace, outcome: None, place: Some(place) };
        let kept: VecDeque<UnclaimedCall> = memory.traces().map(kept).collect();
        Unclaimed { memory, kept: Lock::new(kept) }
    }

    /// Keeps a call. Returns the oldest call, to be undone, where too many are kept.
    pub(crate) fn keep(&self, trace: Trace, outcome: Option<Outcome>) -> Option<UnclaimedCall> {
        let mut all = self.kept.lock();
        let place = self.memory.keep_trace(&trace);
        all.push_back(UnclaimedCall { trace, outcome, place });
        if all.len() > MOST_KEPT { all.pop_front() } else { None }
    }

    /// Takes out the call that is kept for `thread`. When nothing is left to be done for that call, whoever took it
    /// out calls [`Self::forget_trace`].
    pub(crate) fn take(&self, thread: ProcessId, registers: Registers, read: Fingerprint) -> Match {
        match self.remove(|kept| kept.trace.thread == thread) {
            None => Match::Nothing,
            Some(kept) if kept.goes_on(registers, read) => Match::Same(kept),
            Some(kept) => Match::Undo(kept),
        }
    }

    /// Whether a call of the same thread, registers and object is kept.
    pub(crate) fn has(&self, trace: &Trace) -> bool {
        let key = |of: &Trace| (of.thread, of.registers, of.object.client, of.object.handle);
        self.kept.lock().iter().any(|kept| key(&kept.trace) == key(trace))
    }

    /// Removes the trace of a call that was taken out: the next worker has nothing to do for it.
    pub(crate) fn forget_trace(&self, kept: &UnclaimedCall) {
        if let Some(place) = kept.place {
            self.memory.forget_trace(place);
        }
    }

    /// Takes out a call whose thread has ended.
    pub(crate) fn take_of_ended(&self, lives: impl Fn(ProcessId) -> bool) -> Option<UnclaimedCall> {
        self.remove(|kept| !lives(kept.trace.thread))
    }

    fn remove(&self, matches: impl Fn(&UnclaimedCall) -> bool) -> Option<UnclaimedCall> {
        let mut all = self.kept.lock();
        let at = all.iter().position(matches)?;
        all.remove(at)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.kept.lock().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;
    use crate::monitor::journal::{CallObject, JOURNAL_BYTES, TRACE_PLACES, trace};

    const READ: &[u8] = &[3];
    const ANSWERED: &[u8] = &[9];

    fn seen(bytes: &[u8]) -> Fingerprint {
        Fingerprint::of(trace(7).registers, bytes, &[])
    }

    fn memory() -> &'static JournalMap {
        let journal = File::from(memfd_create("journal", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&journal, JOURNAL_BYTES as u64).unwrap();
        Box::leak(Box::new(JournalMap::map(&journal).unwrap()))
    }

    fn outcome() -> Option<Outcome> {
        let made = vec![Object { client: 5, parent: 5, handle: 6 }];
        let seen = [seen(READ), seen(ANSWERED)];
        Some(Outcome { seen, output: vec![], reply: Reply::Done, is_ok: true, device: None, made })
    }

    #[test]
    fn the_same_call_of_the_same_thread_finds_what_was_done_once() {
        let unclaimed = Unclaimed::open(memory());
        let Trace { thread, registers, .. } = trace(7);
        assert!(unclaimed.keep(trace(7), outcome()).is_none());
        let other = Trace { object: CallObject::one(5, 9, false), ..trace(7) };
        assert!(unclaimed.has(&trace(7)) && !unclaimed.has(&other));
        let later = ProcessId { start_ticks: 6, ..thread };
        for other in [trace(8).thread, later] {
            assert!(matches!(unclaimed.take(other, registers, seen(READ)), Match::Nothing));
            assert!(!unclaimed.has(&Trace { thread: other, ..trace(7) }));
        }
        assert!(matches!(unclaimed.take(thread, registers, seen(READ)), Match::Same(_)));
        assert!(matches!(unclaimed.take(thread, registers, seen(READ)), Match::Nothing));
        assert!(unclaimed.keep(trace(7), outcome()).is_none());
        let half_answered = unclaimed.take(thread, registers, seen(ANSWERED));
        assert!(matches!(half_answered, Match::Same(_)));
        assert!(unclaimed.keep(trace(7), outcome()).is_none());
        assert!(matches!(unclaimed.take(thread, registers, seen(&[4])), Match::Undo(_)));
    }

    #[test]
    fn it_stays_small_and_forgets_threads_that_are_gone() {
        let unclaimed = Unclaimed::open(memory());
        for tid in 1..=i32::try_from(MOST_KEPT).unwrap() {
            assert!(unclaimed.keep(trace(tid), outcome()).is_none());
        }
        let oldest = unclaimed.keep(trace(99), outcome());
        assert_eq!(oldest.map(|kept| kept.trace), Some(trace(1)));
        assert!(unclaimed.take_of_ended(|_| true).is_none());
        let left = unclaimed.take_of_ended(|of| of != trace(5).thread);
        assert_eq!(left.map(|kept| kept.trace), Some(trace(5)));
        let left = std::iter::from_fn(|| unclaimed.take_of_ended(|_| false)).count();
        assert_eq!((left, unclaimed.is_empty()), (MOST_KEPT - 1, true));
    }

    #[test]
    fn the_next_worker_finds_what_was_not_settled() {
        let memory = memory();
        let unclaimed = Unclaimed::open(memory);
        let was_there = Trace { object: CallObject::one(5, 6, true), ..trace(2) };
        for trace in [trace(1), was_there, trace(3)] {
            assert!(unclaimed.keep(trace, outcome()).is_none());
        }
        let first = unclaimed.take(trace(1).thread, trace(1).registers, seen(READ));
        let Match::Same(first) = first else { panic!("it is the same") };
        let traces = || memory.traces().map(|(_, trace)| trace).collect::<Vec<_>>();
        assert_eq!(traces(), [trace(1), was_there, trace(3)], "nothing became of it yet");
        unclaimed.forget_trace(&first);
        assert_eq!(traces(), [was_there, trace(3)]);

        let next = Unclaimed::open(memory);
        assert!(next.has(&trace(3)));
        // No trace of the worker before is overwritten. A call for which the journal has no place is kept all the same.
        for tid in 10..60 {
            next.keep(trace(tid), outcome());
        }
        assert_eq!(traces().len(), TRACE_PLACES);
        assert!(traces().contains(&was_there) && traces().contains(&trace(3)));

        // What the worker before read isn't known, so only the registers count.
        let taken =
            |of: Trace, registers| Unclaimed::open(memory).take(of.thread, registers, seen(&[4]));
        assert!(matches!(taken(was_there, was_there.registers), Match::Same(_)));
        assert!(matches!(taken(was_there, (1, 2)), Match::Undo(_)));
        // What may have been made is freed, and made anew.
        assert!(matches!(taken(trace(3), trace(3).registers), Match::Undo(_)));
    }
}
