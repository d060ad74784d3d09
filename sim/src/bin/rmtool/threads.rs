//! Threads that end, and whose numbers others get.

use std::sync::Barrier;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use anyhow::bail;
use cgpu_sim::abi::{NV_ERR_NO_MEMORY, NV_ESC_RM_ALLOC, NV01_MEMORY_LOCAL_USER};
use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{SaFlags, Signal};
use nix::unistd::{ForkResult, Pid, getpid, gettid};

use crate::alarm;
use crate::rm::{self, Fail, Rm};

/// How long a call is given to get into the driver.
const UNDER_WAY: Duration = Duration::from_millis(150);

/// The unit of the start time that the kernel reports for a thread: one that gets its id is recognised as
/// another thread if it began in another tick.
const TICK: Duration = Duration::from_millis(10);

/// Lets so many threads of one client ask for `bytes` at once, each; what they were given is freed.
/// How many were, and how many were refused because there is no memory.
pub(crate) fn at_once(rm: &Rm, threads: usize, bytes: u64) -> Result<(usize, usize), Fail> {
    let barrier = Barrier::new(threads);
    let ask = || {
        barrier.wait();
        rm.alloc(bytes)
    };
    let asked: Vec<_> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..threads).map(|_| scope.spawn(ask)).collect();
        asking.into_iter().filter_map(|asking| asking.join().ok()).collect()
    });
    let (mut given, mut refused) = (0, 0);
    for asked in asked {
        match asked {
            Ok((handle, _)) => {
                given += 1;
                rm.free(rm.device, handle)?;
            }
            Err(Fail::Status(NV_ERR_NO_MEMORY)) => refused += 1,
            Err(fail) => return Err(fail),
        }
    }
    Ok((given, refused))
}

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
/// of it, when there was a file at `path`, and ended.
pub(crate) fn interrupted(rm: &Rm, handle: u32, bytes: u64, path: &str) -> anyhow::Result<i32> {
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
        while !std::path::Path::new(path).exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(2 * TICK);
        let tid = tid.load(Ordering::SeqCst);
        // SAFETY: takes numbers only.
        unsafe { libc::syscall(libc::SYS_tgkill, getpid().as_raw(), tid, libc::SIGUSR1) };
        match thread.join() {
            Ok(Err(Fail::Errno(libc::EINTR))) => Ok(tid),
            other => bail!("it wasn't interrupted: {other:?}"),
        }
    })
}

/// A thread asks for memory under a handle that is taken by what is no memory, is interrupted and
/// lives on; then that object is freed, which a worker after may have done.
pub(crate) fn taken(rm: &Rm, ready: &str, go: &str) -> Result<(), Fail> {
    let _ = alarm::handle_signal(Signal::SIGUSR1, SaFlags::empty());
    let class = cgpu_sim::abi::KEPLER_CHANNEL_GROUP_A;
    let handle = rm.alloc_object(rm.ctl(), rm.device, rm.handle(), class, &mut [0; 20])?;
    let tid = AtomicI32::new(0);
    let params = rm.memory_params(100 << 20).leak();
    let address = params.as_mut_ptr().addr() as u64;
    let call = rm.nvos64(rm.device, handle, NV01_MEMORY_LOCAL_USER, address, params.len()).leak();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            tid.store(gettid().as_raw(), Ordering::SeqCst);
            let said = rm::call(rm.ctl(), NV_ESC_RM_ALLOC, call, rm.abi.nvos64_status);
            println!("thread {said:?}");
            std::thread::sleep(Duration::from_secs(5));
        });
        std::thread::sleep(UNDER_WAY);
        let tid = tid.load(Ordering::SeqCst);
        // SAFETY: takes numbers only.
        unsafe { libc::syscall(libc::SYS_tgkill, getpid().as_raw(), tid, libc::SIGUSR1) };
        std::thread::sleep(Duration::from_millis(1000));
        let _ = std::fs::write(ready, "");
        while !std::path::Path::new(go).exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(2500));
        rm.free(rm.device, handle)
    })
}

/// Exports memory of the host under another device's name, while its own device is freed and its
/// handle is given to memory of the GPU.
pub(crate) fn exchanged(rm: &mut Rm, file: i32) -> Result<(), Fail> {
    let first = rm.device;
    let mut params = rm.memory_params(1 << 20);
    params[24..28]
        .copy_from_slice(&(1_u32 << cgpu_sim::abi::NVOS32_ATTR_LOCATION_SHIFT).to_le_bytes());
    let class = cgpu_sim::abi::NV01_MEMORY_SYSTEM;
    let handle = rm.alloc_object(rm.ctl(), first, rm.handle(), class, &mut params)?;
    rm.make_device(0)?;
    rm.make_subdevice()?;
    let rm: &Rm = rm;
    std::thread::scope(|scope| {
        let exports = scope.spawn(|| rm.export(handle, file));
        std::thread::sleep(Duration::from_millis(300));
        println!("free-device {:?}", rm.free(rm.client, first));
        println!("alloc {:?}", rm.alloc_as(rm.ctl(), handle, NV01_MEMORY_LOCAL_USER, 700 << 20));
        println!("export {:?}", exports.join());
    });
    println!("free {:?}", rm.free(rm.device, handle));
    Ok(())
}

/// fork(2) of a child with these ids, which no process has any more: what the kernel does when it has
/// given all others. The first is its id in its own pid namespace, the next in the one around that.
pub(crate) fn fork_as(ids: &[i32]) -> nix::Result<ForkResult> {
    // SAFETY: a struct of numbers, of which zeros ask for nothing.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    arguments.set_tid = ids.as_ptr().addr() as u64;
    arguments.set_tid_size = ids.len() as u64;
    loop {
        let bytes = size_of_val(&arguments);
        // SAFETY: the struct and the ids that it points at outlive the call. This program has
        // one thread here, and the child a copy of it, as by fork(2).
        let made = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, bytes) };
        match Errno::result(made) {
            // Joined, and not quite gone.
            Err(Errno::EEXIST) => std::thread::sleep(Duration::from_millis(1)),
            Err(errno) => return Err(errno),
            Ok(0) => return Ok(ForkResult::Child),
            Ok(_) => {
                let child = Pid::from_raw(ids.first().copied().unwrap_or_default());
                return Ok(ForkResult::Parent { child });
            }
        }
    }
}

/// Ends, and leaves the memory to a child that shares it until there is a file at `path`.
pub(crate) fn leave_memory(path: &str) -> anyhow::Result<std::convert::Infallible> {
    extern "C" fn wait(path: *mut libc::c_void) -> libc::c_int {
        // SAFETY: numbers alone; who waits for the output is to hear that we are gone.
        unsafe { libc::close_range(0, 2, 0) };
        // SAFETY: a text that ends with a zero, and is never freed.
        while unsafe { libc::access(path.cast_const().cast(), libc::F_OK) } != 0 {
            // SAFETY: takes a number.
            unsafe { libc::usleep(5_000) };
        }
        0
    }
    let path = std::ffi::CString::new(path)?.into_raw();
    let mut stack = vec![0_u128; 4096];
    let end = stack.as_mut_ptr_range().end.cast();
    // SAFETY: the child has a stack of its own, which is never freed: we end at once, and it calls
    // nothing that needs what a thread of this program has.
    unsafe {
        libc::clone(wait, end, libc::CLONE_VM | libc::SIGCHLD, path.cast());
        libc::_exit(0)
    }
}
