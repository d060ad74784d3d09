//! What is done when.

use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::Over;
use crate::desk::Desk;

/// The program that is taken off.
const B: usize = 1;

/// What is done at the beginning of a phase.
#[derive(Debug, Clone, Copy)]
enum Act {
    Slices([u64; 2]),
    Found,
    Restart,
    Preempt,
    Disable,
    Enable,
    RestartB,
    TryAll,
}

/// All phases. Slices are as long as those that others measured with, so that switching costs little;
/// they are as they were found again before anything is disabled.
const PHASES: &[(&str, &[Act])] = &[
    ("base", &[]),
    ("2:1 not committed", &[Act::Slices([4000, 2000])]),
    ("2:1", &[Act::Slices([4000, 2000]), Act::Restart]),
    ("3:1 preempted", &[Act::Slices([6000, 2000]), Act::Preempt]),
    ("3:1", &[Act::Slices([6000, 2000]), Act::Restart]),
    ("1:3", &[Act::Slices([2000, 6000]), Act::Restart]),
    ("as found", &[Act::Found, Act::Restart]),
    ("off", &[Act::Disable, Act::RestartB]),
    ("on", &[Act::Enable, Act::RestartB]),
    ("off without restart", &[Act::Disable]),
    ("on without restart", &[Act::Enable]),
    ("tried", &[Act::TryAll]),
];

/// A phase; nanoseconds of CLOCK_MONOTONIC.
#[derive(Debug, Serialize)]
pub(crate) struct Phase {
    name: &'static str,
    /// Whether the driver said of each call that all is well.
    well: bool,
    /// Before the first call.
    asked_ns: u64,
    /// After the last.
    begin_ns: u64,
    end_ns: u64,
}

/// Goes through all phases, unless it is over before.
pub(crate) fn run(desk: &mut Desk, length: Duration, over: &Over) -> Vec<Phase> {
    let mut phases = Vec::new();
    for (name, acts) in PHASES {
        if over.is() {
            break;
        }
        desk.begin(name);
        let asked_ns = now_ns();
        let mut well = true;
        for act in *acts {
            well &= match *act {
                Act::Slices(slices_us) => desk.set_slices(slices_us),
                Act::Found => desk.restore_slices(),
                Act::Restart => desk.restart(None),
                Act::Preempt => desk.preempt(),
                Act::Disable => desk.disable(B, true),
                Act::Enable => desk.disable(B, false),
                Act::RestartB => desk.restart(Some(B)),
                Act::TryAll => desk.try_all(),
            };
        }
        let begin_ns = now_ns();
        // The last is for what it tried, not for what came of it.
        let tries = acts.iter().any(|act| matches!(act, Act::TryAll));
        let end = Instant::now() + if tries { Duration::ZERO } else { length };
        while Instant::now() < end && !over.is() {
            std::thread::sleep(Duration::from_millis(10).min(end - Instant::now()));
        }
        phases.push(Phase { name, well, asked_ns, begin_ns, end_ns: now_ns() });
    }
    phases
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
