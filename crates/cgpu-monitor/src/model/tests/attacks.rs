//! Attacks that are an order of calls. `rmtool attack` makes the same attacks as programs (tests/gate, tests/quota).

use super::{MIB, NO_MEMORY, PAGE};
use crate::model::program::Why;
use crate::model::{Fate, QUOTA, World};

/// More than half of the quota: twice as much is too much.
const MOST: u64 = 60 * MIB;

/// `handle-reuse`: one handle for one memory after another, and frees of objects that don't exist.
#[test]
fn a_handle_is_used_again_and_again() {
    let world = World::new();
    let program = world.program();
    let handle = program.handle();
    for round in 0..5 {
        let bytes = MOST + round * MIB;
        assert_eq!(program.take(handle, bytes), Ok(handle));
        assert!(program.take(handle, MIB).is_err(), "one handle has two memories");
        world.has(bytes);
        assert_eq!(program.free(handle), Ok(()));
        // A second free: the monitor may take it for the same call, made again after an interruption. It gives nothing
        // back.
        let _ = program.free(handle);
        world.has(0);
    }
    program.gets_exactly(QUOTA);
    world.ends(&[program]);
}

/// A handle is freed and used again for less memory: the charge is the new size.
#[test]
fn reused_handle_is_charged_its_new_size() {
    let world = World::new();
    let program = world.program();
    let handle = program.handle();
    for bytes in [MOST, MIB, QUOTA, PAGE] {
        program.take(handle, bytes).unwrap();
        world.has(bytes);
        program.gets_exactly(QUOTA - bytes);
        program.free(handle).unwrap();
    }
    world.ends(&[program]);
}

/// `dup-free`: a duplicate is made and its original freed, again and again.
#[test]
fn a_name_keeps_what_its_original_had() {
    let world = World::new();
    let program = world.program();
    for round in 1..=4 {
        let original = program.takes(20 * MIB);
        program.names(original);
        program.free(original).unwrap();
        world.has(round * 20 * MIB);
    }
    program.gets_exactly(20 * MIB);
    world.ends(&[program]);
}

/// A duplicate is made of each duplicate, and those in the middle are freed.
#[test]
fn names_of_names_keep_memory_to_the_last() {
    let world = World::new();
    let program = world.program();
    let mut last = program.takes(MOST);
    for _ in 0..4 {
        let next = program.names(last);
        program.free(last).unwrap();
        last = next;
        world.has(MOST);
    }
    program.free(last).unwrap();
    world.has(0);
    world.ends(&[program]);
}

/// The original's handle is used again while a duplicate has the old memory.
#[test]
fn reused_handle_is_distinct_from_its_duplicate() {
    let world = World::new();
    let program = world.program();
    let original = program.takes(MOST);
    let name = program.names(original);
    program.free(original).unwrap();
    assert_eq!(program.take(original, 50 * MIB), Err(NO_MEMORY));
    program.take(original, 30 * MIB).unwrap();
    world.has(MOST + 30 * MIB);
    program.free(name).unwrap();
    world.has(30 * MIB);
    world.ends(&[program]);
}

/// `name-race`, as an order of calls: no duplicate can be made of a freed handle.
#[test]
fn what_was_freed_gets_no_name() {
    let world = World::new();
    let program = world.program();
    let original = program.takes(MOST);
    program.free(original).unwrap();
    assert!(program.duplicate(program.handle(), (program.client(), original)).is_err());
    world.has(0);
    program.gets_exactly(QUOTA);
    world.ends(&[program]);
}

/// A duplicate is made under a used handle: no memory is lost or counted twice.
#[test]
fn a_name_under_a_taken_handle_is_refused() {
    let world = World::new();
    let program = world.program();
    let (much, little) = (program.takes(MOST), program.takes(MIB));
    assert!(program.duplicate(little, (program.client(), much)).is_err());
    world.has(MOST + MIB);
    program.free(little).unwrap();
    program.free(much).unwrap();
    world.has(0);
    world.ends(&[program]);
}

/// `parent-free`: the device is freed, and memory is asked for below the device all the same.
#[test]
fn below_a_device_that_was_freed_is_nothing() {
    let world = World::new();
    let program = world.program();
    let handle = program.takes(MOST);
    let name = program.names(handle);
    program.free(program.device()).unwrap();
    world.has(0);
    assert!(program.take(program.handle(), MIB).is_err());
    assert!(program.free(handle).is_err() && program.free(name).is_err());
    program.restart();
    program.gets_exactly(QUOTA);
    world.ends(&[program]);
}

/// `clients`: a client with memory is freed while another client of the program lives on.
#[test]
fn freed_client_releases_only_its_own_memory() {
    let world = World::new();
    let program = world.program();
    let first = program.client();
    program.takes(MOST);
    program.restart();
    let other = program.takes(30 * MIB);
    assert_eq!(program.take(program.handle(), 20 * MIB), Err(NO_MEMORY));
    assert_eq!(program.free_client(first), Ok(()));
    world.has(30 * MIB);
    program.gets_exactly(QUOTA - 30 * MIB);
    program.free(other).unwrap();
    world.has(0);
    world.ends(&[program]);
}

