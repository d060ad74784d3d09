//! The container's shares of its GPUs' computing time: slices of its channel groups.
//!
//! What it has of a GPU is in a file ([`share`](crate::registry::share)), which whoever makes, changes or
//! removes containers writes, and a thread of ours follows. A group gets its slice in the call that
//! schedules it; when the share changes later, or the number of groups, through a descriptor of its
//! program's. Slices outlast this worker: the driver has them. A program is told that it has the slice
//! that it asked for.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::monitor::caller::target::process_id;
use crate::monitor::calls::serve::{Case, Over};
use crate::monitor::compute::off_channels::schedules_a_channel;
use crate::monitor::compute::shares::{set_slice, was_seen};
use crate::monitor::driver::device::Failure;
use crate::monitor::driver::monitor_client::Presence;
use crate::monitor::state::groups::DueSlice;
use crate::monitor::state::journal::Reach;
use crate::monitor::worker::Shared;
use crate::registry::notice::Notice;
use crate::registry::share;
use crate::rm::Layout;
use crate::rm::call::Object;
use crate::rm::number::{
    NV_ERR_INVALID_CLIENT, NV_ERR_INVALID_OBJECT_HANDLE, NV_ERR_OBJECT_NOT_FOUND,
    NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE, NVA06C_CTRL_CMD_GPFIFO_SCHEDULE,
    NVA06C_CTRL_CMD_SET_TIMESLICE,
};
use crate::sched::{Round, slice_us};

/// How many processes are told apart by the samples, of which there are some seventy: of more, one that computes
/// could be in none of them.
const MOST_TOLD_APART: usize = 8;

/// How often it is looked who of several processes rests, in milliseconds: while one of them was seen to
/// compute, and while none was.
const BUSY_LOOK_MS: u16 = 1000;

const IDLE_LOOK_MS: u16 = 5000;

/// How soon a slice is tried again that could not be set for want of a file, in milliseconds; twice as
/// long each time, up to the longest.
const RETRY_MS: u16 = 1000;

const LONGEST_RETRY_MS: u16 = 32_000;

/// The longest that nobody tells of changes, for whatever reason.
const UNHEARD: Duration = Duration::from_secs(60);

/// `NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS` (ctrl2080gr.h): flags, of which the lowest sets the
/// compute mode; that mode, and the one that lets no kernel outlast a slice.
const MODE_FLAGS: usize = 0;

const MODE_COMPUTE: usize = 12;

const SETS_COMPUTE: u32 = 1;

const CILP: u32 = 2;

impl Case<'_> {
    /// A control that has to do with shares, before it is made. `true` where its program is told that it
    /// was, and it isn't made.
    pub(crate) fn steers(
        &mut self,
        (client, object): (u32, u32),
        control: u32,
        layout: &'static Layout,
    ) -> Result<bool, Over> {
        match control {
            NVA06C_CTRL_CMD_GPFIFO_SCHEDULE => {
                self.slice_first(client, object, layout)?;
                self.schedules_group((client, object));
                Ok(false)
            }
            control if schedules_a_channel(control) => {
                self.schedules_channel((client, object), layout)?;
                Ok(false)
            }
            NVA06C_CTRL_CMD_SET_TIMESLICE => {
                let us = self.scratch.params.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
                let Some(gpu) = self.gpu_of_unseen(client, object) else { return Ok(false) };
                if let Some(us) = us {
                    self.books().groups.asked_slice(client, object, us);
                }
                Ok(self.shared.shares.round(gpu).is_some())
            }
            NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE if self.shared.shares.hold_modes() => {
                compute_mode_to_cilp(&mut self.scratch.params);
                Ok(false)
            }
            _ => Ok(false),
        }
    }

    /// The GPU of a group: where it isn't known, the only one, or one where slices are set.
    pub(crate) fn gpu_of_unseen(&self, client: u32, handle: u32) -> Option<usize> {
        let known = self.books().groups.gpu(client, handle);
        let shares = &self.shared.shares;
        let held = || (0..self.shared.uuids.len()).find(|gpu| shares.round(*gpu).is_some());
        known.or_else(|| self.only_gpu()).or_else(held)
    }

    /// Sets the slice of a group before it is scheduled.
    fn slice_first(
        &mut self,
        client: u32,
        handle: u32,
        layout: &'static Layout,
    ) -> Result<(), Over> {
        let Some(gpu) = self.gpu_of_unseen(client, handle) else { return Ok(()) };
        let Some(round) = self.shared.round_of_groups(gpu) else { return Ok(()) };
        if !self.books().groups.contains(client, handle) {
            let reach = Reach { process: self.target()?.process, descriptor: 0, engine: 0 };
            let due = DueSlice { client, handle, reach, us: slice_us(round, 1) };
            // What has no slice is no group, and the driver schedules none.
            if set_slice(self.rm()?, &due).is_err() {
                return Ok(());
            }
            self.enter_unseen_group(gpu, Object { client, parent: 0, handle }, layout)?;
        }
        let due = {
            let books = self.books();
            let resting = self.shared.shares.resting(gpu);
            let due = books.groups.due_slices(gpu, Some(round), &books.processes, &resting);
            due.into_iter().find(|due| (due.client, due.handle) == (client, handle))
        };
        if let Some(due) = due {
            let done = set_slice(self.rm()?, &due);
            if done.is_ok() {
                self.books().groups.has_slice(&due);
            }
            self.shared.tried_slice(gpu, done);
        }
        Ok(())
    }
}

