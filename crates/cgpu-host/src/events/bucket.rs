//! How many events of one kind a container may cause: a bucket of tokens. Pure; time is a parameter.

/// A bucket that begins full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// Tokens that it holds at most.
    burst: u64,
    /// How long one token takes, in microseconds.
    refill_us: u64,
    /// When the bucket was or will be full again, in microseconds of the caller's clock.
    full_at_us: u64,
}

impl Bucket {
    /// One of `burst` tokens, each of which is there again after `refill_us` microseconds.
    #[must_use]
    pub fn new(burst: u32, refill_us: u64) -> Self {
        Bucket { burst: burst.into(), refill_us, full_at_us: 0 }
    }

    /// Whether there is a token at `now_us`; it is taken, then. A clock that goes back gives none
    /// before it has come as far again.
    pub fn take(&mut self, now_us: u64) -> bool {
        let full_at_us = self.full_at_us.max(now_us).saturating_add(self.refill_us);
        let most_us = now_us.saturating_add(self.burst.saturating_mul(self.refill_us));
        let has = full_at_us <= most_us;
        if has {
            self.full_at_us = full_at_us;
        }
        has
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A burst is let through, and after it one event each time that the bucket refills.
    #[test]
    fn burst_passes_and_then_one_per_refill() {
        let mut bucket = Bucket::new(3, 10);
        let taken = (0..100).filter(|_| bucket.take(5)).count();
        assert_eq!(taken, 3);
        assert!(!bucket.take(14) && bucket.take(15) && !bucket.take(15));
        assert!(bucket.take(40) && bucket.take(40) && !bucket.take(40));
        assert!(!Bucket::new(0, 10).take(1_000_000), "one without tokens has none ever");
    }

    proptest! {
        /// No more tokens are taken than burst and time allow.
        #[test]
        fn taken_tokens_never_exceed_burst_and_time(
            burst in 0_u32..20,
            refill_us in 1_u64..1000,
            steps in prop::collection::vec(0_u64..500, 1..200),
        ) {
            let mut bucket = Bucket::new(burst, refill_us);
            let (mut now_us, mut taken) = (0, 0);
            for step_us in steps {
                now_us += step_us;
                taken += u64::from(bucket.take(now_us));
                prop_assert!(taken <= u64::from(burst) + now_us / refill_us);
            }
        }
    }
}
