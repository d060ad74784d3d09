//! Puts a filter on whose flags a test chooses.
#![allow(unsafe_code, reason = "the kernel's seccomp interface has no safe one in our crates")]

use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::libc::{
    self, SECCOMP_FILTER_FLAG_NEW_LISTENER, SECCOMP_SET_MODE_FILTER, sock_filter, sock_fprog,
};

/// Makes this kernel one from before it knew a flag: `number`, whose second argument are its
/// flags, fails with `EINVAL` from now on where that one is among them. Takes no memory.
pub(crate) fn forget_flag(number: libc::c_long, flag: u32) -> io::Result<()> {
    let number = u32::try_from(number).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    let code = |code: u32| u16::try_from(code).unwrap_or_default();
    let instruction = |of, jt, jf, k| sock_filter { code: code(of), jt, jf, k };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let compare = libc::BPF_JMP | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    let program = [
        instruction(load, 0, 0, 0), // seccomp_data.nr
        instruction(compare | libc::BPF_JEQ, 0, 3, number),
        instruction(load, 0, 0, 24), // seccomp_data.args[1], its lower half
        instruction(compare | libc::BPF_JSET, 0, 1, flag),
        instruction(answer, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EINVAL.cast_unsigned()),
        instruction(answer, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = sock_fprog { len: 6, filter: program.as_ptr().cast_mut() };
    let mode = libc::c_ulong::from(libc::SECCOMP_MODE_FILTER);
    // SAFETY: `program` names instructions that outlive the call; the kernel checks them.
    match unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
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
