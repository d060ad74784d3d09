//! Which calls are trapped, as data, and as regions of each system call's arguments.
//!
//! Of the files that write a section's rules, only this one knows the places of the arguments of `ioctl`, `mmap`,
//! `prctl` and `personality`.

use super::super::traps::TRAPS;
use super::cube::Cube;
use super::region::{Operator, Piece, Region, Test};

/// The request's place among the arguments of `ioctl`.
const REQUEST: usize = 1;

/// The places of length, flags and offset among the arguments of `mmap` and `mmap2`.
pub(super) const LENGTH: usize = 1;
const FLAGS: usize = 3;
const OFFSET: usize = 5;

/// `MAP_SHARED` is 1, `MAP_SHARED_VALIDATE` is 3, `MAP_PRIVATE` is 2. The kernel refuses every other odd type
/// (`do_mmap`), so the lowest bit alone tells whether a mapping is shared.
const SHARED: u64 = 1;

/// The option 35, `PR_SET_MM`, and every option with the same lower six bits: Linux has no other such option
/// (linux/prctl.h), and comparing all 32 bits would need a rule for each. And `ADDR_NO_RANDOMIZE`
/// (linux/personality.h), which the question for the present personality, all bits set, has, too.
const PROGRAMS: [(&str, Cube); 2] =
    [("prctl", Cube::new(0x3f, 35)), ("personality", Cube::new(0x0004_0000, 0x0004_0000))];

/// A system call, and the calls of it that are trapped.
#[derive(Debug)]
pub(super) struct Trapped {
    pub(super) name: &'static str,
    pub(super) region: Region,
    /// The argument that has a set of numbers, of which the kernel reads 32 bits.
    pub(super) request: Option<usize>,
}

/// Everything that is trapped: [`TRAPS`] on every descriptor, shared mappings with an offset other than 0, and calls
/// that would make two programs of one process look alike (see `X86_64` in gate/syscall.rs).
pub(super) fn trapped() -> Vec<Trapped> {
    let mut mapping = Piece::all();
    mapping.tests[FLAGS] = Some(Test::Bits(Cube::new(SHARED, SHARED)));
    mapping.tests[OFFSET] = Some(Test::Compare(Operator::NotEqual, 0));
    let mapped = |name| Trapped { name, region: vec![mapping.clone()], request: None };
    let mut calls = vec![ioctl(&TRAPS)];
    calls.extend(["mmap", "mmap2"].map(mapped));
    calls.extend(PROGRAMS.map(|(name, option)| numbered(name, 0, vec![option])));
    calls
}

/// `ioctl` with these requests, as (mask, value).
///
/// The upper half of the request is not compared: the kernel ignores it.
pub(super) fn ioctl(requests: &[(u32, u32)]) -> Trapped {
    let cubes = requests.iter().map(|&(mask, value)| Cube::new(mask.into(), value.into()));
    numbered("ioctl", REQUEST, cubes.collect())
}

/// A system call with one of these numbers in one of its arguments.
fn numbered(name: &'static str, argument: usize, numbers: Vec<Cube>) -> Trapped {
    let region = vec![Piece { request: numbers, ..Piece::all() }];
    Trapped { name, region, request: Some(argument) }
}
