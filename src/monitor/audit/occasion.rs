//! Why an audit is made.

/// Why it is looked what there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// It's time to.
    Tick,
    /// A process died.
    Death,
    /// What is gone would make room.
    Refusal,
}
