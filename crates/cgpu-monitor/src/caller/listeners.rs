//! The container's seccomp listeners, through which the monitor receives its calls, in queues.
//!
//! A thread that waits for a single listener waits within the receiving ioctl, and other listeners cost its calls
//! nothing: a poll before it would cost each call a microsecond. So each of the first listeners has a queue of its own,
//! with a thread of its own. The last queue has all further ones, and its thread polls them.
//!
//! A queue has one thread at a time: since Linux 6.6 a call wakes all threads that wait for its listener
//! (`recv_wait_event` of `kernel/seccomp.c` waits without `WQ_FLAG_EXCLUSIVE`), and one of them receives it.
//!
//! A thread that waits within the ioctl notices nothing else. So a thread that brings a change counts it and sends a
//! signal to the waiting thread. The signal goes only to a thread that waits: a call in the driver would fail by it.
#![allow(
    unsafe_code,
    reason = "seccomp's ioctls have no safe interface in our crates; a signal's handler is set, and a thread is \
              notified, by raw calls"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::libc::{
    self, SECCOMP_IOCTL_NOTIF_ID_VALID, SECCOMP_IOCTL_NOTIF_RECV, SECCOMP_IOCTL_NOTIF_SEND,
    SECCOMP_IOCTL_NOTIF_SET_FLAGS, seccomp_notif, seccomp_notif_resp, seccomp_notif_sizes,
};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, getpid};

#[cfg(test)]
use crate::caller::test_callers::TestCallers;
use crate::sync::Lock;

/// `SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP`: the caller and the listening thread take turns on one processor.
const SYNC_WAKE_UP: u64 = 1;

/// `SECCOMP_USER_NOTIF_FLAG_CONTINUE`.
const CONTINUE: u32 = 1;

/// The most threads that wait for calls at once.
pub(crate) const QUEUES: usize = 16;

/// The signal is sent again after this time: one that comes between the waiting thread's check and its wait is lost.
const RESEND: Duration = Duration::from_micros(200);
const SIGNAL: Signal = Signal::SIGUSR1;

/// The answer to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    /// The kernel makes the call as the caller asked for it.
    Continue,
    /// The call fails with this error.
    Errno(i32),
    /// The monitor has made the call.
    Done,
}

impl Reply {
    /// The error and the flags of a `seccomp_notif_resp`.
    pub(crate) fn parts(self) -> (i32, u32) {
        match self {
            Self::Continue => (0, CONTINUE),
            Self::Errno(errno) => (-errno, 0),
            Self::Done => (0, 0),
        }
    }

    /// The reply with this error and these flags.
    pub(crate) fn of(parts: (i32, u32)) -> Self {
        match parts {
            (0, CONTINUE) => Self::Continue,
            (0, _) => Self::Done,
            (error, _) => Self::Errno(-error),
        }
    }
}

impl From<Errno> for Reply {
    fn from(errno: Errno) -> Self {
        Self::Errno(errno as i32)
    }
}

/// A listener, with its number.
#[derive(Debug)]
pub(crate) struct Listener {
    number: u64,
    descriptor: OwnedFd,
    /// The callers that wait, in a test without a kernel.
    #[cfg(test)]
    callers: Option<Arc<TestCallers>>,
}

impl Listener {
    pub(crate) fn new(number: u64, descriptor: OwnedFd) -> Self {
        // SAFETY: takes numbers only. Kernels before 6.6 refuse the flag; their calls are slower.
        unsafe { libc::ioctl(descriptor.as_raw_fd(), SECCOMP_IOCTL_NOTIF_SET_FLAGS, SYNC_WAKE_UP) };
        Listener {
            number,
            descriptor,
            #[cfg(test)]
            callers: None,
        }
    }

