//! Signals in the middle of a call of this program's own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::libc;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

/// How long the handler takes.
static HANDLER_MS: AtomicU64 = AtomicU64::new(0);

/// How often it was called.
pub(crate) static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn handle(_: libc::c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
    // nanosleep is async-signal-safe (signal-safety(7)).
    std::thread::sleep(Duration::from_millis(HANDLER_MS.load(Ordering::Relaxed)));
}

/// Handles a signal, and has the call that it interrupts made again, or not.
pub(crate) fn handle_signal(signal: Signal, flags: SaFlags) -> nix::Result<()> {
    let action = SigAction::new(SigHandler::Handler(handle), flags, SigSet::empty());
    // SAFETY: the handler reads and adds to atomic numbers, and sleeps.
    unsafe { sigaction(signal, &action) }.map(drop)
}

/// Sends SIGALRM after so many milliseconds, and from then on every `every_ms` where that is
/// not 0. The call in the middle of which it comes is made again when its handler is done,
/// which takes `handler_ms`.
pub(crate) fn after(ms: i64, every_ms: i64, handler_ms: u64) -> nix::Result<()> {
    HANDLER_MS.store(handler_ms, Ordering::Relaxed);
    handle_signal(Signal::SIGALRM, SaFlags::SA_RESTART)?;
    set(ms, every_ms);
    Ok(())
}

/// Sends SIGALRM once, after so many milliseconds. The call in the middle of which it comes fails.
pub(crate) fn interrupt(ms: i64) -> nix::Result<()> {
    HANDLER_MS.store(0, Ordering::Relaxed);
    handle_signal(Signal::SIGALRM, SaFlags::empty())?;
    set(ms, 0);
    Ok(())
}

fn set(ms: i64, every_ms: i64) {
    let time = |ms: i64| libc::timeval { tv_sec: ms / 1000, tv_usec: ms % 1000 * 1000 };
    let value = libc::itimerval { it_interval: time(every_ms), it_value: time(ms) };
    // SAFETY: reads the struct, and has nowhere to write the old one.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const value, std::ptr::null_mut()) };
}
