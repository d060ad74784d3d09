//! The seccomp filter that brings a container's driver calls to its monitor: [`program`].
//!
//! The filter is classic BPF on `struct seccomp_data`, as seccomp(2) describes it. The process that becomes the runtime
//! installs the filter, so every process that it starts has the filter, next to the filter of the container's own
//! profile. If filters disagree, the kernel takes the strictest answer: a refusal before `SECCOMP_RET_USER_NOTIF`, and
//! that before `SECCOMP_RET_ALLOW` (seccomp(2), "Return values"). So a call that the profile refuses stays refused, and
//! a trapped call that it permits comes to the monitor.
//!
//! Pure. [`traps`](super::traps) says which calls the monitor gets.

use nix::libc::{self, sock_filter};

use super::bpf::{ARCHITECTURE, FIRST_ARGUMENT, Label, NUMBER, Step, assemble, errno};
use super::syscall::{AARCH64, Entry, TrappedCall, X86_64};
use super::traps::{self, ABOVE_NUMBER, SIZE, TYPE_AND_NUMBER};

/// The processor, with the system call entries that its kernels have for older programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// x86-64, with the entries for i386 and x32 programs.
    X86_64,
    /// aarch64, with the entry for 32-bit arm programs.
    Aarch64,
}

impl Machine {
    /// The machine that this program is compiled for.
    #[cfg(target_arch = "x86_64")]
    pub const HERE: Machine = Machine::X86_64;
    /// The machine that this program is compiled for.
    #[cfg(target_arch = "aarch64")]
    pub const HERE: Machine = Machine::Aarch64;
}

/// Where the filter goes on with a system call.
fn label(call: TrappedCall) -> To {
    match call {
        TrappedCall::Ioctl => To::Ioctl,
        TrappedCall::Mmap => To::Mapping,
        TrappedCall::Mmap2 => To::Mapping2,
        TrappedCall::OldMmap => To::Enomem,
        TrappedCall::Prctl => To::Prctl,
        TrappedCall::Personality => To::Personality,
        TrappedCall::RemapFilePages => To::Enosys,
    }
}

/// Offsets in `struct seccomp_data` (linux/seccomp.h). An argument has 64 bits.
const OPTION: u32 = FIRST_ARGUMENT;
const ADDRESS: u32 = FIRST_ARGUMENT;
const REQUEST: u32 = FIRST_ARGUMENT + 8;
const FLAGS: u32 = FIRST_ARGUMENT + 3 * 8;
const OFFSET: u32 = FIRST_ARGUMENT + 5 * 8;
#[cfg(target_endian = "little")]
const UPPER: u32 = 4;

/// `MAP_SHARED` and `MAP_SHARED_VALIDATE` have this bit. No other type that the kernel takes with an offset has it.
const SHARED: u32 = 1;

/// `MAP_FIXED`, `MAP_FIXED_NOREPLACE` and `MAP_ANONYMOUS` (asm-generic/mman-common.h).
const FIXED: u32 = 0x10_0010;
const ANONYMOUS: u32 = 0x20;

/// The bits of an address within its page.
const PAGE: u32 = 0xfff;

/// Number and size of a request (asm-generic/ioctl.h).
const NUMBER_AND_SIZE: u32 = SIZE | 0xff;

/// A label: where a jump leads.
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

impl Label for To {
    const NEXT: Self = To::Next;
}

/// The filter of a container, as instructions.
///
/// # Panics
///
/// Where a table made a jump longer than 255 instructions; the tests would see that.
#[must_use]
pub fn program(machine: Machine) -> Vec<sock_filter> {
    assemble(&steps(match machine {
        Machine::X86_64 => X86_64,
        Machine::Aarch64 => AARCH64,
    }))
}

fn steps(entries: &[Entry]) -> Vec<Step<To>> {
    let mut steps = vec![Step::Load(ARCHITECTURE)];
    for (at, entry) in entries.iter().enumerate() {
        steps.push(Step::IfEqual(entry.architecture, To::Entry(at), To::Next));
    }
    // No entry is known for this architecture: the monitor could not read its calls.
    steps.push(Step::Return(errno(libc::ENOSYS)));
    for (at, entry) in entries.iter().enumerate() {
        steps.extend([Step::Here(To::Entry(at)), Step::Load(NUMBER)]);
        let calls = entry.calls.iter();
        steps.extend(calls.map(|(number, call)| Step::IfEqual(*number, label(*call), To::Next)));
        steps.push(Step::Return(libc::SECCOMP_RET_ALLOW));
    }
    // The most frequent requests, those of terminals and sockets, have a type and no size: two jumps allow them.
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
        // An anonymous mapping has no file, whatever its descriptor and offset are.
        Step::IfAny(ANONYMOUS, To::Allow, To::Next),
        Step::Load(OFFSET),
        Step::IfAny(u32::MAX, To::Notify, To::Next),
        Step::Load(OFFSET + UPPER),
        Step::IfAny(u32::MAX, To::Notify, To::Next),
        // Managed memory at address 0 has offset 0, too. Only a process with a capability can map there, or any
        // process on a host whose `mmap_min_addr` allows it.
        Step::Load(FLAGS),
        Step::IfAny(FIXED, To::Next, To::Allow),
        Step::Load(ADDRESS + UPPER),
        Step::IfAny(u32::MAX, To::Allow, To::Next),
        Step::Load(ADDRESS),
        Step::IfAny(!PAGE, To::Allow, To::Eperm),
        // The kernel ignores the upper halves of a 32-bit program's arguments, and they may be garbage here.
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
        // All bits set ask for the present personality.
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
