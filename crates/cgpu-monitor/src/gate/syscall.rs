//! The system calls that the filter traps or refuses, by their numbers at each entry of the kernel. Decodes a notified
//! system call.
//!
//! Pure: the input is the architecture, number and arguments that the kernel reports. Other calls are not known here.

use nvrm::{Command, low_word};

/// `AUDIT_ARCH_*` of linux/audit.h.
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
const AUDIT_ARCH_I386: u32 = 0x4000_0003;
const AUDIT_ARCH_AARCH64: u32 = 0xc000_00b7;
const AUDIT_ARCH_ARM: u32 = 0x4000_0028;

/// `__X32_SYSCALL_BIT`.
const X32: u32 = 0x4000_0000;

/// A system call that a filter brings to the monitor, or refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TrappedCall {
    Ioctl,
    Mmap,
    Mmap2,
    OldMmap,
    Prctl,
    Personality,
    RemapFilePages,
}

/// A system call entry of the kernel: its `AUDIT_ARCH_*` (linux/audit.h), and the calls by their numbers.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) architecture: u32,
    pub(super) calls: &'static [(u32, TrappedCall)],
}

/// The calls of x86-64's and i386's entries; the numbers are those of `asm/unistd_*.h`.
///
/// x32 has x86-64's architecture and a bit in the number. x32 has its own `ioctl` (514); the common one (16) fails
/// there, and is trapped all the same. i386's old `mmap` takes a pointer to its arguments: no filter can read them, and
/// they could change after the monitor had read them. The filter refuses it; 32-bit programs have used `mmap2` for
/// decades.
///
/// `remap_file_pages` maps a part of a mapping's file again, at an offset that the caller chooses, and nothing shows
/// which file. With it, any program that has mapped a pool of nvidia-uvm could get managed memory from the pool's file.
/// The call is deprecated: the filter refuses it as a kernel without it does. `prctl(PR_SET_MM)` changes the addresses
/// by which the monitor distinguishes the programs that one process executes; kernels without checkpoint/restore refuse
/// it with the same error. `personality(ADDR_NO_RANDOMIZE)` would give all of them the same addresses; docker's profile
/// refuses it with the same error.
pub(super) const X86_64: &[Entry] = &[
    Entry {
        architecture: AUDIT_ARCH_X86_64,
        calls: &[
            (16, TrappedCall::Ioctl),
            (9, TrappedCall::Mmap),
            (X32 | 514, TrappedCall::Ioctl),
            (X32 | 16, TrappedCall::Ioctl),
            (X32 | 9, TrappedCall::Mmap),
            (157, TrappedCall::Prctl),
            (X32 | 157, TrappedCall::Prctl),
            (135, TrappedCall::Personality),
            (X32 | 135, TrappedCall::Personality),
            (216, TrappedCall::RemapFilePages),
            (X32 | 216, TrappedCall::RemapFilePages),
        ],
    },
    Entry {
        architecture: AUDIT_ARCH_I386,
        calls: &[
            (54, TrappedCall::Ioctl),
            (192, TrappedCall::Mmap2),
            (90, TrappedCall::OldMmap),
            (172, TrappedCall::Prctl),
            (136, TrappedCall::Personality),
            (257, TrappedCall::RemapFilePages),
        ],
    },
];

pub(super) const AARCH64: &[Entry] = &[
    Entry {
        architecture: AUDIT_ARCH_AARCH64,
        calls: &[
            (29, TrappedCall::Ioctl),
            (222, TrappedCall::Mmap),
            (167, TrappedCall::Prctl),
            (92, TrappedCall::Personality),
            (234, TrappedCall::RemapFilePages),
        ],
    },
    Entry {
        architecture: AUDIT_ARCH_ARM,
        calls: &[
            (54, TrappedCall::Ioctl),
            (192, TrappedCall::Mmap2),
            (172, TrappedCall::Prctl),
            (136, TrappedCall::Personality),
            (253, TrappedCall::RemapFilePages),
        ],
    },
];

/// Bytes of a page: `mmap2` counts its offset in pages.
const PAGE_BYTES: u64 = 4096;

/// The bit of `MAP_SHARED`, which `MAP_SHARED_VALIDATE` has, too; and `MAP_ANONYMOUS`, a mapping without a file.
const SHARED: u64 = 1;
const ANONYMOUS: u64 = 0x20;

/// A system call that the monitor answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syscall {
    /// `ioctl`.
    Ioctl {
        descriptor: i32,
        /// The request: the kernel takes 32 bits.
        request: u32,
        /// The argument, an address.
        argument: u64,
    },
    /// `mmap` or `mmap2`.
    Map {
        descriptor: i32,
        /// The length in bytes.
        length: u64,
        /// Whether the mapping shares a file.
        shared: bool,
        /// The offset in bytes.
        offset: u64,
    },
}

