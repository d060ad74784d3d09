//! Traces in the journal: of calls whose reply nobody took.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::ledger::Process;
use crate::monitor::journal::call_id::{CallObject, Trace};
use crate::process::ProcessId;

/// The words of a trace. The first is 0 where there is no trace.
type Longs = [u64; 6];

/// A place for a trace in the journal.
#[repr(transparent)]
#[derive(Debug)]
pub(super) struct StoredTrace([AtomicU64; 6]);

impl StoredTrace {
    /// Stores a trace. The first word comes last: whenever the worker ends, the place has a whole trace or none.
    pub(super) fn store(&self, trace: &Trace) {
        for (stored, long) in self.0.iter().zip(longs(trace)).rev() {
            stored.store(long, Ordering::Release);
        }
    }

    pub(super) fn load(&self) -> Option<Trace> {
        trace(self.0.each_ref().map(|long| long.load(Ordering::Acquire)))
    }

    pub(super) fn clear(&self) {
        let [first, ..] = &self.0;
        first.store(0, Ordering::Release);
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
