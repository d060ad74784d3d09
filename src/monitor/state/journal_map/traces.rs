//! Traces of calls in the journal: its shelf has those whose reply nobody took.

use std::sync::atomic::Ordering;

use super::JournalMap;
use crate::ledger::Process;
use crate::monitor::caller::call_id::{Making, Trace};
use crate::monitor::state::journal::{SHELF_OFFSET, SHELF_PLACES, TRACE_BYTES};
use crate::process::ProcessId;

/// Of a trace: the thread's tid, which is zero where there is none, and what else is known of it.
const TID: usize = 0;
/// Whether it was there, by the lowest bit, and how many more there are.
const HOW: usize = 4;
const THREAD_STARTED: usize = 8;
const PROCESS: usize = 16;
const REQUEST: usize = 24;
const ARGUMENT: usize = 32;
// From 40 on are 16 bytes that workers before this version wrote and nobody reads.
const TRACE_CLIENT: usize = 56;
const TRACE_HANDLE: usize = 60;

const _: () = assert!(TRACE_HANDLE + 4 == TRACE_BYTES);

impl JournalMap {
    fn shelf(place: usize) -> usize {
        assert!(place < SHELF_PLACES, "a place on the shelf");
        SHELF_OFFSET + place * TRACE_BYTES
    }

    /// Puts a trace on the shelf: its place, or `None` where the shelf is full. One thread at a time
    /// may do so.
    pub(crate) fn keep_trace(&self, trace: &Trace) -> Option<usize> {
        let place = (0..SHELF_PLACES).find(|place| self.trace(Self::shelf(*place)).is_none())?;
        self.put_trace(Self::shelf(place), trace);
        Some(place)
    }

    /// Takes a trace off the shelf.
    pub(crate) fn forget_trace(&self, place: usize) {
        self.word(Self::shelf(place) + TID).store(0, Ordering::Release);
    }

    /// All traces of the shelf, with their places.
    pub(crate) fn traces(&self) -> impl Iterator<Item = (usize, Trace)> {
        (0..SHELF_PLACES).filter_map(|place| Some((place, self.trace(Self::shelf(place))?)))
    }

    /// Writes a trace; it is there, or there is none, whenever we end.
    fn put_trace(&self, at: usize, trace: &Trace) {
        let Trace { thread, process, words, object } = *trace;
        let Making { client, handle, more, was_there } = object;
        self.word(at + TID).store(0, Ordering::Release);
        let longs = [
            (THREAD_STARTED, thread.start_ticks),
            (PROCESS, process.0),
            (REQUEST, words.0),
            (ARGUMENT, words.1),
        ];
        for (field, value) in longs {
            self.long(at + field).store(value, Ordering::Release);
        }
        let how = u32::from(was_there) | more << 1;
        let short = [(HOW, how), (TRACE_CLIENT, client), (TRACE_HANDLE, handle)];
        for (field, value) in short {
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
            words: (long(REQUEST), long(ARGUMENT)),
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
