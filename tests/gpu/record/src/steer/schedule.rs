//! What is done when.

use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::Over;
use crate::control::{Mode, Who};
use crate::desk::{B, Desk};

/// What is to be learnt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Plan {
    /// Whether slices divide the GPU, and channels can be taken off it.
    Divide,
    /// Which slices the driver takes, and what comes of them.
    Bounds,
    /// What it costs to put two on the GPU in turn.
    Turns,
    /// Whether a kernel of `b` that lasts outlasts its slice, by how it is preempted.
    Modes,
    /// What `a` has next to several programs of `b`.
    Forks,
    /// What `b` has, which rests.
    Rests,
    /// Whether the driver counts how often channels were disabled, and whether scheduling enables them.
    Counts,
}

/// What is done at the beginning of a phase.
#[derive(Debug, Clone, Copy)]
enum Act {
    Slices([u64; 2]),
    GetSlices,
    Found,
    Restart,
    Preempt,
    Disable,
    Enable,
    RestartB,
    ScheduleB,
    TryAll,
    DisableByAnother,
    EnableByAnother,
    Mode(Mode),
    /// For so many milliseconds each, for so many phases' time.
    Turns([u64; 2], u32),
    Samples(Who),
}

use Act::{
    Disable, DisableByAnother, Enable, EnableByAnother, Found, GetSlices, Preempt, Restart,
    RestartB, Samples, ScheduleB, Slices, TryAll, Turns,
};

type Phases = &'static [(&'static str, &'static [Act])];

/// All phases. Slices are as long as those that others measured with, so that switching costs little;
/// they are as they were found again before anything is disabled.
const DIVIDE: Phases = &[
    ("base", &[]),
    ("2:1 not committed", &[Slices([4000, 2000])]),
    ("2:1", &[Slices([4000, 2000]), Restart]),
    ("3:1 preempted", &[Slices([6000, 2000]), Preempt]),
    ("3:1", &[Slices([6000, 2000]), Restart]),
    ("1:3", &[Slices([2000, 6000]), Restart]),
    ("as found", &[Found, Restart]),
    ("off", &[Disable, RestartB]),
    ("on", &[Enable, RestartB]),
    ("off without restart", &[Disable]),
    ("on without restart", &[Enable]),
    ("tried", &[TryAll]),
];

const BOUNDS: Phases = &[
    ("base", &[GetSlices]),
    ("256/4096", &[Slices([256, 4096]), GetSlices]),
    ("512/4096", &[Slices([512, 4096]), GetSlices]),
    ("836/4096", &[Slices([836, 4096]), GetSlices]),
    ("1024/4096", &[Slices([1024, 4096]), GetSlices]),
    ("4096/4096", &[Slices([4096, 4096]), GetSlices, Samples(Who::Unprivileged)]),
    ("8192/4096", &[Slices([8192, 4096]), GetSlices]),
    ("12288/4096", &[Slices([12288, 4096]), GetSlices]),
    ("24576/4096", &[Slices([24576, 4096]), GetSlices, Samples(Who::Unprivileged)]),
    ("65536/16384", &[Slices([65536, 16384]), GetSlices]),
    ("102400/25600", &[Slices([102_400, 25_600]), GetSlices]),
    ("16384/16384", &[Slices([16384, 16384]), GetSlices, Samples(Who::Root)]),
    ("as found", &[Found, GetSlices]),
    ("a alone", &[Disable]),
    ("both again", &[Enable]),
];

const TURNS: Phases = &[
    ("base", &[]),
    ("off by another's client", &[DisableByAnother]),
    ("on by another's client", &[EnableByAnother]),
    ("turns of 16 and 32 ms", &[Turns([16, 32], 4)]),
    ("turns of 10 and 10 ms", &[Turns([10, 10], 4)]),
    ("turns of 5 and 5 ms", &[Turns([5, 5], 2)]),
    ("turns of 250 and 250 ms", &[Turns([250, 250], 4)]),
    ("turns of 25 and 25 ms", &[Turns([25, 25], 30)]),
    ("afterwards", &[]),
];

const MODES: Phases = &[
    ("base", &[]),
    ("slices", &[Slices([4096, 4096])]),
    ("waits for kernels", &[Act::Mode(Mode::Wfi)]),
    ("waits for blocks", &[Act::Mode(Mode::Cta)]),
    ("waits for nothing", &[Act::Mode(Mode::Cilp)]),
    ("off", &[Disable]),
    ("on", &[Enable]),
    ("as found", &[Found]),
];

