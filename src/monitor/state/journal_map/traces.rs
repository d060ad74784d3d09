//! Traces of calls in the journal: on its shelf those whose callers are to come back, and by their
//! threads' numbers those that were answered last.

use std::sync::atomic::Ordering;

use super::JournalMap;
use crate::ledger::Process;
use crate::monitor::caller::call_id::{Making, Print, Trace};
use crate::monitor::state::journal::{
    ANSWER_PLACES, ANSWERS_OFFSET, SHELF_OFFSET, SHELF_PLACES, TRACE_BYTES,
};
use crate::process::ProcessId;

/// Of a trace: the thread's tid, which is zero where there is none, and what else is known of it.
const TID: usize = 0;
/// Whether it was there, by the lowest bit, and how many more there are.
const HOW: usize = 4;
const THREAD_STARTED: usize = 8;
const PROCESS: usize = 16;
const REQUEST: usize = 24;
const ARGUMENT: usize = 32;
const BEFORE: usize = 40;
const AFTER: usize = 48;
const TRACE_CLIENT: usize = 56;
const TRACE_HANDLE: usize = 60;

const _: () = assert!(TRACE_HANDLE + 4 == TRACE_BYTES);

impl JournalMap {
    fn shelf(place: usize) -> usize {
        assert!(place < SHELF_PLACES, "a place on the shelf");
        SHELF_OFFSET + place * TRACE_BYTES
    }

    /// Puts a trace in a place of the shelf.
    pub(crate) fn keep_trace(&self, place: usize, trace: &Trace) {
        self.put_trace(Self::shelf(place), trace);
    }

    /// There is none in that place any more.
    pub(crate) fn forget_trace(&self, place: usize) {
        self.word(Self::shelf(place) + TID).store(0, Ordering::Release);
    }

    /// All traces of the shelf, with their places.
    pub(crate) fn traces(&self) -> impl Iterator<Item = (usize, Trace)> {
        (0..SHELF_PLACES).filter_map(|place| Some((place, self.trace(Self::shelf(place))?)))
    }

    /// Where the answer lies that a thread had last, or another one of like number.
    fn answer(thread: ProcessId) -> usize {
        let place = usize::try_from(thread.pid).unwrap_or(0) % ANSWER_PLACES;
        ANSWERS_OFFSET + place * TRACE_BYTES
    }

    /// A thread is answered.
    pub(crate) fn keep_answer(&self, trace: &Trace) {
        self.put_trace(Self::answer(trace.thread), trace);
    }

    /// What a thread was answered last, where that is still known.
    pub(crate) fn answer_of(&self, thread: ProcessId) -> Option<Trace> {
        self.trace(Self::answer(thread)).filter(|trace| trace.thread == thread)
    }

    /// Writes a trace; it is there, or there is none, whenever we end.
    fn put_trace(&self, at: usize, trace: &Trace) {
        let Trace { thread, process, asked, before, after, object } = *trace;
        let Making { client, handle, more, was_there } = object;
        self.word(at + TID).store(0, Ordering::Release);
        let longs = [
            (THREAD_STARTED, thread.start_ticks),
            (PROCESS, process.0),
            (REQUEST, asked.0),
            (ARGUMENT, asked.1),
            (BEFORE, before.0),
            (AFTER, after.0),
        ];
        for (field, value) in longs {
            self.long(at + field).store(value, Ordering::Release);
        }
        let how = u32::from(was_there) | more << 1;
        let words = [(HOW, how), (TRACE_CLIENT, client), (TRACE_HANDLE, handle)];
        for (field, value) in words {
            self.word(at + field).store(value, Ordering::Release);
        }
        self.word(at + TID).store(thread.pid.cast_unsigned(), Ordering::Release);
    }

    fn trace(&self, at: usize) -> Option<Trace> {
        let pid = self.word(at + TID).load(Ordering::Acquire).cast_signed();
        let word = |field: usize| self.word(at + field).load(Ordering::Acquire);
        let long = |field: usize| self.long(at + field).load(Ordering::Acquire);
        let trace = Trace {
            thread: ProcessId { pid, start_ticks: long(THREAD_STARTED) },
            process: Process(long(PROCESS)),
            asked: (long(REQUEST), long(ARGUMENT)),
            before: Print(long(BEFORE)),
            after: Print(long(AFTER)),
            object: Making {
                client: word(TRACE_CLIENT),
                handle: word(TRACE_HANDLE),
                more: word(HOW) >> 1,
                was_there: word(HOW) & 1 != 0,
            },
        };
        (pid != 0).then_some(trace)
    }
}
