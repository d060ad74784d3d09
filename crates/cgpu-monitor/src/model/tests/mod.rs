//! Orders of calls, deaths of programs, and updates.
//!
//! After each step the container has no more of each GPU than its quota, and all that it has is charged. In the end,
//! when all its programs have exited, it has nothing, and nothing is charged.

mod attacks;
mod devices;
mod exports;
mod random;
mod uvm;

use super::program::Why;
use super::{Fate, Program, QUOTA, World};
use crate::call_counters::{self, Counted};
use crate::case::{has_unclaimed, undo_unclaimed};

const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// `NV_ERR_NO_MEMORY` (nverror.h): the status that a program over its quota gets.
const NO_MEMORY: Why = Why::Status(0x51);

impl World {
    /// Checks what has to be true of each GPU at any time.
    #[track_caller]
    fn holds(&self) {
        for gpu in 0..self.gpus() {
            let (used, charged) = (self.used_of(gpu), self.charged_of(gpu));
            assert!(used <= self.quota_of(gpu), "{used} bytes of GPU {gpu} are in use");
            assert!(charged >= used, "{charged} bytes of GPU {gpu} are charged of {used}");
        }
    }

    /// Checks that so many bytes of the first GPU are in use and charged.
    #[track_caller]
    fn has(&self, bytes: u64) {
        assert_eq!((self.used(), self.charged()), (bytes, bytes), "in use, and charged");
    }

    /// Checks that nothing is left when all programs have exited.
    #[track_caller]
    fn ends(&self, programs: &[Program<'_>]) {
        programs.iter().filter(|program| program.is_alive()).for_each(Program::die);
        self.rest();
        // Files are released only when the monitor has searched for them.
        if self.retained_files() > 0 {
            self.scan();
        }
        for gpu in 0..self.gpus() {
            assert_eq!((self.used_of(gpu), self.charged_of(gpu)), (0, 0), "GPU {gpu}");
        }
    }
}

impl Program<'_> {
    /// Checks that the program gets `bytes` of the first GPU and not a page more. Gives the memory back.
    #[track_caller]
    fn gets_exactly(&self, bytes: u64) {
        let handle = self.handle();
        assert_eq!(self.take(handle, bytes + PAGE), Err(NO_MEMORY));
        if bytes > 0 {
            assert_eq!(self.take(handle, bytes), Ok(handle));
            assert_eq!(self.free(handle), Ok(()));
        }
    }
}

#[test]
fn a_quota_holds_for_all_programs_together() {
    let world = World::new();
    let one = world.program();
    let two = world.program();
    let [a, b] = [one.handle(), two.handle()];
    assert_eq!(one.take(a, 60 * MIB), Ok(a));
    assert_eq!(two.take(b, 60 * MIB), Err(NO_MEMORY));
    assert_eq!((world.used(), world.charged()), (60 * MIB, 60 * MIB));
    assert_eq!(one.free(a), Ok(()));
    assert_eq!(two.take(b, QUOTA), Ok(b));
    world.ends(&[one, two]);
}

/// A duplicate keeps the memory alive when the original is freed.
#[test]
fn memory_counts_until_its_last_name_is_freed() {
    let world = World::new();
    let one = world.program();
    let two = world.program();
    let [a, b, c] = [one.handle(), one.handle(), two.handle()];
    one.take(a, 60 * MIB).unwrap();
    one.duplicate(b, (one.client(), a)).unwrap();
    assert_eq!(world.charged(), 60 * MIB);
    one.free(a).unwrap();
    assert_eq!(two.take(c, 60 * MIB), Err(NO_MEMORY));
    one.free(b).unwrap();
    assert_eq!(world.charged(), 0);
    two.take(c, 60 * MIB).unwrap();
    // The handle is used already: the driver refuses the second object.
    let again = two.take(c, 10 * MIB);
    assert!(matches!(again, Err(Why::Status(status)) if status != 0x51), "{again:?}");
    assert_eq!(world.charged(), 60 * MIB);
    world.ends(&[one, two]);
}

/// What is freed with an object above it is freed, whichever object that is.
#[test]
fn freed_device_or_client_frees_its_children() {
    for frees_client in [false, true] {
        let world = World::new();
        let program = world.program();
        let [a, b] = [program.handle(), program.handle()];
        program.take(a, 60 * MIB).unwrap();
        program.duplicate(b, (program.client(), a)).unwrap();
        let above = if frees_client { program.client() } else { program.device() };
        program.free(above).unwrap();
        assert_eq!((world.used(), world.charged()), (0, 0));
        world.ends(&[program]);
    }
}

