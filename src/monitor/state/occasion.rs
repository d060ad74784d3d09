//! The reason for an audit, and how deep the audit looks.

/// The reason for an audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occasion {
    /// No process died and no call waits: it is time for the regular audit, or an audit was scheduled.
    Tick,
    /// A process died.
    Death,
    /// A call is about to be refused: what is gone would make room.
    Refusal,
}

/// What the driver is asked for one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// Each client. Figures can't show that a client is gone: memory with two names is shown twice, and memory that a
    /// call has got before its return is both shown and reserved.
    Clients,
    /// Each object.
    Objects,
}
