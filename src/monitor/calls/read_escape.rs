//! An escape as it was read.

use crate::monitor::caller::listener::Reply;
use crate::monitor::calls::policy::{Pass, Verdict};
use crate::rm::{Command, Decoded, Refusal};

/// An escape as it was read, whoever it is meant for.
#[derive(Debug)]
pub(crate) struct ReadEscape {
    pub(crate) command: Command,
    pub(crate) address: u64,
    pub(crate) decoded: Decoded,
    pub(crate) verdict: Verdict,
    /// Whether another call wrapped it.
    pub(crate) wrapped: bool,
}

/// Why an escape isn't known.
#[derive(Debug)]
pub(crate) enum Unread {
    Memory(Reply),
    Refused(Refusal),
}

impl ReadEscape {
    /// Why it continues, where this is so whatever its descriptor is.
    pub(crate) fn passes(&self) -> Option<&'static Pass> {
        match self.verdict {
            Verdict::Continue(pass) if !self.wrapped && pass.asks_no_descriptor() => Some(pass),
            _ => None,
        }
    }
}
