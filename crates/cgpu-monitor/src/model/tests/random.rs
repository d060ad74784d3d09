//! Random orders of calls, deaths and updates, on two GPUs.

use proptest::prelude::*;

use super::{MIB, Why};
use crate::model::{Fate, Program, World};

/// How many programs a random container has.
const PROGRAMS: usize = 3;

/// The container's quotas of the two GPUs.
const QUOTAS: [u64; 2] = [100 * MIB, 70 * MIB];

/// Where memory is mapped: each program has `PLACES` places of `PLACE` bytes from `BASE` on.
const BASE: u64 = 0x10_0000_0000;
const PLACES: u64 = 4;
const PLACE: u64 = 64 * MIB;

/// The action of a step. Its numbers choose among what exists.
#[derive(Debug, Clone, Copy)]
enum Does {
    Take { gpu: usize, mib: u64 },
    Free { which: usize },
    Duplicate { which: usize, gpu: usize },
    Export { which: usize, file: usize },
    Import { file: usize },
    Map { which: usize, place: u64, mib: u64 },
    Unmap { place: u64, mib: u64 },
    FreeRange { place: u64 },
    Restarted,
    Die,
    Audit,
    Update,
}

/// A step of a random container: mostly a program's call.
#[derive(Debug, Clone, Copy)]
struct RandomStep {
    program: usize,
    does: Does,
    fate: Fate,
}

fn any_fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        6 => Just(Fate::Answered),
        1 => Just(Fate::AnswerIsLost),
        1 => Just(Fate::Interrupted),
        1 => Just(Fate::ReplyIsLost),
    ]
}

fn any_step() -> impl Strategy<Value = RandomStep> {
    let (gpu, which, mib) = (|| 0_usize..2, || 0_usize..8, || 1_u64..60);
    let (file, place) = (|| 0_usize..2, || 0..PLACES);
    let does = prop_oneof![
        8 => (gpu(), mib()).prop_map(|(gpu, mib)| Does::Take { gpu, mib }),
        6 => which().prop_map(|which| Does::Free { which }),
        3 => (which(), gpu()).prop_map(|(which, gpu)| Does::Duplicate { which, gpu }),
        2 => (which(), file()).prop_map(|(which, file)| Does::Export { which, file }),
        2 => file().prop_map(|file| Does::Import { file }),
        4 => (which(), place(), mib())
            .prop_map(|(which, place, mib)| Does::Map { which, place, mib }),
        2 => (place(), mib()).prop_map(|(place, mib)| Does::Unmap { place, mib }),
        1 => place().prop_map(|place| Does::FreeRange { place }),
        1 => Just(Does::Restarted),
        1 => Just(Does::Die),
        1 => Just(Does::Audit),
        1 => Just(Does::Update),
    ];
    (0..PROGRAMS, does, any_fate()).prop_map(|(program, does, fate)| RandomStep {
        program,
        does,
        fate,
    })
}

/// A program, and the handles that it believes to have. It doesn't use a handle again of which it knows nothing.
struct Player<'w> {
    program: Program<'w>,
    handles: Vec<u32>,
}

impl<'w> Player<'w> {
    fn new(world: &'w World) -> Self {
        let program = world.program();
        program.start_uvm().expect("it is initialized");
        [0, 1].iter().for_each(|gpu| program.register(*gpu).expect("the GPU is registered"));
        (0..PLACES).for_each(|place| program.range(BASE + place * PLACE, PLACE).expect("a range"));
        Player { program, handles: Vec::new() }
    }

    fn pick(&self, which: usize) -> Option<u32> {
        (!self.handles.is_empty()).then(|| self.handles[which % self.handles.len()])
    }

    fn calls(&mut self, does: Does, fate: Fate) {
        let program = &self.program;
        let handle = program.handle();
        let of = |which| self.pick(which).unwrap_or(handle);
        let at = |place| BASE + place * PLACE;
        let made = match does {
            Does::Take { gpu, mib } => {
                program.fated(fate).take_below(program.device_of(gpu), handle, mib * MIB)
            }
            Does::Duplicate { which, gpu } => {
                let source = (program.client(), of(which));
                program.fated(fate).duplicate_below(program.device_of(gpu), handle, source)
            }
            Does::Import { file } => program.fated(fate).import(handle, file),
            Does::Export { which, file } => {
                let _ = program.fated(fate).export(of(which), file);
                return;
            }
            Does::Map { which, place, mib } => {
                let gpu = which % 2;
                let _ = program.fated(fate).map(&[gpu], at(place), mib * MIB, of(which));
                return;
            }
            Does::Unmap { place, mib } => {
                let _ = program.fated(fate).unmap(0, at(place), mib * MIB);
                return;
            }
            Does::FreeRange { place } => {
                let _ = program.fated(fate).free_range(at(place), PLACE);
                return;
            }
            Does::Free { which } => return self.frees(which, fate),
            _ => return,
        };
        self.handles.extend(made.ok());
    }

    fn frees(&mut self, which: usize, fate: Fate) {
        let Some(handle) = self.pick(which) else { return };
        // A program that gets no answer asks once more. The object may be freed by then or not.
        let done = match self.program.fated(fate).free(handle) {
            Err(Why::NoAnswer) => self.program.free(handle),
            done => done,
        };
        assert!(done.is_ok() || fate != Fate::Answered, "{handle:#x}: {done:?}");
        self.handles.retain(|known| *known != handle);
    }
}

fn play(steps: &[RandomStep]) {
    let world = World::with(&QUOTAS.map(|quota| (1 << 30, quota)));
    let mut players: Vec<Player<'_>> = (0..PROGRAMS).map(|_| Player::new(&world)).collect();
    for RandomStep { program, does, fate } in steps {
        let player = &mut players[*program];
        match does {
            Does::Restarted => {
                player.program.restart();
                player.handles.clear();
            }
            Does::Die => {
                player.program.die();
                *player = Player::new(&world);
            }
            Does::Audit => world.audit(),
            Does::Update => world.update(),
            call => player.calls(*call, *fate),
        }
        world.holds();
    }
    let programs: Vec<Program<'_>> = players.into_iter().map(|player| player.program).collect();
    world.ends(&programs);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// No order of calls, deaths and updates gives more than the quota.
    #[test]
    fn no_order_of_calls_exceeds_the_quota(
        steps in proptest::collection::vec(any_step(), 1..40),
    ) {
        play(&steps);
    }
}
