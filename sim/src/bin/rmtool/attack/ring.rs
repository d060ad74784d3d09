//! io_uring, which is no way into the driver.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{bail, ensure};
use cgpu_sim::abi::*;
use cgpu_sim::bytes::Fields;

use super::{HUGE_BYTES, reached, request};
use crate::rm::{Fail, Place, Rm, command, errno, open};

// include/uapi/linux/io_uring.h
const PARAMS_BYTES: usize = 120;
const IORING_OFF_CQ_RING: i64 = 0x800_0000;
const IORING_OFF_SQES: i64 = 0x1000_0000;
const IORING_ENTER_GETEVENTS: u32 = 1;
const IORING_REGISTER_PROBE: u32 = 8;
const IO_URING_OP_SUPPORTED: u16 = 1;
/// The one that brings a command to a file, where the file has a handler of its own for it.
const IORING_OP_URING_CMD: u8 = 46;

/// Most that a ring maps.
const RING_BYTES: usize = 4096;

/// A ring of one entry.
struct Ring {
    fd: OwnedFd,
    params: [u8; PARAMS_BYTES],
    submissions: *mut u8,
    completions: *mut u8,
    entries: *mut u8,
}

impl Ring {
    fn new() -> Result<Self, Fail> {
        let mut params = [0_u8; PARAMS_BYTES];
        // SAFETY: io_uring_setup(2) writes its struct of 120 bytes there.
        let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) };
        let Ok(fd @ 0..) = RawFd::try_from(fd) else { return Err(errno()) };
        // SAFETY: the kernel just made it, and nothing else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let map = |offset| {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
            let null = std::ptr::null_mut();
            // SAFETY: a new mapping at an address of the kernel's choice.
            let at =
                unsafe { libc::mmap(null, RING_BYTES, protection, flags, fd.as_raw_fd(), offset) };
            if at == libc::MAP_FAILED { Err(errno()) } else { Ok(at.cast::<u8>()) }
        };
        let (submissions, completions) = (map(0)?, map(IORING_OFF_CQ_RING)?);
        let entries = map(IORING_OFF_SQES)?;
        Ok(Ring { fd, params, submissions, completions, entries })
    }

    /// A number of a ring, by where its offset stands in the parameters.
    fn number(&self, ring: *mut u8, at: usize) -> &AtomicU32 {
        // SAFETY: the kernel says that it is there; it is shared with the kernel alone, which uses
        // it as atomically, and it stays mapped.
        unsafe { AtomicU32::from_ptr(ring.add(self.params.u32_at(at) as usize).cast()) }
    }

    /// Submits an entry and waits for what becomes of it.
    fn submit(&self, entry: &[u8; 64]) -> Result<i32, Fail> {
        let (tail, mask) = (self.number(self.submissions, 44), self.number(self.submissions, 48));
        let array = self.number(self.submissions, 64);
        // SAFETY: the only entry, of 64 bytes; the kernel reads it when it is submitted.
        unsafe { std::ptr::copy_nonoverlapping(entry.as_ptr(), self.entries, 64) };
        or_errno(mask.load(Ordering::Relaxed) == 0)?;
        array.store(0, Ordering::Relaxed);
        tail.fetch_add(1, Ordering::Release);
        let null = std::ptr::null::<u8>();
        // SAFETY: numbers, and no set of signals.
        let done = unsafe {
            let number = libc::SYS_io_uring_enter;
            libc::syscall(number, self.fd.as_raw_fd(), 1, 1, IORING_ENTER_GETEVENTS, null, 0)
        };
        or_errno(done == 1)?;
        let (head, mask) = (self.number(self.completions, 80), self.number(self.completions, 88));
        let at = head.load(Ordering::Acquire) & mask.load(Ordering::Relaxed);
        let completion = self.params.u32_at(100) as usize + 16 * at as usize;
        // SAFETY: the completion that the kernel waited for, of 16 bytes with the result at 8.
        let result = unsafe { self.completions.add(completion + 8).cast::<i32>().read_volatile() };
        head.fetch_add(1, Ordering::Release);
        Ok(result)
    }

    /// The operations that this kernel knows.
    fn operations(&self) -> Result<BTreeSet<u8>, Fail> {
        let mut probe = vec![0_u8; 16 + 8 * 256];
        // SAFETY: a struct that fits 256 operations, as is passed.
        let done = unsafe {
            let (number, fd) = (libc::SYS_io_uring_register, self.fd.as_raw_fd());
            libc::syscall(number, fd, IORING_REGISTER_PROBE, probe.as_mut_ptr(), 256)
        };
        if done < 0 {
            return Err(errno());
        }
        let known = probe[16..].chunks_exact(8).take(usize::from(probe[1]));
        let is_supported =
            |operation: &&[u8]| operation[2] & IO_URING_OP_SUPPORTED.to_le_bytes()[0] != 0;
        Ok(known.filter(is_supported).map(|operation| operation[0]).collect())
    }
}

fn or_errno(is_so: bool) -> Result<(), Fail> {
    if is_so { Ok(()) } else { Err(errno()) }
}

/// io_uring has no ioctl: of IORING_OP_* none is it (io_uring/opdef.c), and IORING_OP_URING_CMD,
/// the nearest, asks the file for a handler of its own, which neither the driver's files nor
/// FUSE's have.
pub(super) fn io_uring(place: &Place, _: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let ring = match Ring::new() {
        Ok(ring) => ring,
        // By a profile, by `kernel.io_uring_disabled`, or by a kernel that has none.
        Err(refusal @ Fail::Errno(libc::EPERM | libc::ENOSYS)) => {
            println!("io_uring refused {refusal}");
            return Ok(0);
        }
        Err(fail) => bail!("no ring: {fail}"),
    };
    let operations = ring.operations()?;
    println!("operations={} last={:?}", operations.len(), operations.last());
    ensure!(operations.contains(&0), "no NOP among {operations:?}");
    let mut entry = [0; 64];
    ensure!(ring.submit(&entry)? == 0, "the ring does nothing");
    if !operations.contains(&IORING_OP_URING_CMD) {
        // Before Linux 5.19, where no file can be asked.
        reached();
        return Ok(0);
    }
    let (call, _params) = request(&rm, HUGE_BYTES);
    let commands = [command(NV_ESC_RM_ALLOC, rm.abi.nvos64_bytes), u64::from(NV_ESC_RM_ALLOC), 0];
    let uvm = open(&place.dev, "nvidia-uvm")?;
    for (name, file) in [("nvidiactl", &rm.ctl), ("nvidia0", &rm.gpu), ("nvidia-uvm", &uvm)] {
        for command in commands {
            entry[0] = IORING_OP_URING_CMD;
            entry.set_u32(4, u32::try_from(file.as_raw_fd())?);
            entry.set_u32(8, u32::try_from(command)?);
            entry.set_u64(16, call.address());
            // What a handler is given in addition: here what ioctl would be.
            entry.set_u64(48, call.address());
            let result = ring.submit(&entry)?;
            println!("{name} command={command:#x} result={result}");
            ensure!(result == -libc::EOPNOTSUPP, "{name} has a handler for {command:#x}: {result}");
            reached();
        }
    }
    let (total, free) = rm.heap_info()?;
    Ok(total - free)
}
