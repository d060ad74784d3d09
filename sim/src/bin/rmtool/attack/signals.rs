//! Signals, stops and debuggers in the middle of a call.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::ensure;
use cgpu_sim::abi::*;
use nix::sys::ptrace;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, pipe};

use super::{
    GENEROUS, HUGE_BYTES, Shared, argument, fill_exactly, persist, reached_times, request,
    something_happens,
};
use crate::rm::{Fail, Place, Rm, command};

/// So many signals are a storm.
const MANY: u32 = 200;

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
        let signals = SIGNALS.load(Ordering::Relaxed);
        println!("{name} got={got} interrupted={interrupted} signals={signals}");
        reached_times(u64::from(signals));
    }
    println!("used_bytes={}", used(&rm));
    all = fill_exactly(&rm, all)?;
    something_happens(arguments)?;
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

fn has_ended(child: Pid) -> bool {
    !matches!(waitpid(child, Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::StillAlive))
}

/// What a child reports that did all, which is more than nothing.
fn of_child(report: OwnedFd) -> anyhow::Result<u64> {
    let got = reported(report);
    ensure!(got > 0, "the child failed");
    Ok(got)
}

/// Another process sends signals as fast as it can.
pub(super) fn storm(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let count = argument(arguments, 0, 500)?;
    handle(Signal::SIGUSR1, SaFlags::empty())?;
    // They come while it allocates: what opens a node and makes a client doesn't ask again.
    let storm = SigSet::from_iter([Signal::SIGUSR1]);
    storm.thread_block()?;
    let (worker, report) = child(|| {
        let work = || -> anyhow::Result<u64> {
            let rm = Rm::start(place)?;
            storm.thread_unblock()?;
            let (mut got, mut interrupted) = allocate_anyway(&rm, count, 64 << 10);
            // On a busy machine few have come by now.
            persist(|| {
                let (more, times) = allocate_anyway(&rm, 10, 64 << 10);
                got += more;
                interrupted += times;
                SIGNALS.load(Ordering::Relaxed) >= MANY
            });
            storm.thread_block()?;
            let signals = SIGNALS.load(Ordering::Relaxed);
            println!("interrupted={interrupted} signals={signals} used_bytes={}", used(&rm));
            reached_times(u64::from(signals));
            println!("reached={signals}");
            let got = fill_exactly(&rm, got)?;
            something_happens(arguments)?;
            Ok(got)
        };
        counted(work())
    })?;
    while !has_ended(worker) {
        let _ = kill(worker, Signal::SIGUSR1);
    }
    of_child(report)
}

/// Says what failed.
fn counted(done: anyhow::Result<u64>) -> u64 {
    let _ = std::io::stdout().flush();
    done.unwrap_or_else(|error| {
        eprintln!("child: {error:#}");
        0
    })
}

/// It is stopped and continued while it allocates.
pub(super) fn stop_self(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let count = argument(arguments, 0, 500)?;
    let (worker, report) = child(|| {
        let work = || -> anyhow::Result<u64> {
            let rm = Rm::start(place)?;
            let me = Pid::this();
            let got = super::against(
                || {
                    let _ = kill(me, Signal::SIGSTOP);
                    std::thread::sleep(Duration::from_micros(200));
                },
                || allocate_anyway(&rm, count, 64 << 10).0,
            );
            let got = fill_exactly(&rm, got)?;
            something_happens(arguments)?;
            Ok(got)
        };
        counted(work())
    })?;
    let mut stops = 0;
    while let WaitStatus::Stopped(..) = waitpid(worker, Some(WaitPidFlag::WUNTRACED))? {
        stops += 1;
        kill(worker, Signal::SIGCONT)?;
    }
    println!("stops={stops}");
    reached_times(stops);
    of_child(report)
}

/// Children are killed while they allocate: nothing of theirs may stay.
pub(super) fn kill_during_alloc(place: &Place, arguments: &[String]) -> anyhow::Result<u64> {
    let rm = Rm::start(place)?;
    let before = used(&rm);
    for round in 0..argument(arguments, 0, 50)? {
        let (begun, reports) = pipe()?;
        let (worker, report) = child(|| {
            let Ok(rm) = Rm::start(place) else { return 0 };
            let _ = std::fs::File::from(reports).write_all(&[1]);
            allocate_anyway(&rm, u64::MAX, 16 << 20).0
        })?;
        // It never ends by itself, so that it is in the middle of a call, or between two.
        let has_begun = std::fs::File::from(begun).read_exact(&mut [0]).is_ok();
        std::thread::sleep(Duration::from_micros(137 * (round % 31)));
        kill(worker, Signal::SIGKILL)?;
        let end = waitpid(worker, None)?;
        let is_killed = matches!(end, WaitStatus::Signaled(_, Signal::SIGKILL, _));
        reached_times(u64::from(has_begun && is_killed));
        drop(report);
    }
    // A driver learns of closed files a moment later, and a process that holds others of theirs
    // (a monitor of hundreds that exited) releases them within a second, or later on a busy machine.
    let killed = Instant::now();
    while used(&rm) != before && killed.elapsed() < GENEROUS {
        std::thread::sleep(Duration::from_millis(20));
    }
    let after = used(&rm);
    println!("late_ms={}", killed.elapsed().as_millis());
    println!("before={before} after={after}");
    ensure!(before == after, "the dead still have {} bytes", after.saturating_sub(before));
    let got = fill_exactly(&rm, before)?;
    something_happens(arguments)?;
    Ok(got)
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
    reached_times(u64::from(changed));
    // Of whom nothing was to be had (its calls were for too much) nothing is reported.
    fill_exactly(&rm, reported(report))
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
            let size = std::ptr::without_provenance_mut(params.at.addr() + 64);
            let done = ptrace::setregs(worker, registers)
                .and_then(|()| ptrace::write(worker, size, i64::try_from(HUGE_BYTES).unwrap_or(0)));
            changed += u32::from(done.is_ok());
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
