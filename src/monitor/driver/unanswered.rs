//! What the driver didn't answer that an audit has to know.
//!
//! An audit that can't look is told in the log, however often: a container whose use nobody sees has
//! no quota. The lines are few, and none that a container can cause takes their place.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::monitor::lock::Lock;
use crate::monitor::node::device::Failure;

/// How long the same isn't told again.
const AGAIN: Duration = Duration::from_secs(60);

/// What isn't answered, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Unanswered {
    /// No node can be opened.
    #[error("/dev/nvidiactl can't be opened by it")]
    NoNode,
    /// No client can be made.
    #[error("it makes no client ({})", why(Some(*reason)))]
    NoClient {
        /// What it says.
        reason: Failure,
    },
    /// No device that can be made is that GPU's.
    #[error("it shows no device with the UUID of GPU {index}")]
    NoGpu {
        /// The GPU's index.
        index: u32,
    },
    /// An amount of a GPU.
    #[error("it doesn't tell {amount} of GPU {index} ({})", why(*reason))]
    Amount {
        /// What was asked for.
        amount: Amount,
        /// The GPU's index.
        index: u32,
        /// What it says; `None` where that is nothing of what was asked for.
        reason: Option<Failure>,
    },
}

/// What an audit asks of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Amount {
    /// `NV2080_CTRL_CMD_GPU_GET_PID_INFO`.
    Held,
    /// `NV2080_CTRL_CMD_FB_GET_INFO_V2`.
    Free,
}

impl std::fmt::Display for Amount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Amount::Held => "what processes hold",
            Amount::Free => "what is free",
        })
    }
}

/// What the driver says instead of an answer, in a message.
fn why(reason: Option<Failure>) -> String {
    match reason {
        Some(Failure::Errno(errno)) => errno.desc().to_owned(),
        Some(Failure::Status(status)) => format!("status {status:#x}"),
        None => "it answers with nothing".to_owned(),
    }
}

/// When what was told last.
#[derive(Debug, Default)]
pub(crate) struct Told(Lock<BTreeMap<(u8, u32), Instant>>);

impl Told {
    /// Whether it's to be told now; it is, then. There are as many kinds as a container has GPUs.
    pub(crate) fn is_due(&self, what: &Unanswered, now: Instant) -> bool {
        let kind = match what {
            Unanswered::NoNode => (0, 0),
            Unanswered::NoClient { .. } => (1, 0),
            Unanswered::NoGpu { index } => (2, *index),
            Unanswered::Amount { amount: Amount::Held, index, .. } => (3, *index),
            Unanswered::Amount { amount: Amount::Free, index, .. } => (4, *index),
        };
        let mut told = self.0.lock();
        let is_due = told.get(&kind).is_none_or(|last| now.duration_since(*last) >= AGAIN);
        if is_due {
            told.insert(kind, now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_told_once_a_minute_and_each_by_itself() {
        let told = Told::default();
        let now = Instant::now();
        let of = |amount, index| Unanswered::Amount {
            amount,
            index,
            reason: Some(Failure::Status(0x56)),
        };
        let held = of(Amount::Held, 0);
        assert!(told.is_due(&held, now) && !told.is_due(&held, now + AGAIN / 2));
        assert!(told.is_due(&of(Amount::Held, 1), now));
        assert!(told.is_due(&of(Amount::Free, 0), now));
        assert!(told.is_due(&Unanswered::NoNode, now));
        assert!(told.is_due(&held, now + AGAIN));
        assert_eq!(held.to_string(), "it doesn't tell what processes hold of GPU 0 (status 0x56)");
    }
}
