//! A notifier: a thread waits for it, and other threads that have work for the first one wake it.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_wake_is_kept_for_the_next_wait() {
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
}
