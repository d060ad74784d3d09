//! What the container has of its GPUs' computing time, as far as it is known. It is set in
//! [`slices`](crate::monitor::compute::slices) and [`turns`](crate::monitor::compute::turns).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::ledger::Process;
use crate::monitor::bell::Bell;
use crate::monitor::journal::process_number::process_id;
use crate::monitor::lock::Lock;
use crate::monitor::node::device::{Failure, Rm};
use crate::monitor::state::groups::DueSlice;
use crate::registry::share::Turns;
use crate::rm::number::NVA06C_CTRL_CMD_SET_TIMESLICE;
use crate::rm::usage::Sample;
use crate::sched::{Round, Span};

/// How long samples reach back: who is new isn't in them yet.
const GRACE: Duration = Duration::from_secs(15);

/// For how long a program may be out of reach before it's taken off the GPU.
const OUT_OF_REACH: Duration = Duration::from_secs(1);

/// What the container has of its GPUs.
#[derive(Debug)]
pub(crate) struct Shares {
    gpus: Lock<Vec<OnGpu>>,
    /// Rings when something has changed that slices depend on.
    pub(crate) changed: Bell,
}

/// What is known of a GPU.
#[derive(Debug, Default)]
pub(crate) struct OnGpu {
    /// `None` where nobody sets slices.
    pub(crate) round: Option<Round>,
    /// When it may run, as spans of a frame of so many microseconds; `None` where it may always.
    pub(crate) turns: Option<(u64, Vec<Span>)>,
    /// When each container on the GPU may run, where not all may always.
    pub(crate) frame: Option<Turns>,
    /// Why what was asked for last could not be had, by the control's name.
    failures: BTreeMap<&'static str, Failure>,
    /// Groups whose slices can't be set, for no descriptor of their program's leads to them: since when, and
    /// whether that is told.
    out_of_reach: BTreeMap<(u32, u32), (Instant, bool)>,
    /// Processes of the container's that were not on it lately.
    pub(crate) resting: BTreeSet<Process>,
    /// Since when a process is known to compute.
    since: BTreeMap<Process, Instant>,
}

impl Shares {
    pub(crate) fn new(gpus: usize) -> Self {
        let gpus = (0..gpus).map(|_| OnGpu::default()).collect();
        Shares { gpus: Lock::new(gpus), changed: Bell::default() }
    }

    /// What is known of a GPU of the container's; of none there is nothing, and nothing is kept.
    pub(crate) fn on<T: Default>(&self, gpu: usize, ask: impl FnOnce(&mut OnGpu) -> T) -> T {
        self.gpus.lock().get_mut(gpu).map(ask).unwrap_or_default()
    }

    /// Its round on a GPU, where somebody sets slices.
    pub(crate) fn round(&self, gpu: usize) -> Option<Round> {
        self.on(gpu, |on| on.round)
    }

    /// When it may run on a GPU: the frame's length in microseconds, and its spans; `None` where it may
    /// always.
    pub(crate) fn turns(&self, gpu: usize) -> Option<(u64, Vec<Span>)> {
        self.on(gpu, |on| on.turns.clone())
    }

    /// Whether not all containers on a GPU may always run.
    pub(crate) fn has_frame(&self, gpu: usize) -> bool {
        self.on(gpu, |on| on.frame.is_some())
    }

    /// When each container on a GPU may run, where that is another than `known`.
    pub(crate) fn frame_if_not(&self, gpu: usize, known: Option<&Turns>) -> Option<Option<Turns>> {
        self.on(gpu, |on| (on.frame.as_ref() != known).then(|| on.frame.clone()))
    }

    /// What the driver said to what could not be had of a GPU, in words.
    pub(crate) fn failure(&self, gpu: usize) -> Option<String> {
        let text = |(what, failure): (&&str, &Failure)| format!("{what}: {failure}");
        self.on(gpu, |on| on.failures.first_key_value().map(text))
    }

    /// The processes of the container's that were not on a GPU lately.
    pub(crate) fn resting(&self, gpu: usize) -> BTreeSet<Process> {
        self.on(gpu, |on| on.resting.clone())
    }

