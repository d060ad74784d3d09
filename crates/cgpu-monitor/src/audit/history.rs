//! What audits know: the driver usage, when the last audit was, what is doubted, and what checks of outside processes
//! found. [`check`](crate::audit::reconciliation) audits, and [`judge`](crate::audit::judge) judges the driver usage.
//!
//! The driver is queried under the [RM lock](crate::state::RmLock), so that driver usage and state are of one moment:
//! the driver rounds up the memory that it gives a call, and reports that memory before the call returns. If a call
//! doesn't release the RM lock in time, the driver is queried all the same. The memory that such a call gets may be
//! missing in the state, so an excess is tolerated, but not for long ([`Doubts`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::state::{ContainerState, Occasion};
use crate::sync::Lock;
use cgpu_core::ledger::Process;
use nvrm::about::Held;

/// The shortest pause between two audits for calls that would be refused.
const SHORTEST_PAUSE: Duration = Duration::from_millis(4);

/// The longest such pause, after an audit that took long.
const LONGEST_PAUSE: Duration = Duration::from_millis(100);

/// How often the driver is asked for each client, if no process died and no call would be refused.
const CLIENT_CHECK_PAUSE: Duration = Duration::from_secs(2);

/// The most objects of a GPU that the driver is asked for one by one in an audit.
pub(crate) const MOST_ASKED: usize = 2048;

/// How long the driver usage of a GPU may exceed what was asked for while a call hangs.
const DOUBT: Duration = Duration::from_millis(400);

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

/// The pids of dead processes to which the driver attributes memory, and since when.
#[derive(Debug, Default)]
pub(crate) struct LingeringPids(Lock<BTreeMap<u32, Instant>>);

impl LingeringPids {
    /// Notes that the driver attributes memory to `pids`, and to no others. Returns since how long, for each pid.
    pub(crate) fn note(&self, pids: &BTreeSet<u32>, now: Instant) -> Vec<(u32, Duration)> {
        let mut all = self.0.lock();
        all.retain(|pid, _| pids.contains(pid));
        let since = pids.iter().map(|pid| (*pid, *all.entry(*pid).or_insert(now)));
        since.map(|(pid, since)| (pid, now.saturating_duration_since(since))).collect()
    }
}

/// When audits ran, and what they doubt.
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

/// The pids of dead processes.
#[derive(Debug, Default)]
pub(crate) struct DeadPids {
    /// The pids of forgotten processes that no process has now.
    pub(crate) former: BTreeSet<u32>,
    /// Dead processes in the state whose pids other processes have now. The memory that the driver attributes to such a
    /// pid is the other process's.
    pub(crate) reused: BTreeSet<Process>,
}

impl DeadPids {
    /// The pids to which the driver attributes the container's memory.
    pub(crate) fn pids_to_ask(&self, state: &ContainerState) -> BTreeSet<u32> {
        let processes = state.processes.difference(&self.reused);
        let pids = processes.map(|process| process.pid());
        // A living process may have a client of a forgotten process.
        pids.chain(self.former.iter().copied()).collect()
    }
}

/// The driver usage of a GPU.
#[derive(Debug)]
pub(crate) struct Holdings {
    pub(crate) held: Vec<Held>,
    /// The memory of the container that is attributed to the monitor, because of pins, in bytes.
    pub(crate) own_bytes: u64,
}

/// The GPUs whose driver usage exceeds what was asked for while a call hangs, and since when.
#[derive(Debug, Default)]
pub(crate) struct Doubts(Lock<BTreeMap<usize, Instant>>);

impl Doubts {
    /// Notes that the driver usage of a GPU is too high. `true` if it has been for longer than [`DOUBT`].
    pub(crate) fn note(&self, gpu: usize) -> bool {
        let mut all = self.0.lock();
        all.entry(gpu).or_insert_with(Instant::now).elapsed() > DOUBT
    }

    /// Notes that the driver usage of a GPU is no more than was asked for.
    pub(crate) fn clear(&self, gpu: usize) {
        self.0.lock().remove(&gpu);
    }
}

/// What the checks of outside processes found.
#[derive(Debug, Default)]
pub(crate) struct EscapeFindings {
    /// Bytes of outside processes and of the container's dead ones, at the last check.
    pub(crate) usage: BTreeMap<u32, u64>,
    /// Bytes in use less those of all processes, up to a constant: the least since the last search that their growth
    /// caused. Smaller growth is not stored, so that it adds up.
    pub(crate) unexplained: Option<i128>,
    /// Checks in a row during which the bytes in use changed, so that they could not be compared.
    pub(crate) changed_checks: u32,
    /// Bytes in use less those of the container's processes, up to a constant: at the last full check, and its time.
    pub(crate) other_bytes: Option<(i128, Instant)>,
    pub(crate) checked: Option<Instant>,
    pub(crate) searched: Option<Instant>,
    /// Until when descriptors are searched for, because memory in use is not explained.
    pub(crate) suspicion: Option<Instant>,
    /// Pids of the host's programs that were logged.
    pub(crate) reported_holders: BTreeSet<i32>,
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

    /// A lingering pid is timed from when it was seen first until it is gone.
    #[test]
    fn lingering_pid_is_timed_from_its_first_sight() {
        let lingering = LingeringPids::default();
        let begin = Instant::now();
        let saw = |pids: &[u32], ms| {
            let pids = pids.iter().copied().collect();
            lingering.note(&pids, begin + Duration::from_millis(ms))
        };
        let ms = Duration::from_millis;
        assert_eq!(saw(&[7], 0), [(7, ms(0))]);
        assert_eq!(saw(&[7, 9], 300), [(7, ms(300)), (9, ms(0))]);
        assert_eq!(saw(&[9], 400), [(9, ms(100))]);
        assert_eq!(saw(&[7, 9], 500), [(7, ms(0)), (9, ms(200))], "another had the number");
    }
}
