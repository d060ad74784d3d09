//! Signals, stops and debuggers in the middle of a call.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cgpu_sim::abi::*;
use nix::sys::ptrace;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, pipe};

use super::{HUGE_BYTES, Shared, argument, request};
use crate::rm::{Fail, Place, Rm, command};

static SIGNALS: AtomicU32 = AtomicU32::new(0);

extern "C" fn note(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

fn handle(signal: Signal, flags: SaFlags) -> anyhow::Result<()> {
    let action = SigAction::new(SigHandler::Handler(note), flags, SigSet::empty());
    // SAFETY: the handler only adds to an atomic number.
    unsafe { sigaction(signal, &action) }?;
    Ok(())
}

/// Sends SIGALRM every so many microseconds; 0 ends it.
fn timer(us: i64) {
    let every = libc::timeval { tv_sec: 0, tv_usec: us };
    let value = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: reads the struct, and has nowhere to write the old one.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const value, std::ptr::null_mut()) };
}

/// Allocates again and again and retries when interrupted; the bytes by our account and
/// how often it was. The driver chooses handles, so a call that ran twice took twice.
fn allocate_anyway(rm: &Rm, count: u64, bytes: u64) -> (u64, u32) {
    let (mut got, mut interrupted) = (0, 0);
    for _ in 0..count {
        loop {
            match rm.alloc_as(rm.ctl(), 0, NV01_MEMORY_LOCAL_USER, bytes) {
                Ok((_, bytes)) => got += bytes,
                Err(Fail::Errno(libc::EINTR)) => {
                    interrupted += 1;
                    continue;
                }
                Err(_) => {}
            }
            break;
        }
    }
    (got, interrupted)
}

fn used(rm: &Rm) -> u64 {
    rm.heap_info().map_or(0, |(total, free)| total - free)
}

/// A timer of 300 µs, with and without SA_RESTART.
pub(super) fn interrupt(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let count = argument(arguments, 0, 500)?;
    let rm = Rm::start(place)?;
    let mut all = 0;
    for (name, flags) in [("restart", SaFlags::SA_RESTART), ("norestart", SaFlags::empty())] {
        handle(Signal::SIGALRM, flags)?;
        SIGNALS.store(0, Ordering::Relaxed);
        timer(300);
        let (got, interrupted) = allocate_anyway(&rm, count, 64 << 10);
        timer(0);
        all += got;
        println!(
            "{name} got={got} interrupted={interrupted} signals={}",
            SIGNALS.load(Ordering::Relaxed)
        );
    }
    println!("used_bytes={}", used(&rm));
    Ok(all)
}

/// A child that works, with a pipe it reports by. Ours is the number it reports.
fn child(work: impl FnOnce() -> u64) -> anyhow::Result<(Pid, OwnedFd)> {
    let (report, answer) = pipe()?;
    std::io::stdout().flush()?;
    // SAFETY: this program has one thread here.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok((child, report)),
        ForkResult::Child => {
            drop(report);
            let got = work();
            let _ = std::fs::File::from(answer).write_all(&got.to_le_bytes());
            // SAFETY: ends this process at once; what it shares stays as it is.
            unsafe { libc::_exit(0) }
        }
    }
}

fn reported(report: OwnedFd) -> u64 {
    let mut bytes = [0; 8];
    std::fs::File::from(report).read_exact(&mut bytes).map_or(0, |()| u64::from_le_bytes(bytes))
}

fn is_over(child: Pid) -> bool {
    !matches!(waitpid(child, Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::StillAlive))
}

/// Another process sends signals as fast as it can.
pub(super) fn storm(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let count = argument(arguments, 0, 500)?;
    handle(Signal::SIGUSR1, SaFlags::empty())?;
    let (worker, report) = child(|| {
        let Ok(rm) = Rm::start(place) else { return 0 };
        let (got, interrupted) = allocate_anyway(&rm, count, 64 << 10);
        println!("interrupted={interrupted} used_bytes={}", used(&rm));
        let _ = std::io::stdout().flush();
        got
    })?;
    while !is_over(worker) {
        let _ = kill(worker, Signal::SIGUSR1);
    }
    Ok(reported(report))
}

