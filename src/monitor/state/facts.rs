//! How many events of each kind a container may cause, and what was left out.

use std::fs;
use std::sync::Mutex;
use std::time::Instant;

use crate::events::{Bucket, Event, Teller};
use crate::gate::settings::Settings;
use crate::ledger::{Process, Usage};

/// Refused allocations that are told at once, and how long it takes until one more is.
const REFUSALS: (u32, u64) = (10, 10_000_000);

/// The same for processes that were ended.
const KILLS: (u32, u64) = (20, 10_000_000);

/// An allocation that the quota didn't allow.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Refused {
    pub(crate) process: Option<Process>,
    /// The container's GPU of that place in its order.
    pub(crate) gpu: usize,
    pub(crate) asked_bytes: u64,
    pub(crate) usage: Usage,
}

/// Who tells, and how much was told.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) teller: Teller,
    began: Instant,
    pub(crate) refusals: Mutex<Refusals>,
    pub(crate) kills: Mutex<Bucket>,
}

#[derive(Debug)]
pub(crate) struct Refusals {
    pub(crate) bucket: Bucket,
    /// The last one, where it was left out.
    pub(crate) last: Option<Refused>,
}

/// When it's looked whether something was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// Now and then: the bucket may have a token again.
    Due,
    /// For the last time.
    End,
}

impl Facts {
    pub(crate) fn new(settings: &Settings) -> Self {
        Facts {
            teller: settings.teller(),
            began: Instant::now(),
            refusals: Mutex::new(Refusals {
                bucket: Bucket::new(REFUSALS.0, REFUSALS.1),
                last: None,
            }),
            kills: Mutex::new(Bucket::new(KILLS.0, KILLS.1)),
        }
    }

    pub(crate) fn now_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }
}

/// `event` with what the kernel says of the process that it is about: its name, and its number in
/// the innermost of its pid namespaces.
pub(crate) fn described(event: Event, pid: i32) -> Event {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = |name| status.lines().find_map(|line| line.strip_prefix(name));
    let number = || field("NSpid:")?.split_whitespace().last()?.parse().ok();
    event.by(pid, number(), field("Name:").map(str::trim).filter(|name| !name.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Kind;

    #[test]
    fn a_process_is_told_by_its_name_and_its_numbers() {
        let own = std::process::id().cast_signed();
        let event = described(Event::new(Kind::Killed), own);
        assert_eq!((event.pid, event.container_pid), (Some(own), Some(own)));
        assert!(event.program.is_some_and(|name| !name.is_empty() && name.len() < 64));
        // Nobody has that number.
        let event = described(Event::new(Kind::Killed), i32::MAX);
        assert_eq!((event.pid, event.container_pid, event.program), (Some(i32::MAX), None, None));
    }
}
