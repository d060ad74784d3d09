//! Traces in the journal: of calls whose reply nobody took.

use std::sync::atomic::{AtomicU64, Ordering};

use super::JournalMap;
use crate::ledger::Process;
use crate::monitor::journal::call_id::{CallObject, Trace};
use crate::process::ProcessId;

/// The words of a trace. The first is 0 where there is no trace.
type Longs = [u64; 6];

/// A trace as the journal has it.
pub(super) type StoredTrace = [AtomicU64; 6];

impl JournalMap {
    /// Stores a trace. Returns its place, or `None` where no place is free. One thread at a time may do this.
    pub(crate) fn keep_trace(&self, trace: &Trace) -> Option<usize> {
        let all = &self.head().traces;
        let (place, stored) = (0..).zip(all).find(|(_, stored)| load(stored).is_none())?;
        // The first word comes last: whenever the worker ends, the place has a whole trace or none.
        for (stored, long) in stored.iter().zip(longs(trace)).rev() {
            stored.store(long, Ordering::Release);
        }
        Some(place)
    }

    /// Removes the trace at this place.
    pub(crate) fn forget_trace(&self, place: usize) {
        self.head().traces[place][0].store(0, Ordering::Release);
    }

    /// All traces, with their places.
    pub(crate) fn traces(&self) -> impl Iterator<Item = (usize, Trace)> {
        (0..).zip(&self.head().traces).filter_map(|(place, stored)| Some((place, load(stored)?)))
    }
}

fn load(stored: &StoredTrace) -> Option<Trace> {
    trace(stored.each_ref().map(|long| long.load(Ordering::Acquire)))
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
    let Trace { thread, process, registers, object } = *trace;
    let CallObject { client, handle, more, was_there } = object;
    let first = join(thread.pid.cast_unsigned(), u32::from(was_there) | more << 1);
    [first, thread.start_ticks, process.0, registers.0, registers.1, join(client, handle)]
}

fn trace([first, start_ticks, process, request, argument, last]: Longs) -> Option<Trace> {
    let ((tid, how), (client, handle)) = (split(first), split(last));
    (tid != 0).then_some(Trace {
        thread: ProcessId { pid: tid.cast_signed(), start_ticks },
        process: Process(process),
        registers: (request, argument),
        object: CallObject { client, handle, more: how >> 1, was_there: how & 1 != 0 },
    })
}
