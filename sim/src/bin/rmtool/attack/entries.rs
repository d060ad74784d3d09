//! Other ways into the same call.

use std::arch::asm;
use std::os::fd::RawFd;

use anyhow::ensure;
use cgpu_sim::abi::*;
use cgpu_sim::bytes::Fields;

use super::{HUGE_BYTES, Shared, argument, reached, reached_times, request};
use crate::rm::{Fail, Place, Rm, command, raw_ioctl};

/// Whether the call in shared memory got memory, and how much.
fn outcome(rm: &Rm, what: &str, rc: i64, call: Shared, params: Shared) -> u64 {
    let status = call.u32(rm.abi.nvos64_status);
    let bytes = if rc == 0 && status == NV_OK { params.u64(88).wrapping_add(1) } else { 0 };
    let fail = if rc < 0 { crate::rm::errno() } else { Fail::Status(status) };
    println!("{what} rc={rc} {fail} bytes={bytes}");
    // Taken for what it is: given, or refused for its size.
    reached_times(u64::from(rc == 0 && [NV_OK, NV_ERR_NO_MEMORY].contains(&status)));
    bytes
}

fn size(arguments: &[String]) -> anyhow::Result<u64> {
    argument(arguments, 0, HUGE_BYTES)
}

fn wrap(number: u32, size: usize, address: u64) -> anyhow::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    bytes.set_u32(0, number);
    bytes.set_u32(4, u32::try_from(size)?);
    bytes.set_u64(8, address);
    Ok(bytes)
}

/// Inside `NV_ESC_IOCTL_XFER_CMD`.
pub(super) fn xfer(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let (call, params) = request(&rm, size(arguments)?);
    let mut bytes = wrap(NV_ESC_RM_ALLOC, call.bytes, call.address())?;
    let done = raw_ioctl(rm.ctl(), command(NV_ESC_IOCTL_XFER_CMD, 16), &mut bytes);
    Ok(outcome(&rm, "xfer", if done.is_ok() { 0 } else { -1 }, call, params))
}

/// Inside two of them: the driver unwraps one.
pub(super) fn xfer_nested(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let (call, params) = request(&rm, size(arguments)?);
    call.set(rm.abi.nvos64_status, NV_ERR_INVALID_STATE);
    let inner = Shared::new(wrap(NV_ESC_RM_ALLOC, call.bytes, call.address())?.to_vec());
    let mut bytes = wrap(NV_ESC_IOCTL_XFER_CMD, 16, inner.address())?;
    let done = raw_ioctl(rm.ctl(), command(NV_ESC_IOCTL_XFER_CMD, 16), &mut bytes);
    ensure!(
        done == Err(Fail::Errno(libc::EINVAL)),
        "it isn't refused as the driver does: {done:?}"
    );
    reached();
    Ok(outcome(&rm, "xfer-nested", if done.is_ok() { 0 } else { -1 }, call, params))
}

/// Types and directions that mean nothing. Type 'X' is left out: with this number and
/// size the kernel takes it for FS_IOC_UNRESVSP64 where a node is a regular file.
pub(super) fn type_byte(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let size = size(arguments)?;
    let mut got = 0;
    for kind in [0x00_u64, 0x46, 0xaa, 0xff] {
        for direction in 0..4_u64 {
            let (call, params) = request(&rm, size);
            let command = direction << 30
                | (rm.abi.nvos64_bytes as u64) << 16
                | kind << 8
                | u64::from(NV_ESC_RM_ALLOC);
            let rc = call.ioctl(rm.ctl(), command);
            got += outcome(&rm, &format!("type={kind:#x} dir={direction}"), rc, call, params);
        }
    }
    Ok(got)
}

/// Bits above the thirty-second in command and descriptor.
pub(super) fn upper_garbage(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let (call, params) = request(&rm, size(arguments)?);
    let command = 0xdead_beef << 32 | command(NV_ESC_RM_ALLOC, rm.abi.nvos64_bytes);
    let fd = 0x5eed_5eed << 32 | u64::try_from(rm.ctl())?;
    // SAFETY: `call` is as long as the command's size says; upper bits are garbage on
    // purpose, and the kernel drops them.
    let rc = unsafe { libc::syscall(libc::SYS_ioctl, fd, command, call.at) };
    Ok(outcome(&rm, "upper-garbage", rc, call, params))
}

/// ioctl by the 32-bit entry.
fn ioctl80(fd: RawFd, command: u64, address: u64) -> i64 {
    let result: i64;
    // SAFETY: the 32-bit ioctl (54) reaches what `address` points at alone; rbx is saved
    // since the compiler keeps it for itself, and the entry spoils r8 to r11.
    unsafe {
        asm!(
            "push rbx",
            "mov ebx, {fd:e}",
            "int 0x80",
            "pop rbx",
            fd = in(reg) fd,
            inlateout("rax") 54_i64 => result,
            in("rcx") command,
            in("rdx") address,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    // The answer is 32 bits wide; as such it has a sign.
    (result << 32) >> 32
}

/// By `int 0x80`, with addresses that fit.
pub(super) fn int80(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT;
    // SAFETY: a new mapping at a low address of the kernel's choice.
    let page = unsafe {
        libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    ensure!(page != libc::MAP_FAILED, "no low memory");
    let call = Shared { at: page.cast(), bytes: rm.abi.nvos64_bytes };
    // SAFETY: within the page mapped above.
    let at = unsafe { page.cast::<u8>().add(1024) };
    let params = Shared { at, bytes: rm.abi.memory_params_bytes };
    let bytes = rm.memory_params(size(arguments)?);
    bytes.iter().enumerate().for_each(|(at, byte)| params.set(at, *byte));
    let bytes = rm.nvos64(rm.device, 0, NV01_MEMORY_LOCAL_USER, params.address(), params.bytes);
    bytes.iter().enumerate().for_each(|(at, byte)| call.set(at, *byte));
    let rc = ioctl80(rm.ctl(), command(NV_ESC_RM_ALLOC, rm.abi.nvos64_bytes), call.address());
    println!("int80 rc={rc}");
    Ok(outcome(&rm, "int80", rc.min(0), call, params))
}
