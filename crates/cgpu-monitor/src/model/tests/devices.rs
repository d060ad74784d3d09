//! Several GPUs: each has a quota of its own.

use super::{MIB, NO_MEMORY};
use crate::model::program::Why;
use crate::model::{Fate, World};

/// The container's quotas of the two GPUs.
const QUOTAS: [u64; 2] = [100 * MIB, 40 * MIB];

fn two() -> World {
    World::with(&QUOTAS.map(|quota| (1 << 30, quota)))
}

impl World {
    #[track_caller]
    fn has_of_each(&self, bytes: [u64; 2]) {
        assert_eq!([self.used_of(0), self.used_of(1)], bytes, "in use");
        assert_eq!([self.charged_of(0), self.charged_of(1)], bytes, "charged");
    }
}

#[test]
fn each_gpu_has_its_own_quota() {
    let world = two();
    let (one, other) = (world.program(), world.program());
    let [first, second] = [0, 1].map(|gpu| one.device_of(gpu));
    let [a, b] = [one.handle(), one.handle()];
    assert_eq!(one.take_below(first, a, QUOTAS[0]), Ok(a));
    assert_eq!(one.take_below(second, b, QUOTAS[1] + MIB), Err(NO_MEMORY));
    assert_eq!(one.take_below(second, b, QUOTAS[1]), Ok(b));
    world.has_of_each(QUOTAS);
    for gpu in [0, 1] {
        let more = other.take_below(other.device_of(gpu), other.handle(), MIB);
        assert_eq!(more, Err(NO_MEMORY), "GPU {gpu}");
    }
    one.free(a).unwrap();
    world.has_of_each([0, QUOTAS[1]]);
    let more = other.take_below(other.device_of(1), other.handle(), MIB);
    assert_eq!(more, Err(NO_MEMORY), "memory freed on one GPU is no memory on another");
    world.ends(&[one, other]);
}

/// A duplicate below another GPU's device shows on that GPU, and the memory stays where it was.
#[test]
fn duplicate_below_another_gpu_counts_on_the_original() {
    let world = two();
    let program = world.program();
    let (original, name) = (program.takes(60 * MIB), program.handle());
    let source = (program.client(), original);
    let named = program.duplicate_below(program.device_of(1), name, source);
    world.audit();
    world.has_of_each([60 * MIB, 0]);
    if named.is_ok() {
        program.free(original).unwrap();
        world.has_of_each([60 * MIB, 0]);
        program.free(name).unwrap();
    } else {
        program.free(original).unwrap();
    }
    world.has_of_each([0, 0]);
    world.ends(&[program]);
}

#[test]
fn freed_device_releases_only_its_gpus_memory() {
    let world = two();
    let program = world.program();
    let [first, second] = [0, 1].map(|gpu| program.device_of(gpu));
    program.take_below(first, program.handle(), 60 * MIB).unwrap();
    program.take_below(second, program.handle(), 30 * MIB).unwrap();
    program.free(second).unwrap();
    world.has_of_each([60 * MIB, 0]);
    program.free(program.client()).unwrap();
    world.has_of_each([0, 0]);
    world.ends(&[program]);
}

/// The next program knows which GPU has the memory.
#[test]
fn each_gpus_memory_outlives_an_update() {
    let world = two();
    let program = world.program();
    program.takes(60 * MIB);
    let (device, handle) = (program.device_of(1), program.handle());
    assert_eq!(program.take_below(device, handle, 30 * MIB), Ok(handle));
    world.update();
    world.audit();
    world.has_of_each([60 * MIB, 30 * MIB]);
    assert_eq!(program.take_below(device, program.handle(), 20 * MIB), Err(NO_MEMORY));
    program.free(handle).unwrap();
    world.has_of_each([60 * MIB, 0]);
    world.ends(&[program]);
}

/// The reply is lost, and the call comes again for another GPU: the first allocation is undone.
#[test]
fn call_repeated_on_another_gpu_is_distinct() {
    let world = two();
    let program = world.program();
    let handle = program.handle();
    let [first, second] = [0, 1].map(|gpu| program.device_of(gpu));
    let lost = program.fated(Fate::ReplyIsLost).take_below(first, handle, 30 * MIB);
    assert_eq!(lost, Err(Why::NoAnswer));
    assert_eq!(program.take_below(second, handle, 30 * MIB), Ok(handle));
    world.has_of_each([0, 30 * MIB]);
    world.ends(&[program]);
}
