//! How much of a processor a monitor may take for a container whose own processes are limited.
//!
//! The monitor runs outside of the container's cgroup: a throttled monitor would hold locks of the driver, which are
//! the whole host's. So its time isn't limited by the kernel. Instead, the next call of a container waits as long as
//! its monitor has taken more than the container's limit allows. Work that was begun is never delayed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::sync::Lock;

/// How much processor time may be taken at once, in microseconds: a program that starts makes thousands of calls.
const BURST_US: i64 = 200_000;

/// The least that a monitor may take, in thousandths of a processor.
const LEAST: u64 = 20;

/// How often it is asked how much was taken, in microseconds.
const POLL_INTERVAL_US: u64 = 1000;

/// The longest pause, in microseconds: meanwhile no thread checks whether the monitor is to stop.
const LONGEST_US: u64 = 100_000;

/// The budget; without a limit nothing waits.
#[derive(Debug)]
pub(crate) struct ProcessorBudget {
    allowance: Option<Lock<Allowance>>,
    began: Instant,
    next_poll_us: AtomicU64,
}

/// What is left of a budget. Pure: times are parameters, in microseconds.
#[derive(Debug)]
struct Allowance {
    /// In thousandths of a processor.
    rate: u64,
    left_us: i64,
    at_us: u64,
    used_us: u64,
}

impl Allowance {
    /// How long calls have to wait at `now_us`, when `used_us` of processor time have been taken in all.
    fn wait_us(&mut self, now_us: u64, used_us: u64) -> u64 {
        let earned = now_us.saturating_sub(self.at_us).saturating_mul(self.rate) / 1000;
        let spent = used_us.saturating_sub(self.used_us);
        let as_signed = |us: u64| i64::try_from(us).unwrap_or(i64::MAX);
        let left_us = self.left_us.saturating_add(as_signed(earned)).min(BURST_US);
        self.left_us = left_us.saturating_sub(as_signed(spent));
        (self.at_us, self.used_us) = (now_us, used_us);
        let lacking = self.left_us.min(0).unsigned_abs();
        (lacking.saturating_mul(1000) / self.rate).min(LONGEST_US)
    }
}

impl ProcessorBudget {
    /// The budget of a container whose limit is in thousandths of a processor; `None` if it has no limit.
    pub(crate) fn new(limit: Option<u64>) -> Self {
        let allowance = |limit: u64| Allowance {
            rate: limit.max(LEAST),
            left_us: BURST_US,
            at_us: 0,
            used_us: taken_us(),
        };
        ProcessorBudget {
            allowance: limit.map(allowance).map(Lock::new),
            began: Instant::now(),
            next_poll_us: AtomicU64::new(0),
        }
    }

    /// How long the next call has to wait; `None` if it needn't.
    pub(crate) fn pause(&self) -> Option<Duration> {
        let allowance = self.allowance.as_ref()?;
        let now_us = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        if now_us < self.next_poll_us.load(Ordering::Relaxed) {
            return None;
        }
        self.next_poll_us.store(now_us.saturating_add(POLL_INTERVAL_US), Ordering::Relaxed);
        let wait_us = allowance.lock().wait_us(now_us, taken_us());
        (wait_us > 0).then(|| Duration::from_micros(wait_us))
    }
}

/// The processor time that this process has taken, in microseconds.
fn taken_us() -> u64 {
    let taken = Duration::try_from(clock_gettime(ClockId::ProcessCPUTime));
    taken.map_or(0, |taken| u64::try_from(taken.as_micros()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_limit_nothing_waits() {
        let budget = ProcessorBudget::new(None);
        assert!((0..1000).all(|_| budget.pause().is_none()));
    }

    /// A burst of processor time is free, and what is taken beyond it is waited for.
    #[test]
    fn burst_is_free_and_excess_time_is_waited() {
        // A tenth of a processor.
        let mut allowance = Allowance { rate: 100, left_us: BURST_US, at_us: 0, used_us: 0 };
        assert_eq!(allowance.wait_us(0, 200_000), 0, "the burst");
        assert_eq!(allowance.wait_us(0, 205_000), 50_000, "5 ms take 50 ms");
        assert_eq!(allowance.wait_us(50_000, 205_000), 0, "they have passed");
        assert_eq!(allowance.wait_us(50_000, 300_000), LONGEST_US, "in pieces");
        // A long idle time gives a burst, and no more.
        assert_eq!(allowance.wait_us(1_000_000_000, 500_000), 0);
        assert_eq!(allowance.wait_us(1_000_000_000, 501_000), 10_000);
    }

    #[test]
    fn long_term_processor_time_stays_within_the_limit() {
        let mut allowance = Allowance { rate: 250, left_us: BURST_US, at_us: 0, used_us: 0 };
        let (mut now_us, mut used_us) = (0, 0);
        for _ in 0..10_000 {
            // A call takes 1 ms, whichever thread begins one.
            now_us += allowance.wait_us(now_us, used_us) + 1000;
            used_us += 1000;
        }
        let share = used_us.saturating_sub(BURST_US.unsigned_abs()) * 1000 / now_us;
        assert!((230..=250).contains(&share), "{share} thousandths");
    }
}
