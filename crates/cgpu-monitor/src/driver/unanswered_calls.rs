//! What an audit asked the driver and got no answer to.
//!
//! It is logged when an audit can't check, and the limit on lines that a container can cause doesn't apply: a container
//! whose use can't be seen has no quota. The lines are few ([`WarningTimes`]).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::node::Failure;
use crate::sync::Lock;

/// The shortest time between two lines of the log about one thing.
const REPEAT_PAUSE: Duration = Duration::from_secs(60);

/// What the driver does not answer, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Unanswered {
    /// No control node can be opened.
    #[error("/dev/nvidiactl can't be opened by it")]
    NoNode,
    /// The driver makes no client.
    #[error("it makes no client ({})", why(Some(*reason)))]
    NoClient { reason: Failure },
    /// The driver makes no device with the UUID of that GPU.
    #[error("it shows no device with the UUID of GPU {index}")]
    NoGpu { index: u32 },
    /// The driver does not report an amount of a GPU.
    #[error("it doesn't tell {amount} of GPU {index} ({})", why(*reason))]
    Amount {
        amount: Amount,
        index: u32,
        /// The driver's error; `None` if the driver's answer lacks the amount.
        reason: Option<Failure>,
    },
}

/// What an audit asks of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Amount {
    /// What processes hold: `NV2080_CTRL_CMD_GPU_GET_PID_INFO`.
    Held,
    /// What is free: `NV2080_CTRL_CMD_FB_GET_INFO_V2`.
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

/// The driver's error in words, for a message.
fn why(reason: Option<Failure>) -> String {
    match reason {
        Some(Failure::Errno(errno)) => errno.desc().to_owned(),
        Some(Failure::Status(status)) => format!("status {status:#x}"),
        None => "it answers with nothing".to_owned(),
    }
}

/// When each unanswered query was last logged, by kind and GPU.
#[derive(Debug, Default)]
pub(crate) struct WarningTimes(Lock<BTreeMap<(u8, u32), Instant>>);

impl WarningTimes {
    /// Whether `what` is to be logged at `now`: once a minute for each kind and GPU. Remembers `now` then.
    pub(crate) fn take_due(&self, what: &Unanswered, now: Instant) -> bool {
        let kind = match what {
            Unanswered::NoNode => (0, 0),
            Unanswered::NoClient { .. } => (1, 0),
            Unanswered::NoGpu { index } => (2, *index),
            Unanswered::Amount { amount: Amount::Held, index, .. } => (3, *index),
            Unanswered::Amount { amount: Amount::Free, index, .. } => (4, *index),
        };
        let mut times = self.0.lock();
        let is_due = times.get(&kind).is_none_or(|last| now.duration_since(*last) >= REPEAT_PAUSE);
        if is_due {
            times.insert(kind, now);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same unanswered query is reported once a minute, and each query separately.
    #[test]
    fn each_warning_repeats_once_a_minute_at_most() {
        let times = WarningTimes::default();
        let now = Instant::now();
        let of = |amount, index| Unanswered::Amount {
            amount,
            index,
            reason: Some(Failure::Status(0x56)),
        };
        let held = of(Amount::Held, 0);
        assert!(times.take_due(&held, now) && !times.take_due(&held, now + REPEAT_PAUSE / 2));
        assert!(times.take_due(&of(Amount::Held, 1), now));
        assert!(times.take_due(&of(Amount::Free, 0), now));
        assert!(times.take_due(&Unanswered::NoNode, now));
        assert!(times.take_due(&held, now + REPEAT_PAUSE));
        assert_eq!(held.to_string(), "it doesn't tell what processes hold of GPU 0 (status 0x56)");
    }
}
