//! How many lines of the log a container may cause: a bucket of tokens.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Lines at once.
const BURST: f64 = 20.0;

/// Lines a second after that.
const RATE: f64 = 1.0;

/// Controls that are remembered as told of.
const MOST_TOLD: usize = 256;

/// The bucket.
#[derive(Debug)]
pub(super) struct Calm {
    tokens: Mutex<(f64, Instant)>,
    told: Mutex<BTreeSet<u32>>,
}

impl Calm {
    pub(super) fn new() -> Self {
        let told = Mutex::new(BTreeSet::new());
        Calm { tokens: Mutex::new((BURST, Instant::now())), told }
    }

    /// Whether nothing was told of that control yet; of more than are remembered, nothing is.
    pub(super) fn is_news(&self, control: u32) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.len() < MOST_TOLD && told.insert(control)
    }

    /// Whether one more line may be written.
    pub(super) fn allows(&self) -> bool {
        let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let elapsed_s = now.saturating_duration_since(tokens.1).as_secs_f64();
        *tokens = ((tokens.0 + elapsed_s * RATE).min(BURST), now);
        if tokens.0 < 1.0 {
            return false;
        }
        tokens.0 -= 1.0;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_off() {
        let calm = Calm::new();
        let lines = (0..1000).filter(|_| calm.allows()).count();
        assert!((20..=21).contains(&lines), "{lines}");
    }

    #[test]
    fn a_control_is_news_once() {
        let calm = Calm::new();
        assert!(calm.is_news(7) && !calm.is_news(7));
        assert_eq!((0..1000).filter(|control| calm.is_news(*control)).count(), MOST_TOLD - 1);
    }
}
