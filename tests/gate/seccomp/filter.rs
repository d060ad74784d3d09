//! An interpreter of the filter, for machines and entries that aren't here.

use nix::libc::sock_filter;

/// Instructions of classic BPF: code, jumps, operand.
pub(crate) struct Filter(Vec<(u16, u8, u8, u32)>);

/// A system call as a filter sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call {
    /// `AUDIT_ARCH_*`.
    pub(crate) architecture: u32,
    pub(crate) number: u32,
    pub(crate) args: [u64; 6],
}

/// What a filter says, by `SECCOMP_RET_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Allow,
    Notify,
    Errno(u32),
    Other(u32),
}

impl Filter {
    pub(crate) fn of(program: &[sock_filter]) -> Self {
        Self(program.iter().map(|one| (one.code, one.jt, one.jf, one.k)).collect())
    }

    pub(crate) fn run(&self, call: Call) -> Verdict {
        let mut data = Vec::new();
        data.extend(call.number.to_le_bytes());
        data.extend(call.architecture.to_le_bytes());
        data.extend([0; 8]);
        data.extend(call.args.into_iter().flat_map(u64::to_le_bytes));
        let (mut here, mut accumulator) = (0, 0u32);
        loop {
            let (code, yes, no, operand) = self.0[here];
            let offset = usize::try_from(operand).unwrap();
            here += 1;
            let branch = |holds| usize::from(if holds { yes } else { no });
            match code {
                0x20 => {
                    let word = data[offset..offset + 4].try_into().unwrap();
                    accumulator = u32::from_le_bytes(word);
                }
                0x54 => accumulator &= operand,
                0x05 => here += offset,
                0x15 => here += branch(accumulator == operand),
                0x25 => here += branch(accumulator > operand),
                0x35 => here += branch(accumulator >= operand),
                0x45 => here += branch(accumulator & operand != 0),
                0x06 => return verdict(operand),
                _ => panic!("somebody writes an instruction that is new: {code:#x}"),
            }
        }
    }
}

fn verdict(returned: u32) -> Verdict {
    match (returned & 0xffff_0000, returned & 0xffff) {
        (0x7fff_0000, _) => Verdict::Allow,
        (0x7fc0_0000, _) => Verdict::Notify,
        (0x0005_0000, errno) => Verdict::Errno(errno),
        _ => Verdict::Other(returned),
    }
}
