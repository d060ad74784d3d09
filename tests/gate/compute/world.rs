//! Containers that share a GPU, in virtual time: what cgpu decides, on a runlist that divides as an H100
//! was seen to divide (`cgpu_sim::runlist`).
//!
//! Decisions are the product's (`cgpu_core::sched`); what they lead to is not a monitor's doing here, but this
//! module's: slices are set at once, and channels go off and on as late or early as calls were seen to
//! end. The tests of the monitor show that it asks for these.

use cgpu_core::plan::GpuRules;
use cgpu_core::sched::{
    Frame, Idle, Span, Tenant, batch_windows, batches, frame, periods, slice_us,
};
use cgpu_sim::runlist::{Name, Rules, Runlist};

/// What CUDA asks for if no monitor sets slices, in microseconds.
const CUDA_US: u64 = 2048;

/// How much before its time a container is back, so that the GPU isn't idle between two: half the time that
/// the other's call takes.
const EARLY_US: u64 = 335;

/// How far calls end from when they were to, each way, in microseconds.
const OFF_BY_US: u64 = 300;

/// What a program does on the GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Work {
    /// It always has some.
    Always,
    /// It is busy and idle in turn, so many microseconds, give or take a fifth.
    Bursts(u64, u64),
    /// It has a context, and does nothing.
    Never,
}

#[derive(Debug, Clone)]
pub(crate) struct Container {
    pub(crate) weight: u32,
    pub(crate) high_priority: bool,
    pub(crate) programs: Vec<Work>,
}

impl Container {
    /// With so many programs that always have work.
    pub(crate) fn busy(weight: u32, programs: usize) -> Self {
        Container { weight, high_priority: false, programs: vec![Work::Always; programs] }
    }

    pub(crate) fn does(weight: u32, work: Work) -> Self {
        Container { weight, high_priority: false, programs: vec![work] }
    }
}

/// A GPU and its settings.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gpu {
    pub(crate) policy: u32,
    pub(crate) max_inst: u32,
    pub(crate) prio_ratio: u32,
    pub(crate) idle: Idle,
}

impl Gpu {
    pub(crate) fn of(policy: u32) -> Self {
        Gpu { policy, max_inst: 20, prio_ratio: 80, idle: Idle::Yield }
    }
}

/// Numbers that look like chance, and are the same each time.
struct Chance(u64);

impl Chance {
    /// From 0 to 1000.
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % 1001
    }

    /// Give or take a fifth.
    fn about(&mut self, us: u64) -> u64 {
        us * (4000 + 2 * self.next()) / 5000
    }
}

/// A program, and when it has work next.
struct Program {
    name: Name,
    work: Work,
    wakes_us: u64,
}

/// What containers had of the GPU.
#[derive(Debug, Clone)]
pub(crate) struct Had {
    /// Of all the time, by container, from 0 to 1.
    pub(crate) parts: Vec<f64>,
    /// The same of each time window of so many milliseconds.
    pub(crate) pieces: Vec<Vec<f64>>,
}

impl Had {
    pub(crate) fn sum(&self) -> f64 {
        self.parts.iter().sum()
    }
}

/// Containers on a GPU.
struct World<'a> {
    containers: &'a [Container],
    slices_us: Vec<u64>,
    /// By container and program: from when to when it may run, in microseconds, in order.
    windows: Vec<Vec<Vec<(u64, u64)>>>,
    chance: Chance,
}

impl World<'_> {
    fn rules(&self, (container, program): Name, now_us: u64) -> Rules {
        let (at, program) = (container as usize - 1, program as usize - 1);
        let windows = &self.windows[at][program];
        let runs = windows.iter().any(|(from, to)| (*from..*to).contains(&now_us));
        Rules { slice_us: self.slices_us[at], runs, interrupts: true }
    }

    /// When a container's time window begins or ends next.
    fn next_turn(&self, now_us: u64) -> Option<u64> {
        let edges = self.windows.iter().flatten().flatten().flat_map(|(from, to)| [*from, *to]);
        edges.filter(|edge| *edge > now_us).min()
    }
}

/// From when to when somebody with these spans of a frame may run, until some time: a little early, and
/// every call a little off.
fn windows(frame_us: u64, spans: &[Span], end_us: u64, chance: &mut Chance) -> Vec<(u64, u64)> {
    let mut windows: Vec<(u64, u64)> = Vec::new();
    for begin_us in (0..end_us).step_by(usize::try_from(frame_us).expect("less than a second")) {
        for span in spans {
            let (from, to) = (begin_us + span.from_us, begin_us + span.to_us);
            match windows.last_mut().filter(|last| last.1 == from) {
                Some(last) => last.1 = to,
                None => windows.push((from, to)),
            }
        }
    }
    let mut off_by =
        |edge: u64| (edge + chance.next() * 2 * OFF_BY_US / 1000).saturating_sub(OFF_BY_US);
    let moved = windows.into_iter();
    moved.map(|(from, to)| (off_by(from).saturating_sub(EARLY_US), off_by(to))).collect()
}

