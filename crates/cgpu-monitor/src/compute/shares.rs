//! What is known of the container's shares of its GPUs' computing time. They are set in
//! [`slices`](crate::compute::slices) and [`turns`](crate::compute::turns).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::node::{Failure, Rm};
use crate::state::ScheduledSlice;
use crate::sync::{Lock, Notifier};
use cgpu_core::ledger::Process;
use cgpu_core::sched::{Period, Span};
use cgpu_host::registry::share::Turns;
use nvrm::number::NVA06C_CTRL_CMD_SET_TIMESLICE;
use nvrm::usage::Sample;

/// How far samples reach back: a process that is new isn't in them yet.
const GRACE: Duration = Duration::from_secs(15);

/// For how long the groups of a program may be out of reach before the program is taken off the GPU.
const OUT_OF_REACH: Duration = Duration::from_secs(1);

/// The container's shares of its GPUs.
#[derive(Debug)]
pub(crate) struct Shares {
    gpus: Lock<Vec<OnGpu>>,
    /// Wakes the thread that sets slices: something has changed that they depend on.
    pub(crate) changed: Notifier,
}

/// What is known of a GPU.
#[derive(Debug, Default)]
pub(crate) struct OnGpu {
    /// The container's period; `None` if the monitor sets no slices.
    pub(crate) round: Option<Period>,
    /// When the container may run: a frame's length in microseconds, and spans of it; `None` if it may always run.
    pub(crate) turns: Option<(u64, Vec<Span>)>,
    /// When each container on the GPU may run; `None` if all may always run.
    pub(crate) frame: Option<Turns>,
    /// By the control's name, why the driver refused the last control that was to hold a share.
    failures: BTreeMap<&'static str, Failure>,
    /// Groups whose slices can't be set, because no descriptor of their program leads to them: since when, and whether
    /// that was logged.
    out_of_reach: BTreeMap<(u32, u32), (Instant, bool)>,
    /// The container's processes that were not on the GPU lately.
    pub(crate) resting: BTreeSet<Process>,
    /// Since when each process is known to compute.
    since: BTreeMap<Process, Instant>,
}

impl Shares {
    pub(crate) fn new(gpus: usize) -> Self {
        let gpus = (0..gpus).map(|_| OnGpu::default()).collect();
        Shares { gpus: Lock::new(gpus), changed: Notifier::default() }
    }

    /// Queries or changes what is known of a GPU. Returns the default if the container has no such GPU.
    pub(crate) fn on<T: Default>(&self, gpu: usize, ask: impl FnOnce(&mut OnGpu) -> T) -> T {
        self.gpus.lock().get_mut(gpu).map(ask).unwrap_or_default()
    }

    /// The container's period on a GPU; `None` if the monitor sets no slices.
    pub(crate) fn round(&self, gpu: usize) -> Option<Period> {
        self.on(gpu, |on| on.round)
    }

    /// When the container may run on a GPU: the frame's length in microseconds, and its spans; `None` if it may always
    /// run.
    pub(crate) fn turns(&self, gpu: usize) -> Option<(u64, Vec<Span>)> {
        self.on(gpu, |on| on.turns.clone())
    }

    /// Whether a container on a GPU may run at times only.
    pub(crate) fn has_frame(&self, gpu: usize) -> bool {
        self.on(gpu, |on| on.frame.is_some())
    }

    /// When each container on a GPU may run; `None` if that is as in `known`.
    pub(crate) fn frame_if_not(&self, gpu: usize, known: Option<&Turns>) -> Option<Option<Turns>> {
        self.on(gpu, |on| (on.frame.as_ref() != known).then(|| on.frame.clone()))
    }

    /// What the driver refused of a GPU, and why, in words.
    pub(crate) fn failure(&self, gpu: usize) -> Option<String> {
        let text = |(what, failure): (&&str, &Failure)| format!("{what}: {failure}");
        self.on(gpu, |on| on.failures.first_key_value().map(text))
    }

    /// The container's processes that were not on a GPU lately.
    pub(crate) fn resting(&self, gpu: usize) -> BTreeSet<Process> {
        self.on(gpu, |on| on.resting.clone())
    }

    /// Notes that the slice of an existing group can't be set. `true` the first time that this has been so for long:
    /// that is to be logged then.
    pub(crate) fn note_out_of_reach(&self, gpu: usize, group: (u32, u32)) -> bool {
        self.on(gpu, |on| {
            let (since, is_reported) =
                on.out_of_reach.entry(group).or_insert((Instant::now(), false));
            since.elapsed() >= OUT_OF_REACH && !std::mem::replace(is_reported, true)
        })
    }

