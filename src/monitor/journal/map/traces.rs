//! Traces in the journal: of calls whose reply nobody took.

use std::sync::atomic::Ordering;

use super::JournalMap;
use crate::ledger::Process;
use crate::monitor::journal::call_id::{CallObject, Trace};
use crate::monitor::journal::layout::{TRACE_BYTES, TRACE_PLACES, TRACES_OFFSET};
use crate::process::ProcessId;

/// A trace as the journal has it: six words of 64 bits. The first is 0 where there is no trace.
type Longs = [u64; TRACE_BYTES / 8];

impl JournalMap {
    fn trace_offset(place: usize) -> usize {
        assert!(place < TRACE_PLACES, "a place of a trace");
        TRACES_OFFSET + place * TRACE_BYTES
    }

    /// Stores a trace. Returns its place, or `None` where no place is free. One thread at a time may do this.
    pub(crate) fn keep_trace(&self, trace: &Trace) -> Option<usize> {
        let place = (0..TRACE_PLACES).find(|place| self.trace(*place).is_none())?;
        // The first word comes last: whenever the worker ends, the place has a whole trace or none.
        for (at, long) in longs(trace).into_iter().enumerate().rev() {
            self.long(Self::trace_offset(place) + 8 * at).store(long, Ordering::Release);
        }
        Some(place)
    }

    /// Removes the trace at this place.
    pub(crate) fn forget_trace(&self, place: usize) {
        self.long(Self::trace_offset(place)).store(0, Ordering::Release);
    }

    /// All traces, with their places.
    pub(crate) fn traces(&self) -> impl Iterator<Item = (usize, Trace)> {
        (0..TRACE_PLACES).filter_map(|place| Some((place, self.trace(place)?)))
    }

    fn trace(&self, place: usize) -> Option<Trace> {
        let long = |at| self.long(Self::trace_offset(place) + 8 * at).load(Ordering::Acquire);
        trace(std::array::from_fn(long))
    }
}

/// Makes one word of 64 bits from two of 32 bits.
fn join(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn split(long: u64) -> (u32, u32) {
    let [a, b, c, d, e, f, g, h] = long.to_le_bytes();
    (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
}

fn longs(trace: &Trace) -> Longs {
    let Trace { thread, process, words, object } = *trace;
    let CallObject { client, handle, more, was_there } = object;
    let first = join(thread.pid.cast_unsigned(), u32::from(was_there) | more << 1);
    [first, thread.start_ticks, process.0, words.0, words.1, join(client, handle)]
}

fn trace([first, start_ticks, process, request, argument, last]: Longs) -> Option<Trace> {
    let ((tid, how), (client, handle)) = (split(first), split(last));
    (tid != 0).then_some(Trace {
        thread: ProcessId { pid: tid.cast_signed(), start_ticks },
        process: Process(process),
        words: (request, argument),
        object: CallObject { client, handle, more: how >> 1, was_there: how & 1 != 0 },
    })
}