/// Lets containers share a GPU for `all_ms` milliseconds; each `piece_ms` of them is also counted separately.
pub(crate) fn share(gpu: Gpu, containers: &[Container], all_ms: u64, piece_ms: u64) -> Had {
    let tenant = |container: &Container| Tenant {
        weight: container.weight,
        high_priority: container.high_priority,
    };
    let busy = |container: &Container| {
        container.programs.iter().filter(|work| **work != Work::Never).count()
    };
    let tenants: Vec<Tenant> = containers.iter().map(tenant).collect();
    let rules = GpuRules { policy: gpu.policy, max_inst: gpu.max_inst, prio_ratio: gpu.prio_ratio };
    let frame = frame(rules, gpu.idle, &tenants, &Frame::default(), &[]);
    let rounds = periods(rules, frame.is_some(), &tenants);
    let slices_us = containers.iter().enumerate().map(|(at, container)| {
        rounds.as_ref().map_or(CUDA_US, |rounds| slice_us(rounds[at], busy(container)))
    });
    let mut chance = Chance(7);
    let end_us = 1000 * all_ms;
    let always = vec![(0, u64::MAX)];
    let mut all = Vec::new();
    for (at, container) in containers.iter().enumerate() {
        let programs = container.programs.len();
        let of_programs = match (&frame, &rounds) {
            (Some(frame), _) => {
                vec![windows(frame.us, &frame.spans[at], end_us, &mut chance); programs]
            }
            (None, Some(rounds)) if batches(rounds[at], busy(container)) > 1 => {
                let batches = batches(rounds[at], busy(container));
                let each = busy(container).div_ceil(batches);
                let mut of_batch = |cohort| {
                    let (frame_us, span) = batch_windows(cohort, batches);
                    windows(frame_us, &[span], end_us, &mut chance)
                };
                let of_cohorts: Vec<_> = (0..batches).map(&mut of_batch).collect();
                (0..programs).map(|program| of_cohorts[program / each].clone()).collect()
            }
            (None, _) => vec![always.clone(); programs],
        };
        all.push(of_programs);
    }
    World { containers, slices_us: slices_us.collect(), windows: all, chance }.run(all_ms, piece_ms)
}

impl World<'_> {
    fn run(&mut self, all_ms: u64, piece_ms: u64) -> Had {
        let mut runlist = Runlist::default();
        let mut programs = Vec::new();
        for (container, of) in (1..).zip(self.containers) {
            for (program, work) in (1..).zip(&of.programs) {
                programs.push(Program { name: (container, program), work: *work, wakes_us: 0 });
            }
        }
        let mut pieces = Vec::new();
        let mut before = vec![0; self.containers.len()];
        for piece in 1..=all_ms / piece_ms {
            self.run_until(&mut runlist, &mut programs, piece * piece_ms * 1000);
            let busy: Vec<u64> = (1..)
                .take(self.containers.len())
                .map(|container| {
                    let of = programs.iter().filter(|program| program.name.0 == container);
                    of.map(|program| runlist.busy_ns(program.name)).sum()
                })
                .collect();
            let parts = busy.iter().zip(&before);
            let part =
                |(now, before): (&u64, &u64)| (now - before) as f64 / (piece_ms * 1_000_000) as f64;
            pieces.push(parts.map(part).collect());
            before = busy;
        }
        let parts = before.iter().map(|busy_ns| *busy_ns as f64 / (all_ms * 1_000_000) as f64);
        Had { parts: parts.collect(), pieces }
    }

    fn run_until(&mut self, runlist: &mut Runlist, programs: &mut [Program], end_us: u64) {
        while runlist.now_ns() / 1000 < end_us {
            let now_us = runlist.now_ns() / 1000;
            runlist.change(|name| Some(self.rules(name, now_us)));
            for program in programs.iter_mut().filter(|program| program.wakes_us <= now_us) {
                let (kernel_us, count) = match program.work {
                    Work::Always => (500, 1 << 40),
                    Work::Bursts(work_us, _) => (self.chance.about(work_us), 1),
                    Work::Never => (0, 0),
                };
                let rules = self.rules(program.name, now_us);
                runlist.submit(program.name, rules, kernel_us * 1000, count);
                program.wakes_us = u64::MAX;
            }
            let wakes = programs.iter().map(|program| program.wakes_us);
            let next_us =
                wakes.chain(self.next_turn(now_us)).chain([end_us]).min().unwrap_or(end_us);
            let until_ns = next_us.max(now_us + 1) * 1000;
            while runlist.now_ns() < until_ns {
                let Some(done) = runlist.step(until_ns) else { continue };
                let program = programs.iter_mut().find(|program| program.name == done);
                if let Some(program) = program
                    && let Work::Bursts(_, rest_us) = program.work
                {
                    program.wakes_us = runlist.now_ns() / 1000 + self.chance.about(rest_us);
                    break;
                }
            }
        }
    }
}