    /// Notes that the slice of a group can be set, or that the group is gone.
    pub(crate) fn note_in_reach(&self, gpu: usize, group: (u32, u32)) {
        self.on(gpu, |on| on.out_of_reach.remove(&group));
    }

    /// Of the groups that were out of reach, retains those whose slices are in `due`, which are to be set: the others
    /// have the slices that they are to have.
    pub(crate) fn keep_out_of_reach(&self, gpu: usize, due: &[ScheduledSlice]) {
        let is_due = |group: &(u32, u32)| due.iter().any(|due| (due.client, due.handle) == *group);
        self.on(gpu, |on| on.out_of_reach.retain(|group, _| is_due(group)));
    }

    /// The groups of a GPU that have been out of reach for long, and don't have the share that they are to have.
    pub(crate) fn out_of_reach(&self, gpu: usize) -> BTreeSet<(u32, u32)> {
        self.on(gpu, |on| {
            let reported = on.out_of_reach.iter().filter(|(_, (_, is_reported))| *is_reported);
            reported.map(|(group, _)| *group).collect()
        })
    }

    /// Whether the monitor sets the preemption modes of the container's programs, on any of the GPUs.
    pub(crate) fn sets_modes(&self) -> bool {
        self.gpus.lock().iter().filter_map(|on| on.round).any(|round| !round.each)
    }

    /// Has slices set again, because groups or processes have come or gone.
    pub(crate) fn wake(&self) {
        self.changed.wake();
    }

    /// The processes of `computing` that no sample shows as busy, without new ones, which samples may not show yet.
    /// None if no sample shows any of `computing`: the samples say nothing then.
    pub(crate) fn find_resting(
        &self,
        gpu: usize,
        computing: &BTreeSet<Process>,
        samples: &[Sample],
        now: Instant,
    ) -> BTreeSet<Process> {
        let mut gpus = self.gpus.lock();
        let Some(OnGpu { since, .. }) = gpus.get_mut(gpu) else { return BTreeSet::new() };
        since.retain(|process, _| computing.contains(process));
        for process in computing {
            since.entry(*process).or_insert(now);
        }
        let is_seen = |process: &Process| was_seen(samples, *process);
        if !computing.iter().any(is_seen) {
            return BTreeSet::new();
        }
        let is_old =
            |process: &Process| since.get(process).is_some_and(|since| now - *since >= GRACE);
        computing.iter().filter(|process| is_old(process) && !is_seen(process)).copied().collect()
    }

    /// Notes the driver's answer to a control that holds a share. `true` if it differs from the last answer.
    pub(crate) fn note_failure(
        &self,
        gpu: usize,
        what: &'static str,
        failure: Option<Failure>,
    ) -> bool {
        let before = self.on(gpu, |on| match failure {
            Some(failure) => on.failures.insert(what, failure),
            None => on.failures.remove(what),
        });
        before != failure
    }
}

/// Whether a process was busy on the GPU. An idle process is in samples, too.
pub(crate) fn was_seen(samples: &[Sample], process: Process) -> bool {
    let pid = process.pid();
    samples.iter().any(|sample| sample.pid == Some(pid) && sample.busy > 0)
}

/// Sets a slice: `NVA06C_CTRL_TIMESLICE_PARAMS.timesliceUs`.
pub(crate) fn set_slice(rm: Rm<'_>, due: &ScheduledSlice) -> Result<(), Failure> {
    let command = NVA06C_CTRL_CMD_SET_TIMESLICE;
    rm.control(due.client, due.handle, command, &mut due.us.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cgpu_host::process::ProcessId;

    /// A process that was not seen in samples for long is idle as long as another process was seen.
    #[test]
    fn unseen_process_is_idle_if_another_was_seen() {
        let shares = Shares::new(1);
        let process = |pid: i32| Process::from(ProcessId { pid, start_ticks: 7 });
        let computing: BTreeSet<Process> = [10, 11, 12].map(process).into();
        let samples = |pids: &[u32]| -> Vec<Sample> {
            let resting = Sample { pid: Some(11), busy: 0 };
            let busy = pids.iter().map(|pid| Sample { pid: Some(*pid), busy: 100 });
            busy.chain([resting]).collect()
        };
        let now = Instant::now();
        let rests = |pids: &[u32], after: Duration| {
            shares.find_resting(0, &computing, &samples(pids), now + after)
        };
        assert_eq!(rests(&[10], Duration::ZERO), [].into(), "all are new");
        assert_eq!(rests(&[10, 99], GRACE), [11, 12].map(process).into());
        assert_eq!(rests(&[10, 12], GRACE), [process(11)].into());
        assert_eq!(rests(&[99], GRACE), [].into(), "their numbers are others in the samples");
        assert_eq!(rests(&[], GRACE), [].into());
    }
}