    /// A listener of a test, which says which callers wait.
    #[cfg(test)]
    pub(crate) fn of_model(number: u64, descriptor: OwnedFd, callers: Arc<TestCallers>) -> Self {
        Listener { number, descriptor, callers: Some(callers) }
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    /// Receives a notification. `None` if its caller has gone, or a signal interrupted the wait.
    pub(crate) fn receive(&self) -> Option<seccomp_notif> {
        // SAFETY: all zeroes are a notification, and the kernel demands that it is zeroed.
        let mut notice: seccomp_notif = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes a notification, whose size [`check_sizes`] compared with the kernel's.
        let received = unsafe {
            libc::ioctl(self.descriptor.as_raw_fd(), SECCOMP_IOCTL_NOTIF_RECV, &raw mut notice)
        };
        (received == 0).then_some(notice)
    }

    /// Whether the caller of notification `id` still waits.
    pub(crate) fn is_valid(&self, id: u64) -> bool {
        #[cfg(test)]
        if let Some(callers) = &self.callers {
            return callers.is_waiting(id);
        }
        // SAFETY: reads the eight bytes of `id`.
        let valid = unsafe {
            libc::ioctl(self.descriptor.as_raw_fd(), SECCOMP_IOCTL_NOTIF_ID_VALID, &raw const id)
        };
        valid == 0
    }

    /// Answers notification `id`. `true` if its caller still waited.
    pub(crate) fn send(&self, id: u64, (error, flags): (i32, u32)) -> bool {
        #[cfg(test)]
        if let Some(callers) = &self.callers {
            return callers.reply(id, (error, flags));
        }
        let mut response = seccomp_notif_resp { id, val: 0, error, flags };
        // SAFETY: reads a `seccomp_notif_resp`, whose size [`check_sizes`] compared.
        let sent = unsafe {
            libc::ioctl(self.descriptor.as_raw_fd(), SECCOMP_IOCTL_NOTIF_SEND, &raw mut response)
        };
        sent == 0
    }
}

/// Compares the sizes of the kernel's seccomp structs with those of this program.
///
/// # Errors
///
/// If sizes differ, or the kernel has no user notification.
pub fn check_sizes() -> io::Result<()> {
    let mut sizes =
        seccomp_notif_sizes { seccomp_notif: 0, seccomp_notif_resp: 0, seccomp_data: 0 };
    // SAFETY: writes a `seccomp_notif_sizes`.
    let asked = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_NOTIF_SIZES, 0, &raw mut sizes)
    };
    if asked != 0 {
        return Err(io::Error::last_os_error());
    }
    let known = (size_of::<seccomp_notif>(), size_of::<seccomp_notif_resp>());
    if (usize::from(sizes.seccomp_notif), usize::from(sizes.seccomp_notif_resp)) != known {
        return Err(io::Error::from(Errno::EOVERFLOW));
    }
    Ok(())
}

#[derive(Debug)]
pub(crate) struct Listeners {
    queues: [Queue; QUEUES],
}

/// Listeners for whose calls one thread waits.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    listeners: Lock<Vec<Arc<Listener>>>,
    /// Counts waits for several listeners. Modulo the number of listeners, it says which one is asked first.
    first: AtomicUsize,
    /// The wait for calls. It ends for a change: a listener came or went, or no more calls are to be received.
    waiting: RecvWait,
}

impl Listeners {
    /// No listener yet. Fails if the signal that ends a wait can't be handled.
    pub(crate) fn new() -> io::Result<Self> {
        handle_signal()?;
        Ok(Listeners { queues: Default::default() })
    }

    /// Adds a listener to the first empty queue, or to the last one. Only one thread adds.
    pub(crate) fn add(&self, listener: Listener) {
        let free = self.queues.iter().find(|queue| queue.is_empty());
        if let Some(queue) = free.or(self.queues.last()) {
            queue.listeners.lock().push(Arc::new(listener));
            queue.waiting.note_change();
        }
    }

    pub(crate) fn remove(&self, number: u64) {
        let has = |queue: &&Queue| queue.all().iter().any(|of| of.number() == number);
        if let Some(queue) = self.queues.iter().find(has) {
            queue.listeners.lock().retain(|listener| listener.number() != number);
            queue.waiting.note_change();
        }
    }

    pub(crate) fn all(&self) -> Vec<Arc<Listener>> {
        self.queues.iter().flat_map(Queue::all).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queues.iter().all(Queue::is_empty)
    }

    /// Has all threads that wait for calls check their listeners again.
    pub(crate) fn wake(&self) {
        self.queues.iter().for_each(|queue| queue.waiting.note_change());
    }

    pub(crate) fn queues(&self) -> &[Queue; QUEUES] {
        &self.queues
    }
}

impl Queue {
    pub(crate) fn all(&self) -> Vec<Arc<Listener>> {
        self.listeners.lock().clone()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.listeners.lock().is_empty()
    }

    /// How many changes there were so far.
    pub(crate) fn changes(&self) -> u64 {
        self.waiting.changes()
    }

    /// Waits for a call of one of `listeners`. `None` for a change beyond the `known` ones, or a call that is gone.
    pub(crate) fn receive<'a>(
        &self,
        (thread, known): (Pid, u64),
        listeners: &'a [Arc<Listener>],
    ) -> Option<(&'a Listener, seccomp_notif)> {
        self.waiting.wait(thread, known, || {
            if let [single] = listeners {
                return single.receive().map(|notice| (&**single, notice));
            }
            let asked = listeners.iter().map(|of| PollFd::new(&of.descriptor, PollFlags::IN));
            let mut asked: Vec<PollFd<'_>> = asked.collect();
            poll(&mut asked, None).ok()?;
            let has = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
            // Another listener comes first each time: one with calls at all times would hold up the others for ever.
            let first = self.first.fetch_add(1, Ordering::Relaxed) % listeners.len().max(1);
            let all = listeners.iter().zip(&asked);
            let all = all.clone().skip(first).chain(all.take(first));
            let ready = all.filter(|(_, asked)| has(asked));
            ready.into_iter().find_map(|(of, _)| of.receive().map(|notice| (&**of, notice)))
        })
    }
}