/// Has the parameters ask for the mode in which a kernel is interrupted at any instruction, if they ask
/// for any: else a program's slice would last as long as its kernels.
fn compute_mode_to_cilp(params: &mut [u8]) {
    let flags = params.get(MODE_FLAGS..).and_then(|rest| rest.first_chunk());
    let sets = flags.is_some_and(|bytes| u32::from_le_bytes(*bytes) & SETS_COMPUTE != 0);
    if let Some(mode) = params.get_mut(MODE_COMPUTE..MODE_COMPUTE + 4).filter(|_| sets) {
        mode.copy_from_slice(&CILP.to_le_bytes());
    }
}

impl Shared {
    /// Wakes the thread that sets slices when a file of shares has changed.
    pub(crate) fn hear_of_shares_forever(&self) {
        let dir = share::dir(&self.settings.state_dir);
        loop {
            // Opened anew each time: somebody may have removed it.
            let Ok(notice) = Notice::open(&dir) else {
                std::thread::sleep(UNHEARD);
                continue;
            };
            let known = notice.changes();
            self.shares.wake();
            notice.wait(known, UNHEARD);
        }
    }

    /// Sets slices when shares, groups or processes change.
    pub(crate) fn share_forever(&'static self) {
        let mut retry_ms = RETRY_MS;
        let mut is_resumed = false;
        loop {
            self.read_shares();
            self.off_channels.wake();
            is_resumed = is_resumed || self.end_turns_of_before();
            let look_ms = self.look_who_rests();
            let is_whole = self.set_slices() && is_resumed;
            // How many groups there are may divide them into cohorts.
            self.begin_turns();
            let again_ms = (!is_whole).then_some(retry_ms);
            retry_ms = if is_whole { RETRY_MS } else { (2 * retry_ms).min(LONGEST_RETRY_MS) };
            let patience = look_ms.into_iter().chain(again_ms).min();
            self.shares.changed.wait(patience.map(|ms| Duration::from_millis(ms.into())));
        }
    }

    /// Takes note of what the files say. One that can't be read changes nothing.
    pub(crate) fn read_shares(&self) {
        for (gpu, settings) in self.settings.gpus.iter().enumerate() {
            match share::read(&self.settings.state_dir, &settings.uuid) {
                Ok(said) => {
                    let said = said.unwrap_or_default();
                    let round = said.round(&self.settings.short_id);
                    let turns = said.turns(&self.settings.short_id);
                    let turns = turns.map(|(frame_us, spans)| (frame_us, spans.to_vec()));
                    let before = self.shares.on(gpu, |on| {
                        on.turns = turns;
                        on.frame = said.turns;
                        std::mem::replace(&mut on.round, round)
                    });
                    if before != round {
                        self.figures.change();
                    }
                }
                Err(error) => tracing::debug!(%error, "shares stay as they are"),
            }
        }
    }

    /// Finds out who of several processes that compute was not on the GPU lately; in how many milliseconds
    /// that is to be looked at again, where it is.
    fn look_who_rests(&self) -> Option<u16> {
        let mut again_ms = None;
        for gpu in 0..self.uuids.len() {
            let adds_up = self.shares.round(gpu).is_some_and(|round| !round.each);
            let computing = {
                let books = self.books();
                books.groups.computing_processes(gpu, &books.processes)
            };
            let mut resting = BTreeSet::new();
            if adds_up && (2..=MOST_TOLD_APART).contains(&computing.len()) {
                let own = self.own_client();
                let samples = own.map(|own| own.samples(&self.release, gpu)).unwrap_or_default();
                let is_busy = computing.iter().any(|process| was_seen(&samples, *process));
                let look_ms = if is_busy { BUSY_LOOK_MS } else { IDLE_LOOK_MS };
                again_ms = again_ms.into_iter().chain([look_ms]).min();
                resting = self.shares.who_rests(gpu, &computing, &samples, Instant::now());
            }
            self.shares.on(gpu, |on| on.resting = resting);
        }
        again_ms
    }

