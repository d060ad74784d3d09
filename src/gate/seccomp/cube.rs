//! Sets of numbers by their bits: what a masked comparison can say.
//!
//! A [`Cube`] is all numbers that have some bits at given values. Runtimes can't say "none of these" about an
//! argument, so the numbers outside a set must be said as cubes again, as few as can be found quickly: [`outside`].
//! Knows no system call.

/// The numbers `n` with `n & mask == value`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Cube {
    /// The bits that matter.
    pub(super) mask: u64,
    /// The values of these bits; no other bit is set.
    pub(super) value: u64,
}

impl Cube {
    /// Every number.
    pub(super) const ALL: Self = Self { mask: 0, value: 0 };

    pub(super) const fn new(mask: u64, value: u64) -> Self {
        Self { mask, value: value & mask }
    }

    /// The cube of one number of 64 bits.
    pub(super) const fn exactly(value: u64) -> Self {
        Self { mask: u64::MAX, value }
    }

    pub(super) fn contains(self, number: u64) -> bool {
        number & self.mask == self.value
    }

    /// Whether some number is in both cubes.
    pub(super) fn overlaps(self, other: Self) -> bool {
        (self.value ^ other.value) & self.mask & other.mask == 0
    }

    /// The numbers in both cubes; `None` where there are none.
    pub(super) fn and(self, other: Self) -> Option<Self> {
        self.overlaps(other)
            .then_some(Self { mask: self.mask | other.mask, value: self.value | other.value })
    }

    /// Whether every number of this cube is in `other`.
    pub(super) fn is_within(self, other: Self) -> bool {
        other.mask & !self.mask == 0 && self.overlaps(other)
    }

    fn without_bit(self, bit: u64) -> Self {
        Self { mask: self.mask & !bit, value: self.value & !bit }
    }

    /// The two halves of the cube by a bit that does not matter yet: first with the bit clear, then with the bit set.
    fn halves(self, bit: u64) -> [Self; 2] {
        let mask = self.mask | bit;
        [Self { mask, value: self.value }, Self { mask, value: self.value | bit }]
    }

    /// The bits that matter, lowest first.
    pub(super) fn bits(self) -> impl Iterator<Item = u64> {
        (0..u64::BITS).map(|place| 1 << place).filter(move |bit| self.mask & bit != 0)
    }
}

/// Cubes that together are exactly the numbers that no cube of `taken` contains.
pub(super) fn outside(taken: &[Cube]) -> Vec<Cube> {
    without(&[Cube::ALL], taken)
}

/// Cubes that together are exactly the numbers of `wanted` that no cube of `taken` contains.
///
/// The cubes overlap, so that there are fewer: each is as large as it can be within one cube of `wanted`, and no cube
/// lies in the union of the others. The numbers outside one number of n bits take n cubes, and the numbers outside
/// many take not many more.
pub(super) fn without(wanted: &[Cube], taken: &[Cube]) -> Vec<Cube> {
    let mut grown = Vec::new();
    for &space in wanted {
        let mut pieces = Vec::new();
        split(space, taken, &mut |piece| pieces.push(piece));
        while let Some(&piece) = pieces.first() {
            let larger = grow(piece, space, taken, &pieces);
            pieces.retain(|piece| !piece.is_within(larger));
            grown.push(larger);
        }
    }
    // The smallest cubes last: they are the likeliest to be covered by the others.
    grown.sort_by_key(|cube| (cube.mask.count_ones(), cube.mask, cube.value));
    let mut index = grown.len();
    while index > 0 {
        index -= 1;
        let cube = grown.remove(index);
        if !is_covered(cube, &grown) {
            grown.insert(index, cube);
        }
    }
    grown
}

/// The numbers in both sets.
pub(super) fn both(one: &[Cube], two: &[Cube]) -> Vec<Cube> {
    let mut joined: Vec<Cube> = Vec::new();
    for cube in one.iter().flat_map(|&one| two.iter().filter_map(move |&two| one.and(two))) {
        if !joined.iter().any(|&other| cube.is_within(other)) {
            joined.retain(|other| !other.is_within(cube));
            joined.push(cube);
        }
    }
    joined
}

