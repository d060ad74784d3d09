//! Orders of calls, deaths and restarts.
//!
//! What has to hold after each step: the container has no more of the GPU than its quota, and nothing that it
//! has is missing from the account. In the end, when all its programs are gone: it has nothing, and nothing
//! is charged.

use proptest::prelude::*;

use super::{Death, Fate, Program, QUOTA, World};
use crate::monitor::model::program::Why;

const MIB: u64 = 1 << 20;

/// `NV_ERR_NO_MEMORY` (nverror.h): what a program is told that is over its quota.
const NO_MEMORY: Why = Why::Status(0x51);

/// Programs of a random container.
const PROGRAMS: usize = 3;

impl World {
    /// What has to hold at any time.
    #[track_caller]
    fn holds(&self) {
        assert!(self.used() <= QUOTA, "{} bytes are in use", self.used());
        assert!(self.charged() >= self.used(), "{} are charged of {}", self.charged(), self.used());
    }

    /// All programs are gone, and what they had.
    #[track_caller]
    fn ends(&self, programs: &[Program]) {
        programs.iter().filter(|program| program.is_alive()).for_each(|program| program.die(self));
        self.audit();
        assert_eq!((self.used(), self.charged()), (0, 0));
    }
}

#[test]
fn a_quota_holds_for_all_programs_together() {
    let mut world = World::new();
    let one = Program::start(&mut world);
    let two = Program::start(&mut world);
    let [a, b] = [one.handle(), two.handle()];
    assert_eq!(one.take(&mut world, a, 60 * MIB, Fate::Answered), Ok(a));
    assert_eq!(two.take(&mut world, b, 60 * MIB, Fate::Answered), Err(NO_MEMORY));
    assert_eq!((world.used(), world.charged()), (60 * MIB, 60 * MIB));
    assert_eq!(one.free(&mut world, a, Fate::Answered), Ok(()));
    assert_eq!(two.take(&mut world, b, QUOTA, Fate::Answered), Ok(b));
    world.ends(&[one, two]);
}

/// Another name keeps memory when the first is freed.
#[test]
fn memory_counts_until_its_last_name_is_freed() {
    let mut world = World::new();
    let one = Program::start(&mut world);
    let two = Program::start(&mut world);
    let [a, b, c] = [one.handle(), one.handle(), two.handle()];
    one.take(&mut world, a, 60 * MIB, Fate::Answered).unwrap();
    one.duplicate(&mut world, b, (one.client, a), Fate::Answered).unwrap();
    assert_eq!(world.charged(), 60 * MIB);
    one.free(&mut world, a, Fate::Answered).unwrap();
    assert_eq!(two.take(&mut world, c, 60 * MIB, Fate::Answered), Err(NO_MEMORY));
    one.free(&mut world, b, Fate::Answered).unwrap();
    assert_eq!(world.charged(), 0);
    two.take(&mut world, c, 60 * MIB, Fate::Answered).unwrap();
    // Two names of one handle: the driver refuses the second.
    let again = two.take(&mut world, c, 10 * MIB, Fate::Answered);
    assert!(matches!(again, Err(Why::Status(status)) if status != 0x51), "{again:?}");
    assert_eq!(world.charged(), 60 * MIB);
    world.ends(&[one, two]);
}

/// At each call of the driver that an allocation makes, before and after: the next worker makes it, or finds
/// it made, and its program has it either way.
#[test]
fn an_allocation_outlives_its_worker_wherever_that_dies() {
    for death in [Death::Before, Death::After] {
        let mut reached = 0;
        for nth in 0..8 {
            let mut world = World::new();
            let program = Program::start(&mut world);
            let handle = program.handle();
            let fate = Fate::WorkerDies { nth, death, waits: true };
            assert_eq!(program.take(&mut world, handle, 60 * MIB, fate), Ok(handle), "{fate:?}");
            reached += world.workers - 1;
            assert_eq!((world.used(), world.charged()), (60 * MIB, 60 * MIB), "{fate:?}");
            program.free(&mut world, handle, Fate::Answered).unwrap();
            assert_eq!((world.used(), world.charged()), (0, 0), "{fate:?}");
            world.ends(&[program]);
        }
        assert!(reached > 0, "no worker died");
    }
}

/// The same of a free, and of another name.
#[test]
fn a_free_and_a_name_outlive_their_worker_wherever_that_dies() {
    for (nth, death) in (0..6).flat_map(|nth| [(nth, Death::Before), (nth, Death::After)]) {
        let fate = Fate::WorkerDies { nth, death, waits: true };
        let mut world = World::new();
        let program = Program::start(&mut world);
        let [handle, name] = [program.handle(), program.handle()];
        program.take(&mut world, handle, 60 * MIB, Fate::Answered).unwrap();
        let named = program.duplicate(&mut world, name, (program.client, handle), fate);
        assert_eq!(named, Ok(name), "{fate:?}");
        assert_eq!(world.charged(), 60 * MIB, "{fate:?}");
        assert_eq!(program.free(&mut world, handle, fate), Ok(()), "{fate:?}");
        assert_eq!((world.used(), world.charged()), (60 * MIB, 60 * MIB), "{fate:?}");
        assert_eq!(program.free(&mut world, name, fate), Ok(()), "{fate:?}");
        assert_eq!((world.used(), world.charged()), (0, 0), "{fate:?}");
        world.ends(&[program]);
    }
}

