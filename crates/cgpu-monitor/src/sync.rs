//! Locks, wake-ups and threads of the monitor: [`Lock`], [`Notifier`] for one thread without a descriptor,
//! [`ChangeFlag`] with one, and [`spawn`].
//!
//! [`Work`] lets all threads stop between two units of work, so that another program can go on with the process. A
//! thread that serves calls, asks the driver or changes the state holds an [`AtWork`] meanwhile, from before it waits
//! for a call: the thread that begins a pause ends that wait. During a pause no thread begins.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

/// How often a thread polls whether a pause has ended, and a pause whether all threads have stopped.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Bytes of a thread's stack.
const STACK_BYTES: usize = 128 << 10;

/// A value that one thread at a time has.
#[derive(Debug, Default)]
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Lock(Mutex::new(value))
    }

    /// Waits until no other thread has the value.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the value without waiting; `None` where another thread has it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The notifier of one thread. It takes no descriptor.
#[derive(Debug, Default)]
pub(crate) struct Notifier {
    is_woken: Mutex<bool>,
    changed: Condvar,
}

impl Notifier {
    /// Wakes the thread. If the thread doesn't wait, its next wait ends at once.
    pub(crate) fn wake(&self) {
        *self.is_woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }

    /// Waits until the thread is woken, for `timeout` at most. `true` if it was woken since the last wait.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let woken = self.is_woken.lock().unwrap_or_else(PoisonError::into_inner);
        let mut woken = match timeout {
            None => {
                let woken = self.changed.wait_while(woken, |woken| !*woken);
                woken.unwrap_or_else(PoisonError::into_inner)
            }
            Some(timeout) => {
                let woken = self.changed.wait_timeout_while(woken, timeout, |woken| !*woken);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        std::mem::take(&mut woken)
    }
}

/// A flag that any thread sets and one thread takes.
#[derive(Debug)]
pub(crate) struct ChangeFlag {
    is_set: AtomicBool,
    /// Readable after the flag was set.
    event: OwnedFd,
}

impl ChangeFlag {
    /// Fails if the process can have no further descriptors.
    pub(crate) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(ChangeFlag { is_set: AtomicBool::new(false), event })
    }

    /// Sets the flag. Only the first of several threads pays a system call.
    pub(crate) fn set(&self) {
        if !self.is_set.swap(true, Ordering::Release) {
            // If the counter is full, the descriptor is readable anyway.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Takes the flag. What was changed before the flag was set is visible to the caller afterwards.
    pub(crate) fn take(&self) -> bool {
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.is_set.swap(false, Ordering::AcqRel)
    }

    /// Readable once the flag is set. It may be readable once more afterwards.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Which threads are at work.
#[derive(Debug, Default)]
pub(crate) struct Work {
    is_paused: AtomicBool,
    at_work: AtomicUsize,
}

/// A thread is at work as long as this value lives.
#[derive(Debug)]
#[must_use = "the work ends when it is dropped"]
pub(crate) struct AtWork<'a>(&'a Work);

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.0.at_work.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Work {
    /// Begins work; waits until a pause has ended.
    pub(crate) fn begin(&self) -> AtWork<'_> {
        loop {
            // The thread is counted before it checks for a pause, and a pause checks the count after it is announced.
            self.at_work.fetch_add(1, Ordering::SeqCst);
            let at_work = AtWork(self);
            if !self.is_paused.load(Ordering::SeqCst) {
                return at_work;
            }
            drop(at_work);
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Lets no thread begin, has `wake` end the waits of those that wait while they are at work, and waits until none
    /// is at work. `false` if one still is after `timeout`: then the pause has ended.
    pub(crate) fn pause(&self, timeout: Duration, wake: impl FnOnce()) -> bool {
        self.is_paused.store(true, Ordering::SeqCst);
        wake();
        let began = Instant::now();
        while self.at_work.load(Ordering::SeqCst) > 0 {
            if began.elapsed() >= timeout {
                self.resume();
                return false;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        true
    }

    pub(crate) fn resume(&self) {
        self.is_paused.store(false, Ordering::SeqCst);
    }
}

/// Starts a thread that no thread joins: it may hang in the driver. Fails if the kernel starts no thread.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK_BYTES);
    thread.spawn(work).map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    #[test]
    fn wake_is_retained_for_the_next_wait() {
        let notifier = Arc::new(Notifier::default());
        assert!(!notifier.wait(Some(Duration::ZERO)), "nothing woke it");
        notifier.wake();
        notifier.wake();
        assert!(notifier.wait(Some(Duration::ZERO)));
        assert!(!notifier.wait(Some(Duration::ZERO)), "two wakes end one wait");
        let other = Arc::clone(&notifier);
        let waits = std::thread::spawn(move || other.wait(None));
        notifier.wake();
        assert!(waits.join().unwrap());
    }

    #[test]
    fn a_flag_is_readable_until_it_is_taken() {
        let flag = ChangeFlag::new().unwrap();
        let is_readable = || {
            let mut asked = [PollFd::new(flag.descriptor(), PollFlags::POLLIN)];
            poll(&mut asked, PollTimeout::ZERO).unwrap() == 1
        };
        assert!(!is_readable() && !flag.take());
        flag.set();
        flag.set();
        assert!(is_readable() && flag.take());
        assert!(!is_readable() && !flag.take());
    }

    #[test]
    fn pause_waits_for_running_work_and_blocks_new() {
        let work = Arc::new(Work::default());
        let first = work.begin();
        assert!(!work.pause(Duration::from_millis(5), || ()), "one is at work");
        let (second, wakes) = (work.begin(), channel());
        drop((first, second));
        assert!(work.pause(Duration::ZERO, || wakes.0.send(()).unwrap()));
        assert!(wakes.1.try_recv().is_ok());
        let (other, (sender, receiver)) = (Arc::clone(&work), channel());
        let thread = std::thread::spawn(move || {
            sender.send("asks").unwrap();
            let _at_work = other.begin();
            sender.send("begins").unwrap();
        });
        assert_eq!(receiver.recv(), Ok("asks"));
        assert!(receiver.recv_timeout(Duration::from_millis(20)).is_err());
        work.resume();
        assert_eq!(receiver.recv(), Ok("begins"));
        thread.join().unwrap();
    }
}
