//! What the monitor reports of its container: allocations over the quota, processes that the monitor killed, and the
//! lines of the log that the container's programs cause.
//!
//! A program may ask for too much a million times a second. So each kind of event has a bucket: an event that finds the
//! bucket empty is only counted, and the next event that is written says how many were left out. When the bucket has a
//! token again, or the container ends, the last refusal that was left out is reported after all.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use crate::gate::settings::Settings;
use crate::snapshot::{Counters, LeftOut};
use crate::sync::Lock;
use cgpu_core::ledger::{Process, Usage};
use cgpu_host::events::{Bucket, Event, EventSink, Kind};
use cgpu_host::process::{ProcStatus, ProcessId};

/// How many refused allocations are reported at once, and the time in microseconds until one more is.
const REFUSALS: (u32, u64) = (10, 10_000_000);

/// How many killed processes are reported at once, and the time in microseconds until one more is.
const KILLS: (u32, u64) = (20, 10_000_000);

/// How many lines may be written at once, and the time in microseconds until one more may be.
const LINES: (u32, u64) = (20, 1_000_000);

/// The most topics that are remembered.
const MOST_REPORTED: usize = 256;

/// Who refused an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refuser {
    /// The quota has too little memory left.
    Quota,
    /// The quota has enough memory left, and the driver has none.
    Driver,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct RefusedAllocation {
    pub(crate) by: Refuser,
    pub(crate) process: Option<Process>,
    /// The GPU's place in the container's order.
    pub(crate) gpu: usize,
    pub(crate) asked_bytes: u64,
    pub(crate) usage: Usage,
}

#[derive(Debug)]
struct Refusals {
    bucket: Bucket,
    /// The last refusal, where it was left out.
    last: Option<RefusedAllocation>,
}

/// When the log checks whether something was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum When {
    /// From time to time: the bucket may have a token again.
    Schedule,
    /// For the last time, when the container ends.
    End,
}

/// The events of the container, and the lines of the log that the container may cause.
#[derive(Debug)]
pub(crate) struct ContainerLog {
    settings: Arc<Settings>,
    counters: Arc<Counters>,
    sink: EventSink,
    began: Instant,
    refusals: Lock<Refusals>,
    kills: Lock<Bucket>,
    /// Limits the lines that the container's programs may cause.
    pub(crate) limit: LogLimit,
}

impl ContainerLog {
    pub(crate) fn new(settings: Arc<Settings>, counters: Arc<Counters>) -> Self {
        let bucket = |(burst, period_us)| Bucket::new(burst, period_us);
        ContainerLog {
            sink: settings.sink(),
            began: Instant::now(),
            refusals: Lock::new(Refusals { bucket: bucket(REFUSALS), last: None }),
            kills: Lock::new(bucket(KILLS)),
            limit: LogLimit::new(),
            settings,
            counters,
        }
    }

    /// Reports an allocation that was refused for the quota, or counts it.
    pub(crate) fn report_refused_allocation(&self, refused: RefusedAllocation) {
        let now_us = self.now_us();
        let mut refusals = self.refusals.lock();
        if !refusals.bucket.take(now_us) {
            refusals.last = Some(refused);
            self.counters.leave_out(LeftOut::Refusals);
            return;
        }
        refusals.last = None;
        drop(refusals);
        let left_out = self.counters.take_left_out(LeftOut::Refusals);
        self.sink.report(Event { left_out, ..self.refusal(refused) });
    }

    /// Whether refusals were left out and not reported yet.
    pub(crate) fn has_left_out(&self) -> bool {
        self.counters.has_left_out_refusals()
    }

    /// Reports how many refusals were left out, if the bucket has a token, or at the end.
    pub(crate) fn report_left_out(&self, when: When) {
        if !self.has_left_out() {
            return;
        }
        let now_us = self.now_us();
        let mut refusals = self.refusals.lock();
        if when == When::Schedule && !refusals.bucket.take(now_us) {
            return;
        }
        let last = refusals.last.take();
        drop(refusals);
        let left_out = self.counters.take_left_out(LeftOut::Refusals);
        let event = match last {
            // `left_out` counts the last refusal, too.
            Some(last) => Event { left_out: left_out.saturating_sub(1), ..self.refusal(last) },
            // The refusals were left out before an update.
            None => Event { left_out, ..Event::new(Kind::AllocationRefused) },
        };
        self.sink.report(event);
    }