/// What is freed with what is above it is freed, whichever that is.
#[test]
fn freeing_a_device_or_a_client_frees_what_is_below() {
    for frees_client in [false, true] {
        let mut world = World::new();
        let program = Program::start(&mut world);
        let [a, b] = [program.handle(), program.handle()];
        program.take(&mut world, a, 60 * MIB, Fate::Answered).unwrap();
        program.duplicate(&mut world, b, (program.client, a), Fate::Answered).unwrap();
        let above = if frees_client { program.client } else { program.device };
        program.free(&mut world, above, Fate::Answered).unwrap();
        assert_eq!((world.used(), world.charged()), (0, 0));
        world.ends(&[program]);
    }
}

/// Nobody has a name of another's memory who wasn't allowed to.
#[test]
fn another_programs_memory_has_no_name_here() {
    let mut world = World::new();
    let one = Program::start(&mut world);
    let two = Program::start(&mut world);
    let [a, b] = [one.handle(), two.handle()];
    one.take(&mut world, a, 60 * MIB, Fate::Answered).unwrap();
    let named = two.duplicate(&mut world, b, (one.client, a), Fate::Answered);
    assert!(matches!(named, Err(Why::Status(_))), "{named:?}");
    one.die(&world);
    world.audit();
    assert_eq!((world.used(), world.charged()), (0, 0));
    assert_eq!(two.take(&mut world, b, QUOTA, Fate::Answered), Ok(b));
    world.ends(&[one, two]);
}

/// A channel outside a group takes memory that no figure shows, so one is counted before the driver is asked. It is
/// taken off the GPU in turns: so it is entered where the driver says that its client is the caller's, and not
/// where it has a name of somebody else's, nor below such a name.
#[test]
fn a_channel_is_counted_whatever_its_name_and_entered_where_it_is_the_callers() {
    const ANOTHERS: u32 = 0xc1d0_ffff;
    let mut world = World::new();
    let program = Program::start(&mut world);
    let [own, below_nothing] = [program.handle(), program.handle()];
    let counts = |world: &World| {
        let books = world.shared.books();
        (books.groups.count(0), books.outside_groups(0))
    };
    assert!(program.channel(&mut world, program.client, 0x77, below_nothing).is_err());
    assert!(program.channel(&mut world, ANOTHERS, 0x5c00_0001, 0x5c00_0002).is_err());
    assert!(program.channel(&mut world, ANOTHERS, 0x5c00_0002, 0x5c00_0003).is_err());
    assert_eq!(counts(&world), (3, vec![]));
    assert_eq!(program.channel(&mut world, program.client, program.device, own), Ok(own));
    assert_eq!(counts(&world), (4, vec![(program.client, own)]));
    world.ends(&[program]);
}

/// The reply of an allocation is lost: whoever makes the call again has the memory, once; and whoever goes
/// on without it has none.
#[test]
fn memory_whose_reply_was_lost_is_its_programs_or_nobodys() {
    for makes_it_again in [true, false] {
        let mut world = World::new();
        let program = Program::start(&mut world);
        let [handle, other] = [program.handle(), program.handle()];
        let lost = program.take(&mut world, handle, 60 * MIB, Fate::ReplyIsLost);
        assert_eq!(lost, Err(Why::NoAnswer));
        world.holds();
        if makes_it_again {
            let again = program.take(&mut world, handle, 60 * MIB, Fate::Answered);
            assert_eq!(again, Ok(handle));
            assert_eq!((world.used(), world.charged()), (60 * MIB, 60 * MIB));
        } else {
            assert_eq!(program.take(&mut world, other, QUOTA, Fate::Answered), Ok(other));
            assert_eq!((world.used(), world.charged()), (QUOTA, QUOTA));
        }
        world.ends(&[program]);
    }
}

/// The reply was sent, and is lost: the kernel makes the call again, with the answer in its struct.
#[test]
fn a_call_whose_answer_was_lost_is_done_once() {
    let mut world = World::new();
    let program = Program::start(&mut world);
    let [handle, name] = [program.handle(), program.handle()];
    assert_eq!(program.take(&mut world, handle, 60 * MIB, Fate::AnswerIsLost), Ok(handle));
    assert_eq!((world.used(), world.charged()), (60 * MIB, 60 * MIB));
    let source = (program.client, handle);
    assert_eq!(program.duplicate(&mut world, name, source, Fate::AnswerIsLost), Ok(name));
    assert_eq!(program.free(&mut world, handle, Fate::AnswerIsLost), Ok(()));
    assert_eq!((world.used(), world.charged()), (60 * MIB, 60 * MIB));
    assert_eq!(program.free(&mut world, name, Fate::AnswerIsLost), Ok(()));
    assert_eq!((world.used(), world.charged()), (0, 0));
    world.ends(&[program]);
}

