//! Sets of calls of one system call, by their arguments: rules can say them, and they can be joined, taken apart, and
//! said again.
//!
//! A [`Region`] is a union of [`Piece`]s. A piece is a conjunction over arguments, as one rule is. Pieces of a region
//! may overlap. Nothing here rounds: where an intersection or a complement would need more than one comparison for an
//! argument, the result is an error ([`Inexpressible`]). Knows no JSON and no action.

use super::cube::{self, Cube};

/// How many arguments a system call has.
pub(super) const ARGUMENTS: usize = 6;

/// How an argument is compared; equality and masks are [`Test::Bits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operator {
    NotEqual,
    Less,
    LessOrEqual,
    GreaterOrEqual,
    Greater,
}

/// The condition on one argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Test {
    Bits(Cube),
    Compare(Operator, u64),
}

/// The argument that would need more than one comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Inexpressible {
    pub(super) argument: usize,
}

impl Test {
    fn holds(self, number: u64) -> bool {
        match self {
            Self::Bits(cube) => cube.contains(number),
            Self::Compare(Operator::NotEqual, value) => number != value,
            Self::Compare(Operator::Less, value) => number < value,
            Self::Compare(Operator::LessOrEqual, value) => number <= value,
            Self::Compare(Operator::GreaterOrEqual, value) => number >= value,
            Self::Compare(Operator::Greater, value) => number > value,
        }
    }

    /// The numbers that pass both tests: `Ok(None)` where there are none, `Err` where one comparison can't say them.
    fn and(self, other: Self) -> Result<Option<Self>, ()> {
        match (self, other) {
            (Self::Bits(one), Self::Bits(two)) => Ok(one.and(two).map(Self::Bits)),
            (Self::Bits(cube), test) | (test, Self::Bits(cube)) if cube.mask == u64::MAX => {
                Ok(test.holds(cube.value).then_some(Self::Bits(cube)))
            }
            (Self::Bits(cube), Self::Compare(Operator::NotEqual, value))
            | (Self::Compare(Operator::NotEqual, value), Self::Bits(cube))
                if !cube.contains(value) =>
            {
                Ok(Some(Self::Bits(cube)))
            }
            (one, two) if one == two => Ok(Some(one)),
            _ => Err(()),
        }
    }

    /// The numbers that do not pass this test, as alternatives.
    ///
    /// A mask with some upper bits has no complement: in a 32-bit program, a comparison of one upper bit compares
    /// nothing.
    fn negated(self) -> Result<Vec<Self>, ()> {
        let compare = |operator, value| Ok(vec![Self::Compare(operator, value)]);
        match self {
            Self::Bits(cube) if cube.mask == u64::MAX => compare(Operator::NotEqual, cube.value),
            Self::Bits(cube) if cube.mask > u64::from(u32::MAX) => Err(()),
            Self::Bits(cube) => {
                Ok(cube.bits().map(|bit| Self::Bits(Cube::new(bit, !cube.value))).collect())
            }
            Self::Compare(Operator::NotEqual, value) => Ok(vec![Self::Bits(Cube::exactly(value))]),
            Self::Compare(Operator::Less, value) => compare(Operator::GreaterOrEqual, value),
            Self::Compare(Operator::LessOrEqual, value) => compare(Operator::Greater, value),
            Self::Compare(Operator::GreaterOrEqual, value) => compare(Operator::Less, value),
            Self::Compare(Operator::Greater, value) => compare(Operator::LessOrEqual, value),
        }
    }
}

/// The calls whose arguments pass a test each, and whose request is in a set.
///
/// The request is an argument that has a set of numbers in the place of a test. A system call without such an
/// argument has every number here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) tests: [Option<Test>; ARGUMENTS],
    pub(super) request: Vec<Cube>,
}

/// The calls that are in any of these pieces.
pub(super) type Region = Vec<Piece>;

impl Piece {
    /// Every call.
    pub(super) fn all() -> Self {
        Self { tests: [None; ARGUMENTS], request: vec![Cube::ALL] }
    }

    /// The calls in both pieces; `None` where there are none.
    fn and(&self, other: &Self) -> Result<Option<Self>, Inexpressible> {
        // The cheap and frequent case first: where no request is in both, no tests have to be joined.
        if !self.request.iter().any(|one| other.request.iter().any(|two| one.overlaps(*two))) {
            return Ok(None);
        }
        let mut tests = self.tests;
        for (argument, (test, second)) in tests.iter_mut().zip(other.tests).enumerate() {
            let Some(second) = second else { continue };
            match test.map_or(Ok(Some(second)), |test| test.and(second)) {
                Ok(None) => return Ok(None),
                Ok(joined) => *test = joined,
                Err(()) => return Err(Inexpressible { argument }),
            }
        }
        let request = cube::both(&self.request, &other.request);
        Ok(Some(Self { tests, request }))
    }

    /// The calls that are not in `other`.
    ///
    /// Two pieces of the result overlap in the request only: each piece has the same first tests as the piece before
    /// it, and differs in one test. libseccomp keeps rules in a tree of that shape, and loses some rules that overlap
    /// otherwise: next to "shared, and an offset other than 0", it lost that rule for "offset 0", shared or not.
    fn without(&self, other: &Self) -> Result<Region, Inexpressible> {
        if self.and(other)?.is_none() {
            return Ok(vec![self.clone()]);
        }
        let mut left = Vec::new();
        let request = cube::without(&self.request, &other.request);
        if !request.is_empty() {
            left.push(Self { request, ..self.clone() });
        }
        let mut prefix = Self { request: other.request.clone(), ..Self::all() };
        for (argument, excluded) in other.tests.iter().enumerate() {
            let Some(excluded) = excluded else { continue };
            for test in excluded.negated().map_err(|()| Inexpressible { argument })? {
                prefix.tests[argument] = Some(test);
                left.extend(self.and(&prefix)?);
            }
            prefix.tests[argument] = Some(*excluded);
        }
        Ok(left)
    }
}

/// The calls in both regions.
pub(super) fn both(one: &[Piece], two: &[Piece]) -> Result<Region, Inexpressible> {
    let mut joined = Vec::new();
    for (one, two) in one.iter().flat_map(|one| two.iter().map(move |two| (one, two))) {
        joined.extend(one.and(two)?);
    }
    joined.dedup();
    Ok(joined)
}

/// The calls of `wanted` that are not in `taken`; empty exactly where there are none.
pub(super) fn without(wanted: &[Piece], taken: &[Piece]) -> Result<Region, Inexpressible> {
    let mut left = wanted.to_vec();
    for taken in taken {
        let mut next: Region = Vec::new();
        for piece in left {
            for piece in piece.without(taken)? {
                if !next.contains(&piece) {
                    next.push(piece);
                }
            }
        }
        left = next;
    }
    Ok(left)
}
