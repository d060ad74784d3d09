//! A call's costs, counted in a test build: how often its thread opens the container's state and
//! looks up the caller.

use std::cell::Cell;

/// What is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counted {
    /// How often the state was opened.
    pub(crate) state: u32,
    /// How often the caller was looked up.
    pub(crate) callers: u32,
}

thread_local! {
    static COUNTED: Cell<Counted> = const { Cell::new(Counted { state: 0, callers: 0 }) };
}

/// Counts something.
pub(crate) fn count(add: impl FnOnce(&mut Counted)) {
    COUNTED.with(|counted| {
        let mut now = counted.get();
        add(&mut now);
        counted.set(now);
    });
}

/// What was counted since the last time.
pub(crate) fn take() -> Counted {
    COUNTED.with(Cell::take)
}