/// The signal's handler, or a pause of the container, takes as long as it likes.
#[test]
fn a_reply_that_nobody_took_waits_for_its_thread_and_goes_with_it() {
    let mut world = World::new();
    let program = Program::start(&mut world);
    let handle = program.handle();
    let lost = program.take(&mut world, handle, 60 * MIB, Fate::ReplyIsLost);
    assert_eq!(lost, Err(Why::NoAnswer));
    world.shared.undo_unclaimed();
    assert_eq!((world.used(), world.charged()), (60 * MIB, 60 * MIB));
    assert_eq!(program.take(&mut world, handle, 60 * MIB, Fate::ReplyIsLost), Err(Why::NoAnswer));
    program.die(&world);
    world.shared.undo_unclaimed();
    assert!(world.shared.unclaimed.is_empty());
    world.ends(&[program]);
}

/// One step of a random container.
#[derive(Debug, Clone)]
enum Step {
    Take {
        program: usize,
        mib: u64,
        fate: Fate,
    },
    Free {
        program: usize,
        which: usize,
        fate: Fate,
    },
    Duplicate {
        program: usize,
        which: usize,
        fate: Fate,
    },
    /// A program is killed, and another takes its place.
    Die {
        program: usize,
    },
    Audit,
    Restart,
}

fn any_fate() -> impl Strategy<Value = Fate> {
    let death = prop_oneof![Just(Death::Before), Just(Death::After)];
    let dies = (0_u32..4, death, any::<bool>());
    let dies = dies.prop_map(|(nth, death, waits)| Fate::WorkerDies { nth, death, waits });
    prop_oneof![
        6 => Just(Fate::Answered),
        1 => Just(Fate::AnswerIsLost),
        1 => Just(Fate::Interrupted),
        1 => Just(Fate::ReplyIsLost),
        1 => dies,
    ]
}

fn any_step() -> impl Strategy<Value = Step> {
    let program = || 0..PROGRAMS;
    prop_oneof![
        6 => (program(), 1_u64..60, any_fate())
            .prop_map(|(program, mib, fate)| Step::Take { program, mib, fate }),
        4 => (program(), 0_usize..8, any_fate())
            .prop_map(|(program, which, fate)| Step::Free { program, which, fate }),
        2 => (program(), 0_usize..8, any_fate())
            .prop_map(|(program, which, fate)| Step::Duplicate { program, which, fate }),
        1 => program().prop_map(|program| Step::Die { program }),
        1 => Just(Step::Audit),
        1 => Just(Step::Restart),
    ]
}

/// What a program believes to have: handles. One of which it knows nothing is one it doesn't use again.
#[derive(Debug, Default)]
struct Believes {
    handles: Vec<u32>,
}

impl Believes {
    fn pick(&self, which: usize) -> Option<u32> {
        (!self.handles.is_empty()).then(|| self.handles[which % self.handles.len()])
    }
}

fn play(steps: &[Step]) {
    let mut world = World::new();
    let mut programs: Vec<Program> = (0..PROGRAMS).map(|_| Program::start(&mut world)).collect();
    let mut believes: Vec<Believes> = (0..PROGRAMS).map(|_| Believes::default()).collect();
    for step in steps {
        match *step {
            Step::Take { program: at, mib, fate } => {
                let handle = programs[at].handle();
                if let Ok(handle) = programs[at].take(&mut world, handle, mib * MIB, fate) {
                    believes[at].handles.push(handle);
                }
            }
            Step::Free { program: at, which, fate } => {
                let Some(handle) = believes[at].pick(which) else { continue };
                let done = programs[at].free(&mut world, handle, fate);
                // Whoever gets no answer asks once more; nothing of the kind is there then, or is.
                let done = match done {
                    Err(Why::NoAnswer) => programs[at].free(&mut world, handle, Fate::Answered),
                    done => done,
                };
                assert!(done.is_ok() || fate != Fate::Answered, "{step:?}: {done:?}");
                believes[at].handles.retain(|known| *known != handle);
            }
            Step::Duplicate { program: at, which, fate } => {
                let Some(of) = believes[at].pick(which) else { continue };
                let (handle, source) = (programs[at].handle(), (programs[at].client, of));
                if programs[at].duplicate(&mut world, handle, source, fate).is_ok() {
                    believes[at].handles.push(handle);
                }
            }
            Step::Die { program: at } => {
                programs[at].die(&world);
                programs[at] = Program::start(&mut world);
                believes[at] = Believes::default();
            }
            Step::Audit => world.audit(),
            Step::Restart => world.restart(),
        }
        world.holds();
    }
    world.ends(&programs);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn no_order_of_calls_deaths_and_restarts_gives_more_than_the_quota(
        steps in proptest::collection::vec(any_step(), 1..40),
    ) {
        play(&steps);
    }
}
