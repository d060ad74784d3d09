//! Assembles seccomp filters: classic BPF on `struct seccomp_data` (seccomp(2)), with labels. Pure.

use nix::libc::{self, sock_filter};

/// Offsets in `struct seccomp_data` (linux/seccomp.h) of the system call's number and of its `AUDIT_ARCH_*`.
pub(crate) const NUMBER: u32 = 0;
pub(crate) const ARCHITECTURE: u32 = 4;

/// The offset of the first argument, which has 64 bits.
pub(crate) const FIRST_ARGUMENT: u32 = 16;

pub(crate) const FIFTH_ARGUMENT: u32 = 48;

/// Where a jump leads.
pub(crate) trait Label: Copy + PartialEq {
    /// The next step.
    const NEXT: Self;
}

/// A step of a filter, before labels become distances.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Step<L> {
    /// The place of a label.
    Here(L),
    /// Loads the 32 bits at an offset of `struct seccomp_data`.
    Load(u32),
    /// Masks what was loaded.
    And(u32),
    /// Compares what was loaded, and jumps to the first label if it is equal, else to the second one.
    IfEqual(u32, L, L),
    /// Jumps to the first label if any of these bits is set, else to the second one.
    IfAny(u32, L, L),
    /// Ends with a `SECCOMP_RET_*`.
    Return(u32),
}

/// The `SECCOMP_RET_*` by which a call fails with this error.
pub(crate) fn errno(number: i32) -> u32 {
    libc::SECCOMP_RET_ERRNO | number.cast_unsigned()
}

/// Turns labels into distances. Every jump leads forward.
///
/// # Panics
///
/// If a jump is longer than 255 instructions.
pub(crate) fn assemble<L: Label>(steps: &[Step<L>]) -> Vec<sock_filter> {
    let mut program = Vec::new();
    for (at, step) in steps.iter().enumerate() {
        let jump = |to: L| {
            let rest = steps.get(at + 1..).unwrap_or_default().iter();
            let until = rest.take_while(|step| !matches!(step, Step::Here(here) if *here == to));
            let between = until.filter(|step| !matches!(step, Step::Here(_))).count();
            u8::try_from(if to == L::NEXT { 0 } else { between }).expect("the program is short")
        };
        let jumping = |test: u32, k: u32, yes: L, no: L| {
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
    // Classic BPF's codes have 8 bits (linux/bpf_common.h): the two low bytes hold all of a code.
    let [low, high, ..] = code.to_le_bytes();
    sock_filter { code: u16::from_le_bytes([low, high]), jt, jf, k }
}