const FORKS: Phases = &[
    ("base", &[]),
    ("4096/4096", &[Slices([4096, 4096])]),
    ("4096/1923", &[Slices([4096, 1923])]),
    ("4096/1024", &[Slices([4096, 1024])]),
    ("4096/836", &[Slices([4096, 836])]),
    ("4096/512", &[Slices([4096, 512])]),
    ("4096/293", &[Slices([4096, 293])]),
    ("16384/3908", &[Slices([16384, 3908]), Samples(Who::Unprivileged)]),
    ("as found", &[Found]),
    ("a alone", &[Disable]),
    ("both again", &[Enable]),
];

const RESTS: Phases = &[
    ("base", &[]),
    ("2048/2048", &[Slices([2048, 2048])]),
    ("4096/4096", &[Slices([4096, 4096])]),
    ("4096/8192", &[Slices([4096, 8192])]),
    ("8192/4096", &[Slices([8192, 4096])]),
    ("8192/8192", &[Slices([8192, 8192])]),
    ("16384/16384", &[Slices([16384, 16384])]),
    ("turns of 20 and 20 ms", &[Turns([20, 20], 1)]),
    ("turns of 16 and 32 ms", &[Turns([16, 32], 1)]),
    ("as found", &[Found]),
    ("a alone", &[Disable]),
    ("both again", &[Enable]),
];

const COUNTS: Phases = &[
    ("base", &[]),
    ("disabled twice", &[Disable, Disable]),
    ("then enabled once", &[Enable]),
    ("then enabled again", &[Enable]),
    ("then enabled twice more", &[Enable, Enable]),
    ("then disabled once", &[Disable]),
    ("then scheduled", &[ScheduleB]),
    ("then the runlist restarted", &[RestartB]),
    ("then enabled", &[Enable]),
    ("then enabled once more", &[Enable]),
    ("afterwards", &[]),
];

impl Plan {
    fn phases(self) -> Phases {
        match self {
            Plan::Divide => DIVIDE,
            Plan::Bounds => BOUNDS,
            Plan::Turns => TURNS,
            Plan::Modes => MODES,
            Plan::Forks => FORKS,
            Plan::Rests => RESTS,
            Plan::Counts => COUNTS,
        }
    }
}

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

/// Goes through all phases, unless `over` is set before.
pub(crate) fn run(plan: Plan, desk: &mut Desk, length: Duration, over: &Over) -> Vec<Phase> {
    let mut phases = Vec::new();
    for (name, acts) in plan.phases() {
        if over.is() {
            break;
        }
        desk.begin(name);
        let asked_ns = now_ns();
        let mut begin_ns = None;
        let mut well = true;
        for act in *acts {
            well &= match *act {
                Act::Slices(slices_us) => desk.set_slices(slices_us),
                Act::GetSlices => desk.get_slices(),
                Act::Found => desk.restore_slices(),
                Act::Restart => desk.restart(None),
                Act::Preempt => desk.preempt(),
                Act::Disable => desk.disable(B, true),
                Act::Enable => desk.disable(B, false),
                Act::RestartB => desk.restart(Some(B)),
                Act::ScheduleB => desk.schedule(B),
                Act::TryAll => desk.try_all(),
                Act::DisableByAnother => desk.disable_by_another(true),
                Act::EnableByAnother => desk.disable_by_another(false),
                Act::Mode(mode) => desk.set_mode(mode),
                Act::Turns(on_ms, times) => {
                    begin_ns = Some(now_ns());
                    let length = length * times;
                    desk.turns(on_ms.map(Duration::from_millis), length, &|| over.is())
                }
                // They are of the time before, so they come when the phase has ended.
                Act::Samples(_) => true,
            };
        }
        // The last is for what it tried, and turns have taken their time.
        let took = begin_ns.is_some() || acts.iter().any(|act| matches!(act, Act::TryAll));
        let begin_ns = begin_ns.unwrap_or_else(now_ns);
        let end = Instant::now() + if took { Duration::ZERO } else { length };
        while Instant::now() < end && !over.is() {
            std::thread::sleep(Duration::from_millis(10).min(end - Instant::now()));
        }
        let end_ns = now_ns();
        for act in *acts {
            if let Act::Samples(who) = *act {
                well &= desk.take_samples(who);
            }
        }
        phases.push(Phase { name, well, asked_ns, begin_ns, end_ns });
    }
    phases
}

pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
