//! Memory in files: exported memory counts once, until no program has it.

use super::{MIB, NO_MEMORY};
use crate::model::program::Why;
use crate::model::{QUOTA, World};

const MOST: u64 = 60 * MIB;

/// Memory in a file counts once, whichever program imports it.
#[test]
fn exported_memory_counts_once_across_imports() {
    let world = World::new();
    let (one, two) = (world.program(), world.program());
    let original = one.takes(MOST);
    assert_eq!(one.export(original, 0), Ok(()));
    let name = two.import(two.handle(), 0).unwrap();
    world.has(MOST);
    one.free(original).unwrap();
    world.has(MOST);
    assert_eq!(one.take(one.handle(), MOST), Err(NO_MEMORY));
    two.free(name).unwrap();
    // The file keeps the memory alive.
    world.has(MOST);
    assert!(two.import(two.handle(), 0).is_ok());
    world.ends(&[one, two]);
}

/// `export-free`: memory is exported and freed, again and again.
#[test]
fn exported_memory_counts_while_its_file_is_open() {
    let world = World::new();
    let program = world.program();
    for file in 0..3 {
        let memory = program.takes(30 * MIB);
        program.export(memory, file).unwrap();
        program.free(memory).unwrap();
        world.has((file as u64 + 1) * 30 * MIB);
    }
    assert_eq!(world.retained_files(), 3);
    assert_eq!(program.take(program.handle(), 30 * MIB), Err(NO_MEMORY));
    world.ends(&[program]);
    assert_eq!(world.retained_files(), 0);
}

/// `export-reuse`, as an order of calls: the handle of exported memory is used again for other memory.
#[test]
fn reused_handle_is_distinct_from_its_export() {
    let world = World::new();
    let program = world.program();
    let handle = program.takes(MIB);
    program.export(handle, 0).unwrap();
    program.free(handle).unwrap();
    assert_eq!(program.take(handle, QUOTA), Err(NO_MEMORY));
    program.take(handle, QUOTA - MIB).unwrap();
    assert_eq!(program.export(handle, 0), Err(Why::Status(0x63)), "a file has one export");
    world.has(QUOTA);
    let name = program.import(program.handle(), 0).unwrap();
    program.free(handle).unwrap();
    program.free(name).unwrap();
    world.has(MIB);
    world.ends(&[program]);
}

/// Memory that was freed is not exported, and nothing is imported from an empty file.
#[test]
fn freed_objects_export_and_empty_files_import_nothing() {
    let world = World::new();
    let program = world.program();
    let memory = program.takes(MOST);
    program.free(memory).unwrap();
    assert!(program.export(memory, 0).is_err());
    assert!(program.import(program.handle(), 0).is_err());
    assert!(program.import(program.handle(), 1).is_err());
    assert_eq!(world.retained_files(), 0);
    program.gets_exactly(QUOTA);
    world.ends(&[program]);
}

/// Each place of a list has memory of its own. An export into a place frees what the place had.
#[test]
fn what_is_replaced_in_a_file_is_freed() {
    let world = World::new();
    let program = world.program();
    let [a, b, c] = [10, 20, 30].map(|mib| program.takes(mib * MIB));
    program.export_list(0, 0, &[a, b]).unwrap();
    [a, b].iter().for_each(|memory| program.free(*memory).unwrap());
    world.has(60 * MIB);
    program.export_list(0, 1, &[c]).unwrap();
    world.has(40 * MIB);
    program.free(c).unwrap();
    world.has(40 * MIB);
    program.export_list(0, 0, &[0, 0]).unwrap();
    world.has(0);
    program.gets_exactly(QUOTA);
    world.ends(&[program]);
}

/// The exporter is killed: a program that has the file, or a duplicate, has the memory.
#[test]
fn imported_memory_outlives_its_exporter() {
    let world = World::new();
    let (one, two) = (world.program(), world.program());
    let memory = one.takes(MOST);
    one.export(memory, 0).unwrap();
    one.die();
    world.rest();
    world.has(MOST);
    let name = two.import(two.handle(), 0).unwrap();
    assert_eq!(two.take(two.handle(), MOST), Err(NO_MEMORY));
    two.free(name).unwrap();
    world.has(MOST);
    world.ends(&[one, two]);
}

/// Each file is known after three updates.
#[test]
fn files_are_taken_along_from_program_to_program() {
    let world = World::new();
    let program = world.program();
    for file in 0..3 {
        let memory = program.takes(20 * MIB);
        program.export(memory, file).unwrap();
        program.free(memory).unwrap();
    }
    for _ in 0..3 {
        world.update();
        world.audit();
        world.has(60 * MIB);
    }
    let name = program.import(program.handle(), 2).unwrap();
    world.has(60 * MIB);
    program.free(name).unwrap();
    world.ends(&[program]);
}
