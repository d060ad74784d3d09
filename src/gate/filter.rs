//! The filter that brings a container's driver calls to its monitor: [`program`].
//!
//! Classic BPF on `struct seccomp_data`, as seccomp(2) has it. Whoever becomes the runtime puts
//! it on, so that all below it has it, beside what the container's own profile makes. Of
//! several filters the kernel takes the strictest answer, and a denial is stricter than
//! `SECCOMP_RET_USER_NOTIF`, that than `SECCOMP_RET_ALLOW` (seccomp(2), "Return values"): so
//! what the profile denies stays denied, and what it permits comes to the monitor.
//!
//! Pure. Which calls are the monitor's is [`traps`](super::traps)' to say.

use nix::libc::{self, sock_filter};

use super::syscall::{
    self, AUDIT_ARCH_AARCH64, AUDIT_ARCH_ARM, AUDIT_ARCH_I386, AUDIT_ARCH_X86_64,
};
use super::traps;

/// The processor, with the entries that its kernels have for older programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// With those for i386 and x32 programs.
    X86_64,
    /// With that for 32-bit arm programs.
    Aarch64,
}

impl Machine {
    /// The one that this is compiled for.
    #[cfg(target_arch = "x86_64")]
    pub const HERE: Machine = Machine::X86_64;
    /// The one that this is compiled for.
    #[cfg(target_arch = "aarch64")]
    pub const HERE: Machine = Machine::Aarch64;
}

/// An entry of the kernel: its `AUDIT_ARCH_*` (linux/audit.h), and where its calls go.
struct Entry {
    architecture: u32,
    calls: &'static [(u32, To)],
}

/// Numbers of i386's calls and of x86-64's are those of `asm/unistd_*.h`.
///
/// x32 has x86-64's architecture and a bit in the number; its `ioctl` is another one, and the
/// common one is as good. The old `mmap` of i386 takes a pointer to its arguments, which no
/// filter can read and which could change after the monitor had read it: it's refused, and
/// 32-bit programs use `mmap2` for decades.
///
/// `remap_file_pages` maps a part of a mapping's file anew, at an offset of the caller's, and nothing
/// shows which file: so any program that has mapped a pool of nvidia-uvm's could have managed memory
/// of it. It is deprecated, and refused as by a kernel without it. `prctl(PR_SET_MM)` changes what a
/// process is known by that has executed another program; kernels without checkpoint/restore refuse
/// it so. Programs that `personality` has laid out without chance would be known by the same; docker's
/// profile refuses it so, too.
const X86_64: &[Entry] = &[
    Entry {
        architecture: AUDIT_ARCH_X86_64,
        calls: &[
            (16, To::Ioctl),
            (9, To::Mapping),
            (X32 | 514, To::Ioctl),
            (X32 | 16, To::Ioctl),
            (X32 | 9, To::Mapping),
            (157, To::Prctl),
            (X32 | 157, To::Prctl),
            (135, To::Personality),
            (X32 | 135, To::Personality),
            (216, To::Enosys),
            (X32 | 216, To::Enosys),
        ],
    },
    Entry {
        architecture: AUDIT_ARCH_I386,
        calls: &[
            (54, To::Ioctl),
            (192, To::Mapping2),
            (90, To::Enomem),
            (172, To::Prctl),
            (136, To::Personality),
            (257, To::Enosys),
        ],
    },
];

const AARCH64: &[Entry] = &[
    Entry {
        architecture: AUDIT_ARCH_AARCH64,
        calls: &[
            (29, To::Ioctl),
            (222, To::Mapping),
            (167, To::Prctl),
            (92, To::Personality),
            (234, To::Enosys),
        ],
    },
    Entry {
        architecture: AUDIT_ARCH_ARM,
        calls: &[
            (54, To::Ioctl),
            (192, To::Mapping2),
            (172, To::Prctl),
            (136, To::Personality),
            (253, To::Enosys),
        ],
    },
];

const X32: u32 = syscall::X32.cast_unsigned();

