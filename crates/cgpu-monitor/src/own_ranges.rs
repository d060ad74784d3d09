//! The addresses where the monitor's memory is, and will be. A container must not name them to the driver.
//!
//! They are computed once, with margin for later mappings: the kernel puts a new mapping close to the existing ones. Of
//! numbers that are no addresses, one in thousands looks like one of these.

/// How far from the existing mappings a later one may lie, in bytes.
const RESERVED_BYTES: u64 = 4 << 30;

/// The end of the addresses of programs.
const END: u64 = 1 << 56;

/// First and last address of each range, from the lines of `/proc/self/maps`.
pub(crate) fn own_ranges(maps: &str) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for line in maps.lines() {
        let ends = line.split(' ').next().and_then(|ends| ends.split_once('-'));
        let parsed =
            ends.map(|(from, to)| (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16)));
        let Some((Ok(from), Ok(to))) = parsed else { continue };
        // This is vsyscall's page. Nothing can be copied there.
        if from >= END {
            continue;
        }
        let (first, last) =
            (from.saturating_sub(RESERVED_BYTES), to.saturating_add(RESERVED_BYTES));
        match ranges.last_mut() {
            Some((_, before)) if first <= *before => *before = last,
            _ => ranges.push((first, last)),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_near_is_one_range() {
        let maps = "\
555555554000-555555600000 r-xp 00000000 fe:00 1 /usr/bin/cgpu-monitor
555555600000-555555700000 rw-p 00000000 00:00 0 [heap]
7ffff7c00000-7ffff7e00000 rw-p 00000000 00:00 0
7ffffffde000-7ffffffff000 rw-p 00000000 00:00 0 [stack]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
";
        let capacity = RESERVED_BYTES;
        let wanted = [
            (0x5555_5555_4000 - capacity, 0x5555_5570_0000 + capacity),
            (0x7fff_f7c0_0000 - capacity, 0x7fff_ffff_f000 + capacity),
        ];
        assert_eq!(own_ranges(maps), wanted);
        assert!(own_ranges("").is_empty());
    }

    #[test]
    fn our_own_memory_is_in_them() {
        let ranges = own_ranges(&std::fs::read_to_string("/proc/self/maps").unwrap());
        let (boxed, local) = (Box::new(0_u64), 0_u64);
        let later = vec![0_u8; 64 << 20];
        for address in
            [(&raw const *boxed).addr(), (&raw const local).addr(), later.as_ptr().addr()]
        {
            let address = address as u64;
            assert!(ranges.iter().any(|(from, to)| (*from..=*to).contains(&address)));
        }
    }
}
