//! What a monitor retains in memory of its own program, and of its heap.
#![allow(unsafe_code, reason = "madvise and malloc_trim have no safe interface in our crates")]

use std::fs;

#[cfg(target_env = "gnu")]
use nix::libc;
use rustix::mm::{Advice, madvise};

/// Gives back pages of the program that only its start needed: the kernel maps sixteen around each page that is run,
/// and a monitor runs a few of them for as long as its container lives.
pub(crate) fn give_back_startup_code() {
    let Ok(maps) = fs::read_to_string("/proc/self/maps") else { return };
    for (from, to) in code(&maps) {
        let (Ok(from), Ok(bytes)) = (usize::try_from(from), usize::try_from(to - from)) else {
            continue;
        };
        let start = std::ptr::with_exposed_provenance_mut(from);
        // SAFETY: these are a file's pages that can't be written, mapped a moment ago and never unmapped. The kernel
        // reads a page from the file again when it is run.
        let _ = unsafe { madvise(start, bytes, Advice::LinuxDontNeed) };
    }
}

/// Gives back pages of the heap that were used and freed. A thread that allocates meanwhile waits, for a while if there
/// are many pieces, so this is for a process that is idle.
pub(crate) fn give_back_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes a number only, and gives back what isn't allocated.
    unsafe {
        libc::malloc_trim(0)
    };
}

/// The ranges of `/proc/self/maps` that map a file to be run and can't be written.
fn code(maps: &str) -> impl Iterator<Item = (u64, u64)> {
    maps.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (range, access, path) = (words.next()?, words.next()?, words.nth(3)?);
        if access != "r-xp" || !path.starts_with('/') {
            return None;
        }
        let (from, to) = range.split_once('-')?;
        Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_files_code_is_given_back() {
        let maps = "\
5000-6000 r--p 00000000 fe:00 5 /usr/bin/cgpu-monitor
6000-9000 r-xp 00001000 fe:00 5 /usr/bin/cgpu-monitor
9000-a000 r--p 00004000 fe:00 5 /usr/bin/cgpu-monitor
a000-b000 rw-p 00000000 00:00 0 [heap]
c000-d000 r-xp 00000000 00:00 0 [vdso]
";
        assert_eq!(code(maps).collect::<Vec<_>>(), [(0x6000, 0x9000)]);
    }

    #[test]
    fn a_program_goes_on_without() {
        give_back_startup_code();
        give_back_heap();
        assert!(code(&fs::read_to_string("/proc/self/maps").unwrap()).count() > 0);
    }
}
