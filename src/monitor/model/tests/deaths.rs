//! Handles that a worker was about to make or free when it died, where the program doesn't wait.

use super::{MIB, QUOTA};
use crate::monitor::model::program::Why;
use crate::monitor::model::{Death, Fate, World};

/// More than half of the quota: twice as much is too much.
const MOST: u64 = 60 * MIB;

/// Deaths of the worker at each driver call that a program's call can make.
fn deaths(waits: bool) -> impl Iterator<Item = Fate> {
    let both = |nth| [(nth, Death::Before), (nth, Death::After)];
    (0..5).flat_map(both).map(move |(nth, death)| Fate::WorkerDies { nth, death, waits })
}

/// The worker dies while it frees a device with memory below.
#[test]
fn a_device_that_a_dying_worker_was_freeing_takes_its_memory_along() {
    for fate in [true, false].into_iter().flat_map(deaths) {
        let world = World::new();
        let program = world.program();
        let handle = program.takes(MOST);
        program.names(handle);
        let freed = program.fated(fate).free(program.device());
        world.holds();
        if freed.is_err() {
            assert_eq!(freed, Err(Why::NoAnswer), "{fate:?}");
            let _ = program.free(program.device());
        }
        world.has(0);
        program.start_anew();
        program.gets_exactly(QUOTA);
        world.ends(&[program]);
    }
}

/// A handle under which a dying worker was about to make memory is used with another size.
#[test]
fn a_handle_that_a_dying_worker_was_about_to_make_has_one_memory() {
    for (fate, bytes) in deaths(false).flat_map(|fate| [(fate, MIB), (fate, QUOTA)]) {
        let world = World::new();
        let program = world.program();
        let handle = program.handle();
        let _ = program.fated(fate).take(handle, MOST);
        world.holds();
        let again = program.take(handle, bytes);
        world.holds();
        match again {
            Ok(_) => world.has(bytes),
            // The first call was answered, because the worker didn't get as far as to die.
            Err(_) => world.has(MOST),
        }
        program.free(handle).unwrap();
        program.gets_exactly(QUOTA);
        world.ends(&[program]);
    }
}

/// A handle that a dying worker was freeing is used again.
#[test]
fn a_handle_that_a_dying_worker_was_freeing_has_one_memory() {
    for fate in deaths(false) {
        let world = World::new();
        let program = world.program();
        let handle = program.takes(MOST);
        let _ = program.fated(fate).free(handle);
        world.holds();
        let again = program.take(handle, 50 * MIB);
        world.has(if again.is_ok() { 50 * MIB } else { MOST });
        program.free(handle).unwrap();
        program.gets_exactly(QUOTA);
        world.ends(&[program]);
    }
}

/// `kill-during-alloc`: the program dies with the worker.
#[test]
fn memory_of_one_who_died_with_the_worker_is_nobodys() {
    for fate in deaths(false) {
        let world = World::new();
        let (dies, lives) = (world.program(), world.program());
        let handle = lives.takes(30 * MIB);
        let _ = dies.fated(fate).take(dies.handle(), MOST);
        world.holds();
        dies.die();
        world.rest();
        world.has(30 * MIB);
        lives.free(handle).unwrap();
        lives.gets_exactly(QUOTA);
        world.ends(&[dies, lives]);
    }
}

/// A call that crashes each worker that serves it is served twice at most, and makes nothing.
#[test]
fn a_call_that_crashed_two_workers_is_an_error() {
    const EIO: i32 = 5;
    for (workers, gets) in [(1, None), (2, Some(Why::Errno(EIO))), (3, Some(Why::Errno(EIO)))] {
        let world = World::new();
        let program = world.program();
        let handle = program.handle();
        let made = program.fated(Fate::EndsWorkers(workers)).take(handle, MOST);
        assert_eq!((made.err(), world.workers()), (gets, workers + 1));
        world.holds();
        world.rest();
        world.has(if gets.is_none() { MOST } else { 0 });
        // The next worker serves other calls, and the same one when it is made again.
        if gets.is_some() {
            assert_eq!(program.take(handle, MOST), Ok(handle));
        }
        program.free(handle).unwrap();
        program.gets_exactly(QUOTA);
        world.ends(&[program]);
    }
}

/// One worker after another dies in calls for which no caller waits.
#[test]
fn a_row_of_dying_workers_charges_nothing_twice() {
    let world = World::new();
    let program = world.program();
    program.takes(30 * MIB);
    for fate in deaths(false) {
        let _ = program.fated(fate).take(program.handle(), MOST);
        world.holds();
    }
    program.die();
    let next = world.program();
    world.rest();
    world.has(0);
    next.gets_exactly(QUOTA);
    world.ends(&[program, next]);
}
