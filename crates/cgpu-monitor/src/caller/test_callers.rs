//! Callers for tests without a kernel: what is reported to a listener of a caller, and what the caller is answered.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What a test's caller does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caller {
    Waits,
    /// The caller waits until the reply comes, and is gone then.
    GoesThen,
    /// The caller was answered with this error and these flags.
    Answered(i32, u32),
}

/// The callers of a test, by their calls' ids.
#[derive(Debug, Default)]
pub(crate) struct TestCallers(Mutex<BTreeMap<u64, Caller>>);

impl TestCallers {
    fn all(&self) -> MutexGuard<'_, BTreeMap<u64, Caller>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the caller of call `id`.
    pub(crate) fn add(&self, id: u64, caller: Caller) {
        self.all().insert(id, caller);
    }

    /// Whether the caller of call `id` waits.
    pub(crate) fn is_waiting(&self, id: u64) -> bool {
        matches!(self.all().get(&id), Some(Caller::Waits | Caller::GoesThen))
    }

    /// Answers call `id` with an error and flags, as the kernel takes them. `true` if its caller waited.
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

    /// Takes out the caller of call `id`, which then doesn't wait any more.
    pub(crate) fn remove(&self, id: u64) -> Option<Caller> {
        self.all().remove(&id)
    }
}
