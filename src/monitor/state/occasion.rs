//! Why an audit is made, and how deep it looks.

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

/// What is asked for one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// Clients. The figures can't tell that one is gone: what has two names is shown twice, and so
    /// is what a call has got that isn't back, which is set aside, too.
    Clients,
    /// Each object.
    Objects,
}
