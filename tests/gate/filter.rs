//! A filter that sends the trapped calls to a listener, as a runtime makes it of our section.
#![allow(unsafe_code, reason = "the kernel's seccomp interface has no safe one in our crates")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use cgpu::gate::seccomp::Request;
use nix::libc::{
    self, BPF_ABS, BPF_ALU, BPF_AND, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W,
    SECCOMP_FILTER_FLAG_NEW_LISTENER, SECCOMP_RET_ALLOW, SECCOMP_RET_USER_NOTIF,
    SECCOMP_SET_MODE_FILTER, sock_filter, sock_fprog,
};

const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

const X86_64: u32 = 0xc000_003e;

fn instruction(code: u32, k: u32) -> sock_filter {
    sock_filter { code: u16::try_from(code).unwrap(), jt: 0, jf: 0, k }
}

fn load(offset: u32) -> sock_filter {
    instruction(BPF_LD | BPF_W | BPF_ABS, offset)
}

fn mask(k: u32) -> sock_filter {
    instruction(BPF_ALU | BPF_AND | BPF_K, k)
}

/// Skips so many instructions where the word is, or is not, `k`.
fn compare(k: u32, same: usize, other: usize) -> sock_filter {
    let [jt, jf] = [same, other].map(|skip| u8::try_from(skip).unwrap());
    sock_filter { jt, jf, ..instruction(BPF_JMP | BPF_JEQ | BPF_K, k) }
}

/// What the number is in one entry: a part of its own, so that jumps stay short.
fn entry(requests: &[Request], ioctl: u32, mmap: u32) -> Vec<sock_filter> {
    let notify = instruction(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF);
    let allow = instruction(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    let mut part = vec![load(NUMBER), compare(mmap, 0, 9)];
    part.extend([load(ARGUMENTS + 8 * 3), mask(1), compare(1, 0, 4)]);
    // Shared: both halves of the offset.
    part.extend([load(ARGUMENTS + 8 * 5), compare(0, 0, 3)]);
    part.extend([load(ARGUMENTS + 8 * 5 + 4), compare(0, 0, 1), allow, notify]);
    part.extend([compare(ioctl, 1, 0), allow]);
    for request in requests {
        let (bits, value) = match *request {
            Request::Sized { number, size } => {
                (0x3fff_00ff, u32::from(size) << 16 | u32::from(number))
            }
            Request::Exact(value) => (u32::MAX, value),
            Request::Masked { mask, value } => (mask, value),
        };
        part.extend([load(ARGUMENTS + 8), mask(bits), compare(value, 0, 1), notify]);
    }
    part.push(allow);
    part
}

/// The program, for both entries of a 64-bit kernel.
pub(crate) fn program(requests: &[Request]) -> Vec<sock_filter> {
    let long = entry(requests, 16, 9);
    let mut program = vec![load(ARCHITECTURE), compare(X86_64, 0, long.len())];
    program.extend(long);
    program.extend(entry(requests, 54, 192));
    program
}

/// Puts this process under the filter, and returns the listener.
pub(crate) fn install(program: &[sock_filter], wait_killable: bool) -> io::Result<OwnedFd> {
    const WAIT_KILLABLE_RECV: libc::c_ulong = 1 << 5;
    // SAFETY: takes numbers only.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let program = sock_fprog {
        len: u16::try_from(program.len()).map_err(io::Error::other)?,
        filter: program.as_ptr().cast_mut(),
    };
    let killable = if wait_killable { WAIT_KILLABLE_RECV } else { 0 };
    // SAFETY: `program` names instructions that outlive the call; the kernel checks them.
    let listener = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::c_ulong::from(SECCOMP_SET_MODE_FILTER),
            SECCOMP_FILTER_FLAG_NEW_LISTENER | killable,
            &raw const program,
        )
    };
    if listener < 0 {
        return Err(io::Error::last_os_error());
    }
    let listener = RawFd::try_from(listener).map_err(io::Error::other)?;
    // SAFETY: the kernel has just made it.
    Ok(unsafe { OwnedFd::from_raw_fd(listener) })
}
