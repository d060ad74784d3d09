//! What an audit knows of earlier audits: when the last audit was, and what audits doubt. The audit itself is in
//! [`look`](crate::monitor::audit::look).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::monitor::audit::client_users::LingeringPids;
use crate::monitor::audit::holdings::Doubts;
use crate::monitor::lock::Lock;
use crate::monitor::state::Occasion;

/// The shortest pause between two audits for calls that would be refused.
const SHORTEST_PAUSE: Duration = Duration::from_millis(4);

/// The longest such pause, after an audit that took long.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// How often the driver is asked for each client, where no process died and no call would be refused.
const CLIENT_CHECK_PAUSE: Duration = Duration::from_secs(2);

/// The most objects of a GPU that the driver is asked for one by one in an audit.
pub(crate) const MOST_ASKED: usize = 2048;

/// When and why an audit was made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Audited {
    pub(crate) occasion: Occasion,
    pub(crate) began: Instant,
    pub(crate) ended: Instant,
}

impl Audited {
    /// How long no other audit for a refusal may begin, so that the driver is left alone most of the time.
    pub(crate) fn wait(self) -> Duration {
        let took = self.ended.saturating_duration_since(self.began);
        SHORTEST_PAUSE.max((took * 4).min(LONGEST_PAUSE)).saturating_sub(self.ended.elapsed())
    }
}

/// When audits looked, and what they doubt.
#[derive(Debug, Default)]
pub(crate) struct AuditHistory {
    /// The last audit. The lock lets one audit run at a time.
    pub(crate) last: Lock<Option<Audited>>,
    pub(crate) doubts: Doubts,
    /// The place in a GPU's list of objects from which the next audit asks.
    asked: Lock<BTreeMap<usize, usize>>,
    /// When the driver was last asked for each client.
    clients_asked: Lock<Option<Instant>>,
    pub(crate) lingering: LingeringPids,
}

impl AuditHistory {
    /// Whether the driver is to be asked for each client now. Notes that it was asked, then.
    pub(crate) fn take_client_check_due(&self) -> bool {
        let mut last = self.clients_asked.lock();
        let due = last.is_none_or(|last| last.elapsed() > CLIENT_CHECK_PAUSE);
        if due {
            *last = Some(Instant::now());
        }
        due
    }

    /// Puts the objects of a GPU first whose turn it is: of many, an audit asks for the first [`MOST_ASKED`] alone.
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
        let history = AuditHistory::default();
        let all: Vec<usize> = (0..2 * MOST_ASKED + 1).collect();
        let mut seen = [const { Vec::new() }; 2];
        // Each GPU has turns of its own, in whatever order GPUs are asked about.
        for _ in 0..3 {
            for (gpu, seen) in seen.iter_mut().enumerate() {
                seen.extend(history.in_turn(gpu, all.clone()).into_iter().take(MOST_ASKED));
            }
        }
        for mut seen in seen {
            assert_eq!(seen.len(), 3 * MOST_ASKED);
            seen.sort_unstable();
            seen.dedup();
            assert_eq!(seen, all);
        }
        assert_eq!(history.in_turn(0, vec![1, 2]), [1, 2]);
    }
}