/// A duplicate in another client outlives the client of the original.
#[test]
fn a_name_in_another_client_outlives_the_originals() {
    let world = World::new();
    let program = world.program();
    let (first, original) = (program.client(), program.takes(MOST));
    program.restart();
    let name = program.duplicate(program.handle(), (first, original));
    world.has(MOST);
    let name = name.expect("both are the program's");
    program.free(name).unwrap();
    world.has(MOST);
    assert_eq!(program.take(program.handle(), 50 * MIB), Err(NO_MEMORY));
    program.die();
    world.ends(&[program]);
}

/// The reply of an allocation is lost, and the call comes again with another size: the first allocation is undone.
#[test]
fn call_repeated_with_another_size_is_distinct() {
    for bytes in [MIB, QUOTA] {
        let world = World::new();
        let program = world.program();
        let handle = program.handle();
        let lost = program.fated(Fate::ReplyIsLost).take(handle, MOST);
        assert_eq!(lost, Err(Why::NoAnswer));
        assert_eq!(program.take(handle, bytes), Ok(handle));
        world.has(bytes);
        program.gets_exactly(QUOTA - bytes);
        world.ends(&[program]);
    }
}

/// The same call is made twice again: the second time it is a call of its own.
#[test]
fn memory_of_a_lost_reply_is_given_once() {
    let world = World::new();
    let program = world.program();
    let handle = program.handle();
    program.fated(Fate::ReplyIsLost).take(handle, MIB).unwrap_err();
    assert_eq!(program.take(handle, MIB), Ok(handle));
    assert!(program.take(handle, MIB).is_err(), "one handle has two memories");
    world.has(MIB);
    program.gets_exactly(QUOTA - MIB);
    world.ends(&[program]);
}

/// Replies are lost again and again, each under another handle: the memory that no caller got is freed.
#[test]
fn storm_of_lost_replies_retains_no_memory() {
    let world = World::new();
    let program = world.program();
    for _ in 0..10 {
        let lost = program.fated(Fate::ReplyIsLost).take(program.handle(), MOST);
        assert_eq!(lost, Err(Why::NoAnswer));
        world.holds();
    }
    program.gets_exactly(QUOTA);
    world.ends(&[program]);
}

/// The reply of a free is lost, its handle is used again, and the free comes again: it frees the new object.
#[test]
fn repeated_free_of_a_reused_handle_is_distinct() {
    let world = World::new();
    let program = world.program();
    let handle = program.takes(MOST);
    assert_eq!(program.fated(Fate::ReplyIsLost).free(handle), Err(Why::NoAnswer));
    world.has(0);
    assert_eq!(program.take(handle, QUOTA), Ok(handle));
    assert_eq!(program.free(handle), Ok(()));
    world.has(0);
    program.gets_exactly(QUOTA);
    world.ends(&[program]);
}

/// The reply of a duplication is lost, and the original is freed before the call comes again.
#[test]
fn unanswered_duplicate_of_freed_memory_is_released() {
    let world = World::new();
    let program = world.program();
    let (original, name) = (program.takes(MOST), program.handle());
    let source = (program.client(), original);
    let lost = program.fated(Fate::ReplyIsLost).duplicate(name, source);
    assert_eq!(lost, Err(Why::NoAnswer));
    program.free(original).unwrap();
    world.holds();
    assert!(program.duplicate(name, source).is_err());
    world.has(0);
    program.gets_exactly(QUOTA);
    world.ends(&[program]);
}

/// `barrier16`: all programs ask for the last bytes, and one gets them.
#[test]
fn one_of_many_programs_gets_the_last_bytes() {
    let world = World::new();
    let programs: Vec<_> = (0..6).map(|_| world.program()).collect();
    programs[0].takes(QUOTA - 10 * MIB);
    let got = programs.iter().map(|program| program.take(program.handle(), 10 * MIB));
    let got: Vec<_> = got.collect();
    assert_eq!(got.iter().filter(|got| got.is_ok()).count(), 1, "{got:?}");
    world.has(QUOTA);
    programs[0].die();
    world.rest();
    assert!(programs[1].take(programs[1].handle(), QUOTA).is_ok());
    world.ends(&programs);
}

/// `hostile-sizes`: sizes that overflow when they are added or rounded.
#[test]
fn sizes_that_overflow_are_too_much() {
    let world = World::new();
    let program = world.program();
    program.takes(PAGE);
    for size in [1 << 63, u64::MAX, u64::MAX - 4095, u64::MAX - 65536, QUOTA] {
        assert!(program.take(program.handle(), size).is_err(), "{size:#x}");
        world.has(PAGE);
    }
    program.gets_exactly(QUOTA - PAGE);
    world.ends(&[program]);
}
