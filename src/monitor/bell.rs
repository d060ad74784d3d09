//! A bell: a thread waits for it, and another thread that has something for the first one rings it.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The bell of one thread. It takes no descriptor.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    rung: Mutex<bool>,
    rings: Condvar,
}

impl Bell {
    /// Wakes the thread. Where the thread doesn't wait, its next wait ends at once.
    pub(crate) fn ring(&self) {
        *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.rings.notify_one();
    }

    /// Waits until the bell rings, for `most` at most. `true` where the bell has rung since the last wait.
    pub(crate) fn wait(&self, most: Option<Duration>) -> bool {
        let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rung = match most {
            None => {
                let rung = self.rings.wait_while(rung, |rung| !*rung);
                rung.unwrap_or_else(PoisonError::into_inner)
            }
            Some(most) => {
                let rung = self.rings.wait_timeout_while(rung, most, |rung| !*rung);
                rung.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        std::mem::take(&mut rung)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_ring_wakes_who_waits_and_is_kept_for_who_does_not_yet() {
        let bell = Arc::new(Bell::default());
        assert!(!bell.wait(Some(Duration::ZERO)), "nobody has rung");
        bell.ring();
        bell.ring();
        assert!(bell.wait(Some(Duration::ZERO)));
        assert!(!bell.wait(Some(Duration::ZERO)), "two rings wake once");
        let theirs = Arc::clone(&bell);
        let waits = std::thread::spawn(move || theirs.wait(None));
        bell.ring();
        assert!(waits.join().unwrap());
    }
}