/// Offsets in `struct seccomp_data` (linux/seccomp.h); an argument has 64 bits.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const OPTION: u32 = 16;
const ADDRESS: u32 = 16;
const REQUEST: u32 = 16 + 8;
const FLAGS: u32 = 16 + 3 * 8;
const OFFSET: u32 = 16 + 5 * 8;
#[cfg(target_endian = "little")]
const UPPER: u32 = 4;

/// `MAP_SHARED` and `MAP_SHARED_VALIDATE` have this bit, and no other type that the kernel
/// takes with an offset.
const SHARED: u32 = 1;

/// `MAP_FIXED`, `MAP_FIXED_NOREPLACE` and `MAP_ANONYMOUS` (asm-generic/mman-common.h).
const FIXED: u32 = 0x10_0010;
const ANONYMOUS: u32 = 0x20;

/// Bits within a page.
const PAGE: u32 = 0xfff;

/// asm-generic/ioctl.h: number, size, and all that UVM's requests have nothing in.
const NUMBER_AND_SIZE: u32 = 0x3fff_00ff;
const TYPE_AND_NUMBER: u32 = 0xffff;
const SIZE: u32 = 0x3fff_0000;
const ABOVE_NUMBER: u32 = 0xffff_ff00;

/// Where to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum To {
    Next,
    Entry(usize),
    Ioctl,
    Sized,
    Mapping,
    Mapping2,
    Prctl,
    Personality,
    Allow,
    Notify,
    Enomem,
    Einval,
    Eperm,
    Enosys,
}

/// A piece of a program.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// A jump may lead here.
    Here(To),
    Load(u32),
    And(u32),
    IfEqual(u32, To, To),
    IfAny(u32, To, To),
    Return(u32),
}

/// The filter of a container.
///
/// # Panics
///
/// Never, but for a table that would make a jump too long, which the tests would see.
#[must_use]
pub fn program(machine: Machine) -> Vec<sock_filter> {
    assemble(&steps(match machine {
        Machine::X86_64 => X86_64,
        Machine::Aarch64 => AARCH64,
    }))
}

