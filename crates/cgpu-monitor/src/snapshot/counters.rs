//! What a monitor counts, and the numbers that it gives only once.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use cgpu_core::calls::{Calls, DURATIONS_US, Durations};

/// What became of a call, for the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Count {
    Continued = 0,
    Executed = 1,
    OverQuota = 2,
    Refused = 3,
    Killed = 4,
}

/// Events that were left out. The next event says how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeftOut {
    /// Allocations over the quota.
    Refusals = 0,
    /// Processes that were killed.
    Kills = 1,
}

/// The counters.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    next_handle: AtomicU32,
    next_export: AtomicU64,
    next_file: AtomicU32,
    /// By [`LeftOut`].
    left_out: [AtomicU64; 2],
    /// By [`Count`].
    calls: [AtomicU64; 5],
    /// How many calls took so long, by [`DURATIONS_US`].
    durations: [AtomicU64; DURATIONS_US.len() + 1],
    durations_sum_ns: AtomicU64,
}

/// What the counters say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CounterValues {
    next_handle: u32,
    next_export: u64,
    next_file: u32,
    left_out: [u64; 2],
    calls: Calls,
    durations: Durations,
}

impl Counters {
    /// Counters that go on from these values.
    pub(crate) fn of(values: &CounterValues) -> Self {
        let Calls { continued, executed, over_quota, refused, killed } = values.calls;
        Counters {
            next_handle: values.next_handle.into(),
            next_export: values.next_export.into(),
            next_file: values.next_file.into(),
            left_out: values.left_out.map(AtomicU64::new),
            calls: [continued, executed, over_quota, refused, killed].map(AtomicU64::new),
            durations: values.durations.counts.map(AtomicU64::new),
            durations_sum_ns: values.durations.sum_ns.into(),
        }
    }

    /// What they say now.
    pub(crate) fn values(&self) -> CounterValues {
        CounterValues {
            next_handle: self.next_handle.load(Ordering::Relaxed),
            next_export: self.next_export.load(Ordering::Relaxed),
            next_file: self.next_file.load(Ordering::Relaxed),
            left_out: self.left_out.each_ref().map(|count| count.load(Ordering::Relaxed)),
            calls: self.calls(),
            durations: self.durations(),
        }
    }

    /// A number for an export.
    pub(crate) fn next_export(&self) -> u64 {
        self.next_export.fetch_add(1, Ordering::Relaxed)
    }

    /// Takes `count` consecutive numbers for handles. Returns the first one.
    pub(crate) fn next_handles(&self, count: u32) -> u32 {
        self.next_handle.fetch_add(count, Ordering::Relaxed)
    }

    /// An id for a UVM file. After 2³² files the ids begin again.
    pub(crate) fn next_file(&self) -> u32 {
        self.next_file.fetch_add(1, Ordering::Relaxed)
    }

    /// Counts what became of a call, or a process that was killed.
    pub(crate) fn count(&self, count: Count) {
        if let Some(counter) = self.calls.get(count as usize) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts the duration of a call.
    pub(crate) fn add_duration(&self, time: Duration) {
        if let Some(count) = self.durations.get(Durations::place(time)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.durations_sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    pub(crate) fn durations(&self) -> Durations {
        Durations {
            counts: self.durations.each_ref().map(|count| count.load(Ordering::Relaxed)),
            sum_ns: self.durations_sum_ns.load(Ordering::Relaxed),
        }
    }

    /// What became of the calls.
    pub(crate) fn calls(&self) -> Calls {
        let [continued, executed, over_quota, refused, killed] =
            self.calls.each_ref().map(|count| count.load(Ordering::Relaxed));
        Calls { continued, executed, over_quota, refused, killed }
    }

    /// Counts one more event that was left out.
    pub(crate) fn leave_out(&self, what: LeftOut) {
        let [refusals, kills] = &self.left_out;
        let counter = if what == LeftOut::Refusals { refusals } else { kills };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether allocations over the quota were left out.
    pub(crate) fn has_left_out_refusals(&self) -> bool {
        let [refusals, _] = &self.left_out;
        refusals.load(Ordering::Relaxed) > 0
    }

    /// How many events were left out, for the next event to report. The count begins again.
    pub(crate) fn take_left_out(&self, what: LeftOut) -> u64 {
        let [refusals, kills] = &self.left_out;
        let counter = if what == LeftOut::Refusals { refusals } else { kills };
        counter.swap(0, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_go_on_from_what_they_said() {
        let counters = Counters::default();
        assert_eq!(
            (counters.next_handles(3), counters.next_export(), counters.next_file()),
            (0, 0, 0)
        );
        for (times, count) in [
            (1, Count::Continued),
            (2, Count::Executed),
            (3, Count::OverQuota),
            (4, Count::Refused),
        ] {
            (0..times).for_each(|_| counters.count(count));
        }
        counters.add_duration(Duration::from_secs(9));
        counters.leave_out(LeftOut::Kills);
        let next = Counters::of(&counters.values());
        assert_eq!(next.values(), counters.values());
        assert_eq!((next.next_handles(1), next.next_export(), next.next_file()), (3, 1, 1));
        assert_eq!((next.calls().received(), next.calls().over_quota), (10, 3));
        assert_eq!(
            (next.durations().counts.last(), next.durations().sum_ns),
            (Some(&1), 9_000_000_000)
        );
        assert!(!next.has_left_out_refusals());
        assert_eq!(next.take_left_out(LeftOut::Kills), 1);
        assert_eq!(next.take_left_out(LeftOut::Kills), 0);
    }
}