/// It is stopped and continued while it allocates.
pub(super) fn stop_self(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let count = argument(arguments, 0, 500)?;
    let (worker, report) = child(|| {
        let Ok(rm) = Rm::start(place) else { return 0 };
        let me = Pid::this();
        super::against(
            || {
                let _ = kill(me, Signal::SIGSTOP);
                std::thread::sleep(Duration::from_micros(200));
            },
            || allocate_anyway(&rm, count, 64 << 10).0,
        )
    })?;
    let mut stops = 0;
    while let WaitStatus::Stopped(..) = waitpid(worker, Some(WaitPidFlag::WUNTRACED))? {
        stops += 1;
        kill(worker, Signal::SIGCONT)?;
    }
    println!("stops={stops}");
    Ok(reported(report))
}

/// Children are killed while they allocate: nothing of theirs may stay.
pub(super) fn kill_during_alloc(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let before = used(&rm);
    for round in 0..argument(arguments, 0, 50)? {
        let (worker, report) = child(|| {
            let Ok(rm) = Rm::start(place) else { return 0 };
            allocate_anyway(&rm, u64::MAX, 1 << 20).0
        })?;
        std::thread::sleep(Duration::from_micros(500 + 137 * (round % 31)));
        kill(worker, Signal::SIGKILL)?;
        waitpid(worker, None)?;
        drop(report);
    }
    // A simulated driver learns of closed files a moment later.
    std::thread::sleep(Duration::from_millis(300));
    println!("before={before} after={}", used(&rm));
    Ok(used(&rm) - before)
}

/// A sibling is stopped in the middle of a call, and its registers and memory are changed
/// to ask for more.
pub(super) fn ptrace_sibling(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let count = argument(arguments, 0, 300)?;
    let rm = Rm::start(place)?;
    let (call, params) = request(&rm, 64 << 10);
    let huge = Shared::new(rm.memory_params(HUGE_BYTES));
    let lie =
        Shared::new(rm.nvos64(rm.device, 0, NV01_MEMORY_LOCAL_USER, huge.address(), huge.bytes));
    let (worker, report) = child(|| {
        let mut got = 0;
        for _ in 0..count {
            for (call, params, bytes) in [(call, params, 64_u64 << 10), (lie, huge, HUGE_BYTES)] {
                call.set(8, 0_u32);
                call.set(rm.abi.nvos64_status, u32::MAX);
                params.set(64, bytes);
                params.set(88, u64::MAX);
            }
            let _ = call.ioctl(rm.ctl(), command(NV_ESC_RM_ALLOC, rm.abi.nvos64_bytes));
            for (call, params) in [(call, params), (lie, huge)] {
                if call.u32(rm.abi.nvos64_status) == NV_OK {
                    got += params.u64(88).wrapping_add(1);
                }
            }
        }
        got
    })?;
    let changed = debug(worker, call, params, lie)?;
    println!("changed={changed} used_bytes={}", used(&rm));
    Ok(reported(report))
}

/// Stops `worker` until it ends, before its calls and in the middle of them by turns, and
/// makes each call one for the lie; how often.
fn debug(worker: Pid, call: Shared, params: Shared, lie: Shared) -> anyhow::Result<u32> {
    let mut changed = 0;
    let begun =
        ptrace::seize(worker, ptrace::Options::empty()).and_then(|()| ptrace::interrupt(worker));
    if let Err(errno) = begun {
        println!("ptrace {errno}");
        return Ok(0);
    }
    for turn in 0_u32.. {
        match waitpid(worker, None) {
            Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) | Err(_) => break,
            Ok(_) => {}
        }
        if let Ok(mut registers) = ptrace::getregs(worker)
            && registers.orig_rax == u64::try_from(libc::SYS_ioctl).unwrap_or(0)
            && registers.rdx == call.address()
        {
            registers.rdx = lie.address();
            let _ = ptrace::setregs(worker, registers);
            let size = std::ptr::without_provenance_mut(params.at.addr() + 64);
            let _ = ptrace::write(worker, size, i64::try_from(HUGE_BYTES)?);
            changed += 1;
        }
        if turn % 2 == 0 {
            let _ = ptrace::syscall(worker, None);
        } else {
            let _ = ptrace::cont(worker, None);
            std::thread::sleep(Duration::from_micros(100));
            let _ = ptrace::interrupt(worker);
        }
    }
    Ok(changed)
}
