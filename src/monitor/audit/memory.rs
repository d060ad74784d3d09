//! What audits know of those before: when the last one was, and what it doubted. The looking is in
//! [`look`](crate::monitor::audit::look).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::monitor::audit::heirs::Lingering;
use crate::monitor::audit::holdings::Doubts;
use crate::monitor::lock::Lock;
use crate::monitor::state::occasion::Occasion;

/// How soon it's asked again for calls that would be refused.
const PATIENCE: Duration = Duration::from_millis(4);

/// The same where there is much to be asked.
const LONGEST_PATIENCE: Duration = Duration::from_millis(100);

/// How often clients are asked for, where nobody died and nothing is refused.
const STOCK: Duration = Duration::from_secs(2);

/// Objects that the driver is asked for one by one at most, in one audit.
pub(crate) const MOST_ASKED: usize = 2048;

/// When an audit was.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Audited {
    pub(crate) occasion: Occasion,
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
}

impl Audited {
    /// How long it's too soon for another: most of the time the driver is left alone.
    pub(crate) fn wait(self) -> Duration {
        let took = self.ended.saturating_duration_since(self.began);
        PATIENCE.max((took * 4).min(LONGEST_PATIENCE)).saturating_sub(self.ended.elapsed())
    }
}

/// When it looked, and what it doubts.
#[derive(Debug, Default)]
pub(crate) struct AuditMemory {
    /// One audit at a time, and when the last one was.
    pub(crate) last: Lock<Option<Audited>>,
    pub(crate) doubts: Doubts,
    /// How many of a GPU's objects were asked for.
    asked: Lock<BTreeMap<usize, usize>>,
    /// When clients were asked for.
    stock: Lock<Option<Instant>>,
    pub(crate) lingering: Lingering,
}

impl AuditMemory {
    /// Whether clients are to be asked for; they are, then.
    pub(crate) fn take_stock_due(&self) -> bool {
        let mut last = self.stock.lock();
        let due = last.is_none_or(|last| last.elapsed() > STOCK);
        if due {
            *last = Some(Instant::now());
        }
        due
    }

    /// Puts first those objects of a GPU whose turn it is: of many, an audit asks for the first alone.
    pub(crate) fn in_turn<T>(&self, gpu: usize, mut objects: Vec<T>) -> Vec<T> {
        if objects.len() > MOST_ASKED {
            let mut asked = self.asked.lock();
            let asked = asked.entry(gpu).or_default();
            let first = *asked % objects.len();
            objects.rotate_left(first);
            *asked = first + MOST_ASKED;
        }
        objects
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_objects_each_has_its_turn() {
        let memory = AuditMemory::default();
        let all: Vec<usize> = (0..2 * MOST_ASKED + 1).collect();
        let mut seen = [const { Vec::new() }; 2];
        // Those of each GPU by themselves, however they take turns.
        for _ in 0..3 {
            for (gpu, seen) in seen.iter_mut().enumerate() {
                seen.extend(memory.in_turn(gpu, all.clone()).into_iter().take(MOST_ASKED));
            }
        }
        for mut seen in seen {
            assert_eq!(seen.len(), 3 * MOST_ASKED);
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen, all);
        }
        assert_eq!(memory.in_turn(0, vec![1, 2]), [1, 2]);
    }
}