/// No program gets a name of another's memory without permission.
#[test]
fn another_programs_memory_has_no_name_here() {
    let world = World::new();
    let one = world.program();
    let two = world.program();
    let [a, b] = [one.handle(), two.handle()];
    one.take(a, 60 * MIB).unwrap();
    let named = two.duplicate(b, (one.client(), a));
    assert!(matches!(named, Err(Why::Status(_))), "{named:?}");
    one.die();
    world.audit();
    assert_eq!((world.used(), world.charged()), (0, 0));
    assert_eq!(two.take(b, QUOTA), Ok(b));
    world.ends(&[one, two]);
}

/// A channel outside a group takes memory that no driver usage shows, so it is counted before the driver is asked. The
/// monitor takes such channels off the GPU in time windows. So one is entered only if the driver confirms that its
/// client is the caller's, not if it has a handle of another program's, nor below such a handle.
#[test]
fn channels_are_counted_but_only_the_callers_entered() {
    const ANOTHERS: u32 = 0xc1d0_ffff;
    let world = World::new();
    let program = world.program();
    let [own, below_nothing] = [program.handle(), program.handle()];
    let counts = |world: &World| {
        let service = world.service();
        let state = service.monitor.state();
        (state.groups.count(0), state.outside_groups(0))
    };
    assert!(program.channel(program.client(), 0x77, below_nothing).is_err());
    assert!(program.channel(ANOTHERS, 0x5c00_0001, 0x5c00_0002).is_err());
    assert!(program.channel(ANOTHERS, 0x5c00_0002, 0x5c00_0003).is_err());
    assert_eq!(counts(&world), (3, vec![]));
    assert_eq!(program.channel(program.client(), program.device(), own), Ok(own));
    assert_eq!(counts(&world), (4, vec![(program.client(), own)]));
    world.ends(&[program]);
}

/// The reply of an allocation is lost: a program that makes the call again has the memory once, and a program that goes
/// on without it has none.
#[test]
fn lost_replys_memory_is_claimed_or_freed() {
    for makes_it_again in [true, false] {
        let world = World::new();
        let program = world.program();
        let [handle, other] = [program.handle(), program.handle()];
        let lost = program.fated(Fate::ReplyIsLost).take(handle, 60 * MIB);
        assert_eq!(lost, Err(Why::NoAnswer));
        world.holds();
        if makes_it_again {
            let again = program.take(handle, 60 * MIB);
            assert_eq!(again, Ok(handle));
            assert_eq!((world.used(), world.charged()), (60 * MIB, 60 * MIB));
        } else {
            assert_eq!(program.take(other, QUOTA), Ok(other));
            assert_eq!((world.used(), world.charged()), (QUOTA, QUOTA));
        }
        world.ends(&[program]);
    }
}

/// The reply was sent, and is lost: the kernel makes the call again, with the answer in its struct.
#[test]
fn call_with_a_lost_answer_is_done_once() {
    let world = World::new();
    let program = world.program();
    let [handle, name] = [program.handle(), program.handle()];
    assert_eq!(program.fated(Fate::AnswerIsLost).take(handle, 60 * MIB), Ok(handle));
    assert_eq!((world.used(), world.charged()), (60 * MIB, 60 * MIB));
    let source = (program.client(), handle);
    assert_eq!(program.fated(Fate::AnswerIsLost).duplicate(name, source), Ok(name));
    assert_eq!(program.fated(Fate::AnswerIsLost).free(handle), Ok(()));
    assert_eq!((world.used(), world.charged()), (60 * MIB, 60 * MIB));
    assert_eq!(program.fated(Fate::AnswerIsLost).free(name), Ok(()));
    assert_eq!((world.used(), world.charged()), (0, 0));
    world.ends(&[program]);
}

/// A signal handler, or a pause of the container, may take any time.
#[test]
fn untaken_reply_waits_until_its_thread_exits() {
    let world = World::new();
    let program = world.program();
    let handle = program.handle();
    let lose = || program.fated(Fate::ReplyIsLost).take(handle, 60 * MIB);
    assert_eq!(lose(), Err(Why::NoAnswer));
    undo_unclaimed(&world.monitor());
    assert_eq!((world.used(), world.charged()), (60 * MIB, 60 * MIB));
    assert_eq!(lose(), Err(Why::NoAnswer));
    program.die();
    undo_unclaimed(&world.monitor());
    assert!(!has_unclaimed(&world.monitor()));
    world.ends(&[program]);
}

/// How much an allocation passes: a change that adds to this adds to every allocation.
#[test]
fn an_allocation_passes_few_locks_and_lookups() {
    let world = World::new();
    let program = world.program();
    program.takes(MIB);
    let handle = program.handle();
    call_counters::take();
    assert_eq!(one_allocation(&program, handle), Ok(handle));
    assert_eq!(call_counters::take(), Counted { state: 2, callers: 1 });
}

/// A function of its own, so that profilers find it.
#[inline(never)]
fn one_allocation(program: &Program<'_>, handle: u32) -> super::program::Outcome {
    program.take(handle, MIB)
}
