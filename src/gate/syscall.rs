//! Decodes a notified system call, whichever entry of the kernel it came by.
//!
//! Pure: the input is the architecture, number and arguments that the kernel reports. Calls that no filter brings to
//! the monitor are not known here.

use crate::rm::{Command, low_word};

/// `AUDIT_ARCH_*` of linux/audit.h.
pub(super) const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;
pub(super) const AUDIT_ARCH_I386: u32 = 0x4000_0003;
pub(super) const AUDIT_ARCH_AARCH64: u32 = 0xc000_00b7;
pub(super) const AUDIT_ARCH_ARM: u32 = 0x4000_0028;

/// `__X32_SYSCALL_BIT`.
pub(super) const X32: i32 = 0x4000_0000;

/// Bytes of a page: `mmap2` counts its offset in pages.
const PAGE_BYTES: u64 = 4096;

/// The bit of `MAP_SHARED`, which `MAP_SHARED_VALIDATE` has, too; and `MAP_ANONYMOUS`, a mapping without a file.
const SHARED: u64 = 1;
const ANONYMOUS: u64 = 0x20;

/// `linux/prctl.h`, `linux/personality.h`.
const PR_SET_MM: u32 = 35;
const ADDR_NO_RANDOMIZE: u32 = 0x0004_0000;

/// `asm-generic/errno-base.h`.
const EPERM: i32 = 1;
const EINVAL: i32 = 22;

/// A system call that the monitor answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Syscall {
    /// `ioctl`.
    Ioctl {
        /// The descriptor.
        descriptor: i32,
        /// The request; the driver reads 32 bits of it.
        request: u64,
        /// The argument, an address.
        argument: u64,
    },
    /// `mmap` or `mmap2`.
    Map {
        /// The descriptor.
        descriptor: i32,
        /// The length in bytes.
        length: u64,
        /// Whether the mapping shares a file.
        shared: bool,
        /// The offset in bytes.
        offset: u64,
    },
    /// `prctl`, which may change the addresses that tell one program of a process from the next.
    Prctl {
        /// The option, such as `PR_SET_MM`.
        option: u32,
    },
    /// `personality`.
    Personality {
        /// The new personality's bits; all bits set ask for the present one.
        bits: u32,
    },
}

impl Syscall {
    /// The error for a call that would make two programs of a process look alike: the error of a kernel without that
    /// `prctl`, or of docker's profile (see [`super::filter`]). `None` for every other call.
    #[must_use]
    pub fn refusal(self) -> Option<i32> {
        match self {
            Self::Prctl { option } if option == PR_SET_MM => Some(EINVAL),
            Self::Personality { bits } if bits != u32::MAX && bits & ADDR_NO_RANDOMIZE != 0 => {
                Some(EPERM)
            }
            _ => None,
        }
    }
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
    let ioctl =
        |argument: u64| Syscall::Ioctl { descriptor: descriptor(a), request: low(b), argument };
    let pages = |offset: u64| low(offset).saturating_mul(PAGE_BYTES);
    let prctl = || Syscall::Prctl { option: low_word(a) };
    let personality = || Syscall::Personality { bits: low_word(a) };
    match (architecture, number) {
        (AUDIT_ARCH_X86_64, 16) | (AUDIT_ARCH_AARCH64, 29) => Some(ioctl(c)),
        (AUDIT_ARCH_X86_64, 9) | (AUDIT_ARCH_AARCH64, 222) => Some(map(b, f)),
        // x32 has its own `ioctl`. The common `ioctl` fails in an x32 program; decoding it alike does no harm.
        (AUDIT_ARCH_X86_64, number) if number & X32 != 0 => match number & !X32 {
            16 | 514 => Some(ioctl(low(c))),
            9 => Some(map(b, f)),
            157 => Some(prctl()),
            135 => Some(personality()),
            _ => None,
        },
        (AUDIT_ARCH_I386 | AUDIT_ARCH_ARM, 54) => Some(ioctl(low(c))),
        (AUDIT_ARCH_I386 | AUDIT_ARCH_ARM, 192) => Some(map(low(b), pages(f))),
        (AUDIT_ARCH_X86_64, 157)
        | (AUDIT_ARCH_AARCH64, 167)
        | (AUDIT_ARCH_I386 | AUDIT_ARCH_ARM, 172) => Some(prctl()),
        (AUDIT_ARCH_X86_64, 135)
        | (AUDIT_ARCH_AARCH64, 92)
        | (AUDIT_ARCH_I386 | AUDIT_ARCH_ARM, 136) => Some(personality()),
        _ => None,
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

    #[test]
    fn all_entries_say_the_same_call() {
        let upper = 0xdead_beef_0000_0000;
        let arguments = [3 | upper, 0xc030_462b | upper, 0x1000, 0, 0, 0];
        let wanted = Syscall::Ioctl { descriptor: 3, request: 0xc030_462b, argument: 0x1000 };
        for (architecture, number) in [
            (AUDIT_ARCH_X86_64, 16),
            (AUDIT_ARCH_X86_64, 514 | X32),
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
    fn what_would_make_programs_alike_is_refused() {
        let upper = 0xdead_beef_0000_0000;
        let said = |architecture, number, first: u64| {
            decode(architecture, number, &[first | upper, 0, 0, 0, 0, 0]).and_then(Syscall::refusal)
        };
        for (architecture, control, personality) in [
            (AUDIT_ARCH_X86_64, 157, 135),
            (AUDIT_ARCH_X86_64, 157 | X32, 135 | X32),
            (AUDIT_ARCH_I386, 172, 136),
            (AUDIT_ARCH_AARCH64, 167, 92),
            (AUDIT_ARCH_ARM, 172, 136),
        ] {
            assert_eq!(said(architecture, control, 35), Some(EINVAL));
            assert_eq!(said(architecture, control, 99), None);
            assert_eq!(said(architecture, personality, 0x0004_0008), Some(EPERM));
            for permitted in [0, 8, 0xffff_ffff] {
                assert_eq!(said(architecture, personality, permitted), None);
            }
        }
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
    fn a_request_of_ours_says_number_and_size_as_the_drivers_does() {
        let command = Command::of_ioctl(0xffff_ffff_4030_002b);
        assert_eq!(request(&command), Some(0xc030_462b));
    }
}