    /// What the container's groups have of its round on a GPU, where somebody sets slices.
    pub(crate) fn round_of_groups(&self, gpu: usize) -> Option<Round> {
        let round = self.shares.round(gpu)?;
        Some(round.beside_channels(self.books().outside_groups(gpu).len()))
    }

    /// A slice was tried to be set.
    fn tried_slice(&self, gpu: usize, done: Result<(), Failure>) {
        self.tried_share(gpu, "SET_TIMESLICE", done);
    }

    /// The driver was asked for what holds a share.
    pub(crate) fn tried_share(&self, gpu: usize, what: &'static str, done: Result<(), Failure>) {
        if !self.shares.is_news(gpu, what, done.err()) {
            return;
        }
        self.figures.change();
        if let Err(error) = done {
            tracing::warn!(gpu, "a share of computing time can't be held: {what}: {error}");
        }
    }

    /// Sets the slices that are other than they are to be; whether each is set, or never will be.
    fn set_slices(&self) -> bool {
        let mut is_whole = true;
        // Who can't be reached for one group isn't looked through for the next.
        let mut out_of_reach = BTreeSet::new();
        for gpu in 0..self.uuids.len() {
            let round = self.round_of_groups(gpu);
            let due = {
                let books = self.books();
                books.groups.due_slices(gpu, round, &books.processes, &self.shares.resting(gpu))
            };
            self.shares.are_due(gpu, &due);
            for due in due {
                let process = due.reach.process;
                let done = self.reach_and_set(&due, !out_of_reach.contains(&process));
                let group = (due.client, due.handle);
                match done {
                    Some(Ok(())) => {
                        self.books().groups.has_slice(&due);
                        self.shares.found_again(gpu, group);
                        self.tried_slice(gpu, Ok(()));
                    }
                    // What the driver refuses of a group that there is it refuses each time.
                    Some(Err(failure)) if !is_of_nothing(failure) => {
                        self.books().groups.has_slice(&due);
                        self.shares.found_again(gpu, group);
                        self.tried_slice(gpu, Err(failure));
                    }
                    _ if self.is_gone(&due) => self.shares.found_again(gpu, group),
                    _ => {
                        out_of_reach.insert(process);
                        is_whole = false;
                        if round.is_some() && self.shares.lose(gpu, group) {
                            let pid = process_id(process).pid;
                            tracing::warn!(
                                gpu,
                                pid,
                                "a program is taken off the GPU: its share has changed, and it has closed \
                                 the file of the driver's by which that is set"
                            );
                        }
                    }
                }
            }
        }
        is_whole
    }

    /// Whether the driver has no such group any more, which is forgotten then.
    fn is_gone(&self, due: &DueSlice) -> bool {
        let Some(own) = self.own_client() else { return false };
        let presence = own.presence(&self.release, due.client, due.handle);
        let is_gone = presence != Presence::There && own.can_tell(&self.release);
        if is_gone {
            self.freed_groups(due.client, due.handle);
        }
        is_gone
    }
}

/// Whether the driver says that there is no such client, or no such object.
fn is_of_nothing(failure: Failure) -> bool {
    let nothing = [NV_ERR_INVALID_CLIENT, NV_ERR_INVALID_OBJECT_HANDLE, NV_ERR_OBJECT_NOT_FOUND];
    matches!(failure, Failure::Status(status) if nothing.contains(&status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compute_mode_that_is_asked_for_is_cilp() {
        let params = |flags: u32, mode: u32| {
            let mut params = [0; 32];
            params[..4].copy_from_slice(&flags.to_le_bytes());
            params[12..16].copy_from_slice(&mode.to_le_bytes());
            compute_mode_to_cilp(&mut params);
            u32::from_le_bytes([params[12], params[13], params[14], params[15]])
        };
        assert_eq!([params(1, 0), params(3, 1), params(1, 2)], [CILP; 3]);
        assert_eq!(params(2, 0), 0, "it sets the mode of graphics alone");
        compute_mode_to_cilp(&mut [1, 0, 0]);
    }
}