    fn refusal(&self, refused: RefusedAllocation) -> Event {
        let gpu = self.settings.gpus.get(refused.gpu);
        let event = Event {
            gpu: gpu.map(|gpu| gpu.index),
            gpu_uuid: gpu.map(|gpu| gpu.uuid.clone()),
            asked_bytes: Some(refused.asked_bytes),
            used_bytes: Some(refused.usage.used_bytes),
            quota_bytes: Some(refused.usage.limit_bytes),
            ..Event::allocation_refused(refused.by == Refuser::Driver)
        };
        match refused.process.map(ProcessId::from) {
            Some(process) if process.alive() => described(event, process.pid),
            Some(process) => event.by(process.pid, None, None),
            None => event,
        }
    }

    /// Reports a process that was killed, or counts it. `event` says which process, and why.
    pub(crate) fn report_killed(&self, event: Event) {
        let now_us = self.now_us();
        let mut bucket = self.kills.lock();
        if !bucket.take(now_us) {
            return self.counters.leave_out(LeftOut::Kills);
        }
        drop(bucket);
        let left_out = self.counters.take_left_out(LeftOut::Kills);
        self.sink.report(Event { left_out, ..event });
    }

    /// Reports a program of the host that has a descriptor of the container, which has ended.
    pub(crate) fn report_leaked(&self, event: Event) {
        if self.limit.take_line() {
            self.sink.report(event);
        }
    }

    /// Reports a quota that root has changed.
    pub(crate) fn report_changed(&self, event: Event) {
        self.sink.report(event);
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }
}

/// `event` with the kernel's facts about its process: the name, and the pid in the innermost of its pid namespaces.
pub(crate) fn described(event: Event, pid: i32) -> Event {
    let Ok(status) = ProcStatus::read(pid) else { return event.by(pid, None, None) };
    event.by(pid, status.innermost_pid(), status.field("Name").filter(|name| !name.is_empty()))
}

/// What is logged once, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Topic {
    Control(u32),
    Class(u32),
    Uvm(u32),
    NoThread,
}

/// Counts the lines that a container causes.
#[derive(Debug)]
pub(crate) struct LogLimit {
    began: Instant,
    lines: Lock<Bucket>,
    reported: Lock<BTreeSet<Topic>>,
}

impl LogLimit {
    pub(crate) fn new() -> Self {
        let lines = Lock::new(Bucket::new(LINES.0, LINES.1));
        LogLimit { began: Instant::now(), lines, reported: Lock::default() }
    }

    /// Takes a line for `topic`: `true` where the line may be written, which is once for each topic. Topics beyond
    /// [`MOST_REPORTED`] get no line.
    pub(crate) fn take_first_line(&self, topic: Topic) -> bool {
        let mut reported = self.reported.lock();
        let is_new = reported.len() < MOST_REPORTED && !reported.contains(&topic);
        is_new && self.take_line() && reported.insert(topic)
    }

    /// Takes a line: `true` where it may be written.
    pub(crate) fn take_line(&self) -> bool {
        let now_us = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.lines.lock().take(now_us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An event reports a process by its name and by its pids on the host and in the container.
    #[test]
    fn event_names_a_process_and_its_pids() {
        let own = std::process::id().cast_signed();
        let event = described(Event::new(Kind::Killed), own);
        assert_eq!((event.pid, event.container_pid), (Some(own), Some(own)));
        assert!(event.program.is_some_and(|name| !name.is_empty() && name.len() < 64));
        // No process has this pid.
        let event = described(Event::new(Kind::Killed), i32::MAX);
        assert_eq!((event.pid, event.container_pid, event.program), (Some(i32::MAX), None, None));
    }

    #[test]
    fn a_flood_is_cut_off() {
        let limit = LogLimit::new();
        let lines = (0..1000).filter(|_| limit.take_line()).count();
        assert!((20..=21).contains(&lines), "{lines}");
    }

    /// A new topic is logged once, and a flood of new topics is cut off.
    #[test]
    fn new_topics_log_once_and_floods_are_cut() {
        let limit = LogLimit::new();
        assert!(
            limit.take_first_line(Topic::Control(7)) && !limit.take_first_line(Topic::Control(7))
        );
        assert!(limit.take_first_line(Topic::Class(7)));
        let reported =
            (8..1000).filter(|number| limit.take_first_line(Topic::Control(*number))).count();
        assert!((18..=19).contains(&reported), "{reported}");
        // A topic that got no line in a flood gets its line later.
        *limit.lines.lock() = Bucket::new(LINES.0, LINES.1);
        assert!(limit.take_first_line(Topic::Control(999)));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let limit = LogLimit::new();
        for number in 0..1000 {
            *limit.lines.lock() = Bucket::new(LINES.0, LINES.1);
            let reported = limit.take_first_line(Topic::Class(number));
            assert_eq!(reported, usize::try_from(number).unwrap() < MOST_REPORTED, "{number}");
        }
    }
}
