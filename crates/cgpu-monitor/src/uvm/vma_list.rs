//! Finds the mappings that could be managed memory in the kernel's list of a process's mappings (`/proc/PID/maps`,
//! proc_pid_maps(5)). Pure.

use crate::state::Mapped;

/// A listed mapping that could be managed memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Listed<'a> {
    /// The mapping's first address, and the first address behind it.
    pub(crate) mapped: Mapped,
    /// The addresses as the list has them: the mapping's name in `map_files`.
    pub(crate) range: &'a str,
    /// The device and inode of the mapped file, as the list shows them. The file's own file system may show others.
    pub(crate) place: Option<(u64, u64)>,
}

/// The mappings in a list that could be managed memory: shared, with an offset that equals the first address, as the
/// driver demands (`uvm_mmap`, uvm.c).
pub(crate) fn possibly_managed(list: &str) -> impl Iterator<Item = Listed<'_>> {
    list.lines().filter_map(parse_line)
}

fn parse_line(line: &str) -> Option<Listed<'_>> {
    let mut words = line.split_whitespace();
    let (range, access, offset) = (words.next()?, words.next()?, words.next()?);
    let (device, inode) = (words.next()?, words.next()?);
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (from, to) = range.split_once('-')?;
    let (from, to, offset) = (hex(from)?, hex(to)?, hex(offset)?);
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    let device = device.split_once(':');
    let device =
        device.and_then(|(major, minor)| Some(rustix::fs::makedev(number(major)?, number(minor)?)));
    let place = device.zip(inode.parse().ok());
    (access.ends_with('s') && offset == from).then_some(Listed { mapped: (from, to), range, place })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn managed_mapping_is_shared_and_at_its_offset() {
        let list = "\
7f0000000000-7f0000200000 rw-s 7f0000000000 00:05 871 /dev/nvidia-uvm
7f0000200000-7f0000400000 rw-s 00000000 00:05 871 /dev/nvidia-uvm
7f0000400000-7f0000600000 rw-p 7f0000400000 00:05 871 /dev/nvidia-uvm
7f0000600000-7f0000800000 ---s 7f0000600000 fd:0a 12 /a name with spaces (deleted)
";
        let found: Vec<Listed<'_>> = possibly_managed(list).collect();
        let [first, hidden] = &found[..] else { panic!("{found:?}") };
        assert_eq!(first.mapped, (0x7f00_0000_0000, 0x7f00_0020_0000));
        assert_eq!(first.range, "7f0000000000-7f0000200000");
        assert_eq!(first.place, Some((rustix::fs::makedev(0, 5), 871)));
        assert_eq!(
            hidden.place,
            Some((rustix::fs::makedev(0xfd, 10), 12)),
            "it can't be used, and is there"
        );
    }

    /// A line that is no mapping is left out, and a mapping without a file has no place.
    #[test]
    fn malformed_mapping_lines_are_skipped_or_placeless() {
        for no in
            ["", "7f00", "7f00-8f00", "7f00-8f00 rw-s", "x-y rw-s 0 00:05 1", "1-2 rw-s z 00:05 1"]
        {
            assert_eq!(possibly_managed(no).next(), None, "{no:?}");
        }
        let strange = "1000-2000 rw-s 1000 no 5\n3000-4000 rw-s 3000 00:05 many";
        let places: Vec<_> = possibly_managed(strange).map(|listed| listed.place).collect();
        assert_eq!(places, [None, None], "the open file itself says which it is");
    }
}