fn steps(entries: &[Entry]) -> Vec<Step> {
    let mut steps = vec![Step::Load(ARCHITECTURE)];
    for (at, entry) in entries.iter().enumerate() {
        steps.push(Step::IfEqual(entry.architecture, To::Entry(at), To::Next));
    }
    // An entry that nobody knows has no calls that anybody could look at.
    steps.push(Step::Return(errno(libc::ENOSYS)));
    for (at, entry) in entries.iter().enumerate() {
        steps.extend([Step::Here(To::Entry(at)), Step::Load(NUMBER)]);
        steps.extend(entry.calls.iter().map(|(number, to)| Step::IfEqual(*number, *to, To::Next)));
        steps.push(Step::Return(libc::SECCOMP_RET_ALLOW));
    }
    // Terminals' and sockets' requests, the common ones, have a type and no size: two jumps.
    steps.extend([
        Step::Here(To::Ioctl),
        Step::Load(REQUEST),
        Step::IfAny(SIZE, To::Sized, To::Next),
        Step::IfAny(ABOVE_NUMBER, To::Allow, To::Next),
    ]);
    let (sized, plain): (Vec<u32>, Vec<u32>) =
        traps::uvm().partition(|request| request & SIZE != 0);
    steps.extend(plain.into_iter().map(|request| Step::IfEqual(request, To::Notify, To::Next)));
    steps.push(Step::Return(libc::SECCOMP_RET_ALLOW));
    steps.push(Step::Here(To::Sized));
    steps.extend(sized.into_iter().map(|request| Step::IfEqual(request, To::Notify, To::Next)));
    steps.push(Step::And(NUMBER_AND_SIZE));
    let escapes = traps::escapes();
    steps.extend(escapes.into_iter().map(|escape| Step::IfEqual(escape, To::Notify, To::Next)));
    steps.extend([Step::Load(REQUEST), Step::And(TYPE_AND_NUMBER)]);
    steps.extend(traps::of_any_size().map(|escape| Step::IfEqual(escape, To::Notify, To::Next)));
    steps.extend([
        Step::Return(libc::SECCOMP_RET_ALLOW),
        Step::Here(To::Mapping),
        Step::Load(FLAGS),
        Step::IfAny(SHARED, To::Next, To::Allow),
        // Of no file, whatever the descriptor and the offset are.
        Step::IfAny(ANONYMOUS, To::Allow, To::Next),
        Step::Load(OFFSET),
        Step::IfAny(u32::MAX, To::Notify, To::Next),
        Step::Load(OFFSET + UPPER),
        Step::IfAny(u32::MAX, To::Notify, To::Next),
        // At the beginning of all memory managed memory has that offset: nobody maps anything there
        // but with a capability, or on a host that lets everybody.
        Step::Load(FLAGS),
        Step::IfAny(FIXED, To::Next, To::Allow),
        Step::Load(ADDRESS + UPPER),
        Step::IfAny(u32::MAX, To::Allow, To::Next),
        Step::Load(ADDRESS),
        Step::IfAny(!PAGE, To::Allow, To::Eperm),
        // Of 32-bit programs the kernel drops the upper halves, which may be garbage here.
        Step::Here(To::Mapping2),
        Step::Load(FLAGS),
        Step::IfAny(SHARED, To::Next, To::Allow),
        Step::IfAny(ANONYMOUS, To::Allow, To::Next),
        Step::Load(OFFSET),
        Step::IfAny(u32::MAX, To::Notify, To::Next),
        Step::Load(FLAGS),
        Step::IfAny(FIXED, To::Next, To::Allow),
        Step::Load(ADDRESS),
        Step::IfAny(!PAGE, To::Allow, To::Eperm),
        Step::Here(To::Prctl),
        Step::Load(OPTION),
        Step::IfEqual(libc::PR_SET_MM.cast_unsigned(), To::Einval, To::Allow),
        // All bits ask for what it is.
        Step::Here(To::Personality),
        Step::Load(OPTION),
        Step::IfEqual(u32::MAX, To::Allow, To::Next),
        Step::IfAny(libc::ADDR_NO_RANDOMIZE.cast_unsigned(), To::Eperm, To::Allow),
        Step::Here(To::Allow),
        Step::Return(libc::SECCOMP_RET_ALLOW),
        Step::Here(To::Notify),
        Step::Return(libc::SECCOMP_RET_USER_NOTIF),
        Step::Here(To::Enomem),
        Step::Return(errno(libc::ENOMEM)),
        Step::Here(To::Einval),
        Step::Return(errno(libc::EINVAL)),
        Step::Here(To::Eperm),
        Step::Return(errno(libc::EPERM)),
        Step::Here(To::Enosys),
        Step::Return(errno(libc::ENOSYS)),
    ]);
    steps
}

fn errno(number: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | number.cast_unsigned()
}

/// Turns names into distances; every jump leads forward.
fn assemble(steps: &[Step]) -> Vec<sock_filter> {
    let mut program = Vec::new();
    for (at, step) in steps.iter().enumerate() {
        let jump = |to: To| {
            let rest = steps.get(at + 1..).unwrap_or_default().iter();
            let until = rest.take_while(|step| !matches!(step, Step::Here(here) if *here == to));
            let between = until.filter(|step| !matches!(step, Step::Here(_))).count();
            u8::try_from(if to == To::Next { 0 } else { between }).expect("the program is short")
        };
        let jumping = |test: u32, k: u32, yes: To, no: To| {
            instruction(libc::BPF_JMP | test | libc::BPF_K, jump(yes), jump(no), k)
        };
        program.push(match *step {
            Step::Here(_) => continue,
            Step::Load(offset) => {
                instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset)
            }
            Step::And(mask) => instruction(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, mask),
            Step::IfEqual(value, yes, no) => jumping(libc::BPF_JEQ, value, yes, no),
            Step::IfAny(bits, yes, no) => jumping(libc::BPF_JSET, bits, yes, no),
            Step::Return(verdict) => instruction(libc::BPF_RET | libc::BPF_K, 0, 0, verdict),
        });
    }
    program
}

fn instruction(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    // Classic BPF's codes have 8 bits (linux/bpf_common.h).
    let [low, high, ..] = code.to_le_bytes();
    sock_filter { code: u16::from_le_bytes([low, high]), jt, jf, k }
}