/// The call; `None` where no filter brings such a call to the monitor.
#[must_use]
pub fn decode(architecture: u32, number: i32, arguments: &[u64; 6]) -> Option<Syscall> {
    let [a, b, c, d, e, f] = *arguments;
    let low = |argument: u64| argument & 0xffff_ffff;
    let map = |length: u64, offset: u64| Syscall::Map {
        descriptor: descriptor(e),
        length,
        shared: d & (SHARED | ANONYMOUS) == SHARED,
        offset,
    };
    let ioctl = |argument: u64| Syscall::Ioctl {
        descriptor: descriptor(a),
        request: low_word(b),
        argument,
    };
    let pages = |offset: u64| low(offset).saturating_mul(PAGE_BYTES);
    // An address of a 32-bit program or of an x32 program has 32 bits. x32's mmap is decoded as x86-64's: its offset
    // has 64 bits.
    let is_narrow = matches!(architecture, AUDIT_ARCH_I386 | AUDIT_ARCH_ARM)
        || number.cast_unsigned() & X32 != 0;
    let mut entries = X86_64.iter().chain(AARCH64);
    let entry = entries.find(|entry| entry.architecture == architecture)?;
    let (_, call) = entry.calls.iter().find(|(of, _)| *of == number.cast_unsigned())?;
    match call {
        TrappedCall::Ioctl if is_narrow => Some(ioctl(low(c))),
        TrappedCall::Ioctl => Some(ioctl(c)),
        TrappedCall::Mmap => Some(map(b, f)),
        TrappedCall::Mmap2 => Some(map(low(b), pages(f))),
        // The filter answers these itself.
        TrappedCall::OldMmap
        | TrappedCall::Prctl
        | TrappedCall::Personality
        | TrappedCall::RemapFilePages => None,
    }
}

/// A descriptor as the kernel reads it: the argument's lower 32 bits.
fn descriptor(argument: u64) -> i32 {
    let [a, b, c, d, ..] = argument.to_le_bytes();
    i32::from_le_bytes([a, b, c, d])
}

/// The request by which the monitor itself makes a call of that number and size, with the type and the directions
/// that the driver's own programs use.
///
/// `None` where a request can't hold the size or the number.
#[must_use]
pub fn request(command: &Command) -> Option<u32> {
    let size = u32::try_from(command.size()).ok().filter(|size| *size <= 0x3fff)?;
    let number = u8::try_from(command.number()).ok()?;
    Some(0xc000_0000 | size << 16 | u32::from(b'F') << 8 | u32::from(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    const X32_BIT: i32 = X32.cast_signed();

    #[test]
    fn all_entries_say_the_same_call() {
        let upper = 0xdead_beef_0000_0000;
        let arguments = [3 | upper, 0xc030_462b | upper, 0x1000, 0, 0, 0];
        let wanted = Syscall::Ioctl { descriptor: 3, request: 0xc030_462b, argument: 0x1000 };
        for (architecture, number) in [
            (AUDIT_ARCH_X86_64, 16),
            (AUDIT_ARCH_X86_64, 514 | X32_BIT),
            (AUDIT_ARCH_I386, 54),
            (AUDIT_ARCH_AARCH64, 29),
        ] {
            assert_eq!(decode(architecture, number, &arguments), Some(wanted));
        }
    }

    #[test]
    fn the_offset_of_mmap2_is_in_pages() {
        let arguments = [0, 0x2000, 3, 1, 5, 2];
        let wanted = |offset| Syscall::Map { descriptor: 5, length: 0x2000, shared: true, offset };
        assert_eq!(decode(AUDIT_ARCH_X86_64, 9, &arguments), Some(wanted(2)));
        assert_eq!(decode(AUDIT_ARCH_I386, 192, &arguments), Some(wanted(0x2000)));
    }

    #[test]
    fn other_calls_are_none_of_ours() {
        let nothing = [0; 6];
        for (architecture, number) in
            [(AUDIT_ARCH_X86_64, 54), (AUDIT_ARCH_I386, 16), (AUDIT_ARCH_I386, 90), (0, 16)]
        {
            assert_eq!(decode(architecture, number, &nothing), None);
        }
    }

    #[test]
    fn own_requests_encode_number_and_size_like_drivers() {
        let command = Command::of_ioctl(0x4030_002b);
        assert_eq!(request(&command), Some(0xc030_462b));
    }
}