/// Halves `space` until each part lies in one of `cubes`, or overlaps none of them: then calls `found` with the part.
fn split(space: Cube, cubes: &[Cube], found: &mut impl FnMut(Cube)) {
    let near: Vec<Cube> = cubes.iter().copied().filter(|cube| cube.overlaps(space)).collect();
    if near.is_empty() {
        return found(space);
    }
    if let Some(bit) = dividing_bit(space, &near) {
        for half in space.halves(bit) {
            split(half, &near, found);
        }
    }
}

/// The bit that matters to most of `cubes`; `None` where one of them contains all of `space`.
fn dividing_bit(space: Cube, cubes: &[Cube]) -> Option<u64> {
    if cubes.iter().any(|&cube| space.is_within(cube)) {
        return None;
    }
    let cubes_with = |bit: u64| cubes.iter().filter(|cube| cube.mask & bit != 0).count();
    let all = cubes.iter().fold(0, |mask, cube| mask | cube.mask) & !space.mask;
    Cube::new(all, 0).bits().max_by_key(|&bit| cubes_with(bit))
}

/// A larger cube around `cube`, in `space`, that overlaps none of `taken`. Bits are dropped in several orders, and
/// the cube that contains most of `pieces` is returned.
fn grow(cube: Cube, space: Cube, taken: &[Cube], pieces: &[Cube]) -> Cube {
    let mut bits: Vec<u64> = Cube::new(cube.mask & !space.mask, 0).bits().collect();
    let mut best = (0, cube);
    for _ in 0..bits.len() {
        bits.rotate_left(1);
        let larger = bits.iter().fold(cube, |cube, &bit| {
            let wider = cube.without_bit(bit);
            if taken.iter().any(|other| other.overlaps(wider)) { cube } else { wider }
        });
        let gain = pieces.iter().filter(|piece| piece.is_within(larger)).count();
        if gain > best.0 {
            best = (gain, larger);
        }
    }
    best.1
}

/// Whether the union of `others` contains all of `cube`.
fn is_covered(cube: Cube, others: &[Cube]) -> bool {
    let mut covered = true;
    split(cube, others, &mut |_| covered = false);
    covered
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cubes(count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Cube>> {
        let cube = (any::<u16>(), any::<u16>(), any::<u16>())
            .prop_map(|(a, b, value)| Cube::new(u64::from(a | b), value.into()));
        proptest::collection::vec(cube, count)
    }

    fn has(cubes: &[Cube], number: u64) -> bool {
        cubes.iter().any(|cube| cube.contains(number))
    }

    proptest! {
        #[test]
        fn outside_is_what_no_cube_contains(taken in cubes(0..12), number in any::<u16>()) {
            let (free, number) = (outside(&taken), number.into());
            prop_assert_eq!(has(&free, number), !has(&taken, number));
            // A number that differs from a cube by one bit is the likeliest to be wrong.
            for cube in &taken {
                for bit in 0..16 {
                    let near = cube.value ^ (1 << bit);
                    prop_assert_eq!(has(&free, near), !has(&taken, near));
                }
            }
        }

        #[test]
        fn without_takes_away_and_nothing_more(
            wanted in cubes(0..6), taken in cubes(0..6), number in any::<u16>()
        ) {
            let (left, number) = (without(&wanted, &taken), number.into());
            prop_assert_eq!(has(&left, number), has(&wanted, number) && !has(&taken, number));
        }
    }

    #[test]
    fn one_number_is_left_out_by_as_many_cubes_as_it_has_bits() {
        let cubes = outside(&[Cube::new(0x3fff_00ff, 0x0030_002b)]);
        assert_eq!(cubes.len(), 22);
        assert!(cubes.iter().all(|cube| cube.mask.is_power_of_two()));
    }

    #[test]
    fn nothing_and_everything_are_each_others_outside() {
        assert_eq!(outside(&[]), [Cube::ALL]);
        assert_eq!(outside(&[Cube::ALL]), []);
        assert_eq!(outside(&[Cube::new(1, 0), Cube::new(1, 1)]), []);
    }
}
