//! Memory that `nvidia-uvm` maps counts until its last mapping ends, whatever names it has.

use super::{MIB, NO_MEMORY, PAGE};
use crate::model::{Program, QUOTA, World};

const BASE: u64 = 0x10_0000_0000;
const MOST: u64 = 60 * MIB;

/// A program whose file has the first GPU, and a range large enough for the entire quota.
fn mapper(world: &World) -> Program<'_> {
    let program = world.program();
    program.start_uvm().expect("it is initialized");
    program.register(0).expect("the GPU is registered");
    program.range(BASE, QUOTA).expect("it has a range");
    program
}

/// Maps memory at the range's beginning, and frees its handle.
fn mapped(program: &Program<'_>) {
    let memory = program.takes(MOST);
    program.map(&[0], BASE, MOST, memory).expect("it is mapped");
    program.world.has(MOST);
    program.free(memory).expect("it is freed");
    program.world.has(MOST);
}

/// `map-free`: mapped memory stays charged when its handle is freed, until its mapping ends.
#[test]
fn what_is_mapped_counts_until_its_mapping_ends() {
    type End = fn(&Program<'_>);
    let ends: [(&str, End); 5] = [
        ("an unmap", |program| program.unmap(0, BASE, MOST).unwrap()),
        ("a free of the range", |program| program.free_range(BASE, QUOTA).unwrap()),
        ("an end of the addresses", |program| program.unregister_space(0).unwrap()),
        ("an end of the GPU", |program| program.unregister_gpu(0).unwrap()),
        ("an unmap of each half", |program| {
            program.unmap(0, BASE, MOST / 2).unwrap();
            program.world.has(MOST);
            program.unmap(0, BASE + MOST / 2, MOST / 2).unwrap();
        }),
    ];
    for (name, end) in ends {
        let world = World::new();
        let program = mapper(&world);
        mapped(&program);
        assert_eq!(program.take(program.handle(), MOST), Err(NO_MEMORY), "{name}");
        end(&program);
        assert_eq!((world.used(), world.charged()), (0, 0), "{name}");
        program.gets_exactly(QUOTA);
        world.ends(&[program]);
    }
}

/// `map-hide over`: a page is mapped over the beginning, and the rest of the old mapping keeps all
/// the memory alive.
#[test]
fn a_mapping_over_anothers_beginning_hides_nothing() {
    let world = World::new();
    let program = mapper(&world);
    mapped(&program);
    let page = program.takes(PAGE);
    program.map(&[0], BASE, PAGE, page).unwrap();
    program.free(page).unwrap();
    world.has(MOST + PAGE);
    program.unmap(0, BASE, PAGE).unwrap();
    world.has(MOST);
    assert_eq!(program.take(program.handle(), MOST), Err(NO_MEMORY));
    program.unmap(0, BASE + PAGE, MOST - PAGE).unwrap();
    world.has(0);
    world.ends(&[program]);
}

/// A mapping that replaces all of another one frees the old memory.
#[test]
fn replacing_mapping_ends_the_old_one() {
    let world = World::new();
    let program = mapper(&world);
    mapped(&program);
    let next = program.takes(40 * MIB);
    program.map(&[0], BASE, MOST, next).unwrap();
    program.free(next).unwrap();
    world.has(40 * MIB);
    world.ends(&[program]);
}

/// A mapping of freed memory fails, and so does a mapping without a range: neither changes a charge.
#[test]
fn a_mapping_that_fails_leaves_what_is_there() {
    let world = World::new();
    let program = mapper(&world);
    mapped(&program);
    let freed = program.takes(MIB);
    program.free(freed).unwrap();
    let outside = program.takes(MIB);
    assert!(program.map(&[0], BASE + 2 * QUOTA, MIB, outside).is_err());
    assert!(program.map(&[0], BASE + MOST, MIB, freed).is_err());
    program.free(outside).unwrap();
    world.has(MOST);
    program.unmap(0, BASE, MOST).unwrap();
    world.has(0);
    world.ends(&[program]);
}

/// The program is killed: its file is closed, and the mapped memory is free, also after an update.
#[test]
fn what_a_dead_program_had_mapped_is_free() {
    for updates in [false, true] {
        let world = World::new();
        let program = mapper(&world);
        mapped(&program);
        if updates {
            world.update();
            world.has(MOST);
        }
        let next = world.program();
        program.die();
        world.scan();
        world.has(0);
        next.gets_exactly(QUOTA);
        world.ends(&[program, next]);
    }
}

/// Memory that two GPUs map counts on the GPU that has it, until both have unmapped it.
#[test]
fn memory_of_two_mappings_counts_until_both_end() {
    let world = World::with(&[(1 << 30, QUOTA), (1 << 30, QUOTA)]);
    let program = mapper(&world);
    program.register(1).unwrap();
    let memory = program.takes(MOST);
    program.map(&[0, 1], BASE, MOST, memory).unwrap();
    program.free(memory).unwrap();
    world.has(MOST);
    assert_eq!(world.used_of(1), 0);
    program.unmap(0, BASE, MOST).unwrap();
    world.has(MOST);
    program.unmap(1, BASE, MOST).unwrap();
    world.has(0);
    world.ends(&[program]);
}
