//! The callers of tests that have no kernel: what a listener is told of them, and what they are told.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A caller of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caller {
    Waits,
    /// It waits until the reply comes, and is gone then.
    GoesThen,
    /// It was answered so: error and flags.
    Answered(i32, u32),
}

/// The callers of a test, by their calls' ids.
#[derive(Debug, Default)]
pub(crate) struct TestCallers(Mutex<BTreeMap<u64, Caller>>);

impl TestCallers {
    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Caller>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more.
    pub(crate) fn add(&self, id: u64, caller: Caller) {
        self.all().insert(id, caller);
    }

    /// Whether its caller waits.
    pub(crate) fn is_waiting(&self, id: u64) -> bool {
        matches!(self.all().get(&id), Some(Caller::Waits | Caller::GoesThen))
    }

    /// Replies so, as the kernel takes it; whether somebody waited.
    pub(crate) fn reply(&self, id: u64, (error, flags): (i32, u32)) -> bool {
        let mut all = self.all();
        match all.get_mut(&id) {
            Some(caller @ Caller::Waits) => {
                *caller = Caller::Answered(error, flags);
                true
            }
            _ => {
                all.remove(&id);
                false
            }
        }
    }

    /// What became of it; it doesn't wait any more.
    pub(crate) fn remove(&self, id: u64) -> Option<Caller> {
        self.all().remove(&id)
    }
}
