//! Which calls are trapped, as data, and as regions of each system call's arguments.
//!
//! The one place that knows how Linux passes the arguments of `ioctl` and `mmap`.

use super::cube::{self, Cube};
use super::region::{Operator, Piece, Region, Test};

/// `asm-generic/ioctl.h`: the number is in bits 0–7, the size in bits 16–29.
const NUMBER_MASK: u64 = 0xff;
const SIZE_SHIFT: u32 = 16;
const SIZE_MASK: u64 = 0x3fff;

/// The request's place among the arguments of `ioctl`.
pub(super) const REQUEST: usize = 1;

/// The places of length, flags and offset among the arguments of `mmap` and `mmap2`.
pub(super) const LENGTH: usize = 1;
const FLAGS: usize = 3;
const OFFSET: usize = 5;

/// `MAP_SHARED` is 1, `MAP_SHARED_VALIDATE` is 3, `MAP_PRIVATE` 2; every other odd type is
/// refused by the kernel (`do_mmap`), so the lowest bit is all that is to be looked at.
const SHARED: u64 = 1;

/// `PR_SET_MM`, which is 35, and all options with these bits, of which Linux has no other (linux/prctl.h):
/// all of its bits would need a rule each. And `ADDR_NO_RANDOMIZE` (linux/personality.h), with the
/// question for the personality, which is all bits.
const PROGRAMS: [(&str, Cube); 2] =
    [("prctl", Cube::new(0x3f, 35)), ("personality", Cube::new(0x0004_0000, 0x0004_0000))];

/// A driver call to trap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// By number and size, as the resource manager looks at it: any type, any direction.
    Sized {
        /// Bits 0–7.
        number: u8,
        /// Bits 16–29, in bytes.
        size: u16,
    },
    /// All 32 bits, as the UVM driver looks at it: its numbers have neither type nor size and
    /// would be those of ordinary calls (`FIONBIO` is 0x5421, mapping an allocation 0x21).
    Exact(u32),
    /// All that have these bits at these values, whoever's they are: few masks say what many
    /// numbers and sizes do, and a runtime needs a tenth of a millisecond for each rule.
    Masked {
        /// The bits that matter.
        mask: u32,
        /// What they are.
        value: u32,
    },
}

/// What makes a call the monitor's.
#[derive(Debug, Clone, Copy)]
pub struct Traps<'a> {
    /// These ioctls, on every descriptor.
    pub requests: &'a [Request],
    /// Shared mappings with an offset other than 0.
    pub mappings: bool,
    /// What would make one program of a process look like the next: see [`super::super::filter`].
    pub programs: bool,
}

/// A system call and those of its calls that are trapped.
#[derive(Debug)]
pub(super) struct Trapped {
    pub(super) name: &'static str,
    pub(super) region: Region,
    /// The argument that has a set of numbers, of which the kernel reads 32 bits only.
    pub(super) request: Option<usize>,
}

impl Request {
    /// The upper half of the argument is never looked at: the kernel drops it.
    fn cube(self) -> Cube {
        match self {
            Self::Sized { number, size } => Cube::new(
                SIZE_MASK << SIZE_SHIFT | NUMBER_MASK,
                u64::from(size) << SIZE_SHIFT | u64::from(number),
            ),
            Self::Exact(request) => Cube::new(u32::MAX.into(), request.into()),
            Self::Masked { mask, value } => Cube::new(mask.into(), value.into()),
        }
    }
}

impl Traps<'_> {
    pub(super) fn by_system_call(&self) -> Vec<Trapped> {
        let mut calls = Vec::new();
        if !self.requests.is_empty() {
            let request: Vec<Cube> = self.requests.iter().map(|request| request.cube()).collect();
            let region = vec![Piece { request: cube::paired(request), ..Piece::all() }];
            calls.push(Trapped { name: "ioctl", region, request: Some(REQUEST) });
        }
        if self.mappings {
            let mut mapping = Piece::all();
            mapping.tests[FLAGS] = Some(Test::Bits(Cube::new(SHARED, SHARED)));
            mapping.tests[OFFSET] = Some(Test::Compare(Operator::NotEqual, 0));
            for name in ["mmap", "mmap2"] {
                calls.push(Trapped { name, region: vec![mapping.clone()], request: None });
            }
        }
        if self.programs {
            for (name, option) in PROGRAMS {
                let region = vec![Piece { request: cube::paired(vec![option]), ..Piece::all() }];
                calls.push(Trapped { name, region, request: Some(0) });
            }
        }
        calls
    }
}