/// The thread that waits, and the number of changes.
#[derive(Debug, Default)]
pub(crate) struct RecvWait {
    changes: AtomicU64,
    /// The waiting thread, and how many changes it knows.
    waiting: Lock<Option<(Pid, u64)>>,
}

extern "C" fn nothing(_: libc::c_int) {}

/// Has the signal interrupt a system call that waits, and do nothing else.
fn handle_signal() -> io::Result<()> {
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::empty(), SigSet::empty());
    // SAFETY: the handler does nothing, and nothing else in this program handles this signal.
    unsafe { sigaction(SIGNAL, &action) }?;
    Ok(())
}

impl RecvWait {
    /// How many changes there were so far.
    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    /// Waits by `wait`, which a change beyond the `known` ones interrupts. `None` at once if there is such a change.
    pub(crate) fn wait<T>(
        &self,
        thread: Pid,
        known: u64,
        wait: impl FnOnce() -> Option<T>,
    ) -> Option<T> {
        *self.waiting.lock() = Some((thread, known));
        let got = if self.changes() == known { wait() } else { None };
        *self.waiting.lock() = None;
        if self.changes() != known {
            // A signal that was sent is handled here, on the way back from the kernel, and not during a later call.
            std::thread::yield_now();
        }
        got
    }

    /// Counts a change. Returns when no thread waits that doesn't know of it.
    pub(crate) fn note_change(&self) {
        let now = self.changes.fetch_add(1, Ordering::SeqCst) + 1;
        loop {
            let waiting = self.waiting.lock();
            match *waiting {
                Some((thread, known)) if known < now => signal_thread(thread),
                _ => return,
            }
            drop(waiting);
            std::thread::sleep(RESEND);
        }
    }
}

fn signal_thread(thread: Pid) {
    let signal = SIGNAL as libc::c_int;
    // SAFETY: takes numbers only; the thread is one of this process, and waits.
    let reported = unsafe {
        libc::syscall(libc::SYS_tgkill, getpid().as_raw_pid(), thread.as_raw_pid(), signal)
    };
    if let Err(errno) = Errno::result(reported) {
        tracing::error!(%errno, "a thread can't be notified of a change");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use nix::poll::{PollTimeout, poll};

    use super::*;

    /// The first listeners have queues of their own, and the last queue has the others.
    #[test]
    fn first_listeners_get_own_queues_others_share_one() {
        let listeners = Listeners::new().unwrap();
        let add = |number: u64| {
            let file = std::fs::File::open("/dev/null").unwrap();
            listeners.add(Listener::of_model(number, file.into(), Arc::default()));
        };
        let numbers = |queue: usize| -> Vec<u64> {
            listeners.queues()[queue].all().iter().map(|of| of.number()).collect()
        };
        (0..QUEUES as u64 + 2).for_each(add);
        assert_eq!((numbers(0), numbers(14), numbers(15)), (vec![0], vec![14], vec![15, 16, 17]));
        let known = listeners.queues()[3].changes();
        listeners.remove(3);
        listeners.remove(16);
        assert_eq!((numbers(3), numbers(15)), (vec![], vec![15, 17]));
        assert_eq!(listeners.queues()[3].changes(), known + 1, "its thread is notified");
        add(18);
        assert_eq!(numbers(3), [18], "the queue is used again");
        assert_eq!(listeners.all().len(), QUEUES + 1);
    }

    /// A thread that waits is fetched by a signal, and a thread that works is not.
    #[test]
    fn only_waiting_threads_are_interrupted() {
        let waiting = Arc::new(RecvWait::default());
        handle_signal().unwrap();
        let (sender, receiver) = channel();
        let other = Arc::clone(&waiting);
        std::thread::spawn(move || {
            let me = rustix::thread::gettid();
            let nap = || poll(&mut [], PollTimeout::NONE).is_err().then_some(());
            // The first wait is interrupted. The second one knows as little as the first, and ends at once.
            let slept = other.wait(me, 0, nap);
            let stale = other.wait(me, 0, nap);
            sender.send((slept, stale)).unwrap();
            // No signal comes to a thread that doesn't wait.
            let begun = std::time::Instant::now();
            let worked = poll(&mut [], PollTimeout::from(200_u8));
            sender
                .send((worked.ok().map(drop), (begun.elapsed().as_millis() < 200).then_some(())))
                .unwrap();
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(receiver.try_recv().is_err(), "it waits");
        waiting.note_change();
        assert_eq!(receiver.recv_timeout(Duration::from_secs(5)), Ok((Some(()), None)));
        for _ in 0..20 {
            waiting.note_change();
        }
        assert_eq!(receiver.recv_timeout(Duration::from_secs(5)), Ok((Some(()), None)));
    }
}
