//! Threads that end, and whose numbers others get.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use anyhow::bail;
use cgpu_sim::abi::{NV_ESC_RM_ALLOC, NV01_MEMORY_LOCAL_USER};
use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{SaFlags, Signal};
use nix::unistd::{ForkResult, Pid, getpid, gettid};

use crate::alarm;
use crate::rm::{self, Fail, Rm};

/// How long a call is given to get into the driver.
const UNDER_WAY: Duration = Duration::from_millis(150);

/// The number of a thread that called, and ended.
pub(crate) fn ended(rm: &Rm) -> i32 {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let _ = rm.heap_info();
            gettid().as_raw()
        });
        thread.join().unwrap_or_default()
    })
}

/// The number of a thread that asked for memory under `handle`, was interrupted in the middle
/// of it, and ended.
pub(crate) fn interrupted(rm: &Rm, handle: u32, bytes: u64) -> anyhow::Result<i32> {
    alarm::handle_signal(Signal::SIGUSR1, SaFlags::empty())?;
    let tid = AtomicI32::new(0);
    // Left as it is: what was asked can be read there later.
    let params = rm.memory_params(bytes).leak();
    let (address, class) = (params.as_mut_ptr().addr() as u64, NV01_MEMORY_LOCAL_USER);
    let call = rm.nvos64(rm.device, handle, class, address, params.len()).leak();
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            tid.store(gettid().as_raw(), Ordering::SeqCst);
            rm::call(rm.ctl(), NV_ESC_RM_ALLOC, call, rm.abi.nvos64_status)
        });
        std::thread::sleep(UNDER_WAY);
        let tid = tid.load(Ordering::SeqCst);
        // SAFETY: takes numbers only.
        unsafe { libc::syscall(libc::SYS_tgkill, getpid().as_raw(), tid, libc::SIGUSR1) };
        match thread.join() {
            Ok(Err(Fail::Errno(libc::EINTR))) => Ok(tid),
            other => bail!("it wasn't interrupted: {other:?}"),
        }
    })
}

/// fork(2), where the child gets that number, which nobody has any more: what the kernel does
/// when it has given all others.
pub(crate) fn fork_as(tid: i32) -> nix::Result<ForkResult> {
    // SAFETY: a struct of numbers, of which zeros ask for nothing.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    arguments.set_tid = (&raw const tid).addr() as u64;
    arguments.set_tid_size = 1;
    loop {
        let bytes = size_of_val(&arguments);
        // SAFETY: the struct and the number that it points at outlive the call. This program has
        // one thread here, and the child a copy of it, as by fork(2).
        let made = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, bytes) };
        match Errno::result(made) {
            // Joined, and not quite gone.
            Err(Errno::EEXIST) => std::thread::sleep(Duration::from_millis(1)),
            Err(errno) => return Err(errno),
            Ok(0) => return Ok(ForkResult::Child),
            Ok(_) => return Ok(ForkResult::Parent { child: Pid::from_raw(tid) }),
        }
    }
}
