//! Lets all threads of a monitor stop between two pieces of work, so that another program can go on with the process.
//!
//! A thread that serves calls, asks the driver or changes the books holds an [`AtWork`] meanwhile, from before it waits for a
//! call: who brings a pause ends that wait. During a pause no thread begins.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How often a thread looks whether a pause is over, and a pause whether all threads have stopped.
const LOOK: Duration = Duration::from_millis(1);

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
    /// Begins work; waits until a pause is over.
    pub(crate) fn begin(&self) -> AtWork<'_> {
        loop {
            // The thread is counted before it looks, and a pause looks after it has told.
            self.at_work.fetch_add(1, Ordering::SeqCst);
            let at_work = AtWork(self);
            if !self.is_paused.load(Ordering::SeqCst) {
                return at_work;
            }
            drop(at_work);
            std::thread::sleep(LOOK);
        }
    }

    /// Lets no thread begin, has `wake` end the waits of those that wait while they are at work, and waits until none is
    /// at work. `false` if one still is after `patience`: then the pause is over.
    pub(crate) fn pause(&self, patience: Duration, wake: impl FnOnce()) -> bool {
        self.is_paused.store(true, Ordering::SeqCst);
        wake();
        let began = Instant::now();
        while self.at_work.load(Ordering::SeqCst) > 0 {
            if began.elapsed() >= patience {
                self.resume();
                return false;
            }
            std::thread::sleep(LOOK);
        }
        true
    }

    /// Ends a pause.
    pub(crate) fn resume(&self) {
        self.is_paused.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_pause_waits_for_those_at_work_and_keeps_others_from_it() {
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