    /// The slice of a group that there is can't be set: whether that is so for long, and is to be told.
    pub(crate) fn note_out_of_reach(&self, gpu: usize, group: (u32, u32)) -> bool {
        self.on(gpu, |on| {
            let (since, is_told) = on.out_of_reach.entry(group).or_insert((Instant::now(), false));
            since.elapsed() >= OUT_OF_REACH && !std::mem::replace(is_told, true)
        })
    }

    /// It can, or it's gone.
    pub(crate) fn note_in_reach(&self, gpu: usize, group: (u32, u32)) {
        self.on(gpu, |on| on.out_of_reach.remove(&group));
    }

    /// These slices are to be set. Of the groups that were out of reach those stay so whose slices these are: the
    /// others have the one that they are to have.
    pub(crate) fn keep_out_of_reach(&self, gpu: usize, due: &[DueSlice]) {
        let is_due = |group: &(u32, u32)| due.iter().any(|due| (due.client, due.handle) == *group);
        self.on(gpu, |on| on.out_of_reach.retain(|group, _| is_due(group)));
    }

    /// The groups of a GPU that have been out of reach for long: they don't have the share that they are to
    /// have.
    pub(crate) fn out_of_reach(&self, gpu: usize) -> BTreeSet<(u32, u32)> {
        self.on(gpu, |on| {
            let told = on.out_of_reach.iter().filter(|(_, (_, is_told))| *is_told);
            told.map(|(group, _)| *group).collect()
        })
    }

    /// Whether a program's preemption mode on any of the GPUs is ours to set.
    pub(crate) fn hold_modes(&self) -> bool {
        self.gpus.lock().iter().filter_map(|on| on.round).any(|round| !round.each)
    }

    /// Groups, or processes, have come or gone.
    pub(crate) fn wake(&self) {
        self.changed.ring();
    }

    /// Those of `computing` that no sample has at work. One that is new may come yet; and where nobody of them
    /// was seen, the samples tell nothing.
    pub(crate) fn who_rests(
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

    /// The driver was asked for what holds a share: whether it has said something else than last.
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

/// Whether a process was at work on the GPU. One that rests is in samples, too.
pub(crate) fn was_seen(samples: &[Sample], process: Process) -> bool {
    let pid = process_id(process).pid.cast_unsigned();
    samples.iter().any(|sample| sample.pid == Some(pid) && sample.busy > 0)
}

/// Sets a slice: `NVA06C_CTRL_TIMESLICE_PARAMS.timesliceUs`.
pub(crate) fn set_slice(rm: Rm<'_>, due: &DueSlice) -> Result<(), Failure> {
    let command = NVA06C_CTRL_CMD_SET_TIMESLICE;
    rm.control(due.client, due.handle, command, &mut due.us.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::journal::process_number::number;
    use crate::process::ProcessId;

    #[test]
    fn who_was_not_seen_for_long_rests_as_long_as_another_was() {
        let shares = Shares::new(1);
        let process = |pid: i32| number(ProcessId { pid, start_ticks: 7 });
        let computing: BTreeSet<Process> = [10, 11, 12].map(process).into();
        let samples = |pids: &[u32]| -> Vec<Sample> {
            let resting = Sample { pid: Some(11), busy: 0 };
            let busy = pids.iter().map(|pid| Sample { pid: Some(*pid), busy: 100 });
            busy.chain([resting]).collect()
        };
        let now = Instant::now();
        let rests = |pids: &[u32], after: Duration| {
            shares.who_rests(0, &computing, &samples(pids), now + after)
        };
        assert_eq!(rests(&[10], Duration::ZERO), [].into(), "all are new");
        assert_eq!(rests(&[10, 99], GRACE), [11, 12].map(process).into());
        assert_eq!(rests(&[10, 12], GRACE), [process(11)].into());
        assert_eq!(rests(&[99], GRACE), [].into(), "their numbers are others in the samples");
        assert_eq!(rests(&[], GRACE), [].into());
    }
}
