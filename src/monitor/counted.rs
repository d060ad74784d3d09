//! What a call passes, counted in a test build: how often the books are opened, the caller is looked up, and the call is
//! judged, by this thread.

use std::cell::Cell;

/// What is counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counted {
    /// How often the books were opened.
    pub(crate) books: u32,
    /// How often the caller was looked up.
    pub(crate) callers: u32,
    /// How often a call was judged by its bytes.
    pub(crate) verdicts: u32,
    /// How often it was decided what an object's class takes.
    pub(crate) classes: u32,
}

thread_local! {
    static COUNTED: Cell<Counted> = const { Cell::new(Counted { books: 0, callers: 0, verdicts: 0, classes: 0 }) };
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
