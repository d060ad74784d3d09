//! The container's shares of its GPUs' computing time: slices of its channel groups.
//!
//! A file says what the container has of a GPU ([`share`](crate::registry::share)). Whoever makes, changes or removes
//! containers writes the file, and a thread of the monitor follows it. A group gets its slice in the call that
//! schedules it; when the share or the number of groups changes later, through a descriptor of its program. Slices
//! outlast the monitor: the driver has them. A program is told that it has the slice that it asked for. Groups and
//! channels that the driver does not have any more are forgotten.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::monitor::caller::Targets;
use crate::monitor::compute::reach::set_via_program;
use crate::monitor::compute::shares::{Shares, was_seen};
use crate::monitor::driver::{DriverAccess, Presence};
use crate::monitor::node::Failure;
use crate::monitor::snapshot::Record;
use crate::monitor::state::{ContainerState, DueSlice};
use crate::registry::notice::Notice;
use crate::registry::share;
use crate::rm::number::{
    NV_ERR_INVALID_CLIENT, NV_ERR_INVALID_OBJECT_HANDLE, NV_ERR_OBJECT_NOT_FOUND,
};
use crate::sched::Round;

/// Up to how many processes are told apart by the samples. There are some seventy samples: with more processes, one
/// that computes could be in none.
const MOST_TOLD_APART: usize = 8;

/// How often the monitor looks which of several processes rest, in milliseconds: while one of them was seen to
/// compute, and while none was.
const BUSY_LOOK_MS: u16 = 1000;

const IDLE_LOOK_MS: u16 = 5000;

/// After how long shares are read though nobody told of a change, for whatever reason.
const UNHEARD: Duration = Duration::from_secs(60);

/// The slices of the container's channel groups.
#[derive(Debug)]
pub(crate) struct Slices {
    pub(crate) state: Arc<ContainerState>,
    pub(crate) driver: Arc<DriverAccess>,
    targets: Arc<Targets>,
    pub(crate) shares: Shares,
}

impl Slices {
    pub(crate) fn new(
        driver: Arc<DriverAccess>,
        state: Arc<ContainerState>,
        targets: Arc<Targets>,
    ) -> Self {
        let shares = Shares::new(state.uuids.len());
        Slices { state, driver, targets, shares }
    }

    /// Wakes the thread that sets slices when a file of shares has changed.
    pub(crate) fn follow_shares_forever(&self) {
        let dir = share::dir(&self.state.settings.state_dir);
        loop {
            // The notice is opened anew each time: somebody may have removed it.
            let Ok(notice) = Notice::open(&dir) else {
                std::thread::sleep(UNHEARD);
                continue;
            };
            let known = notice.changes();
            self.shares.wake();
            notice.wait(known, UNHEARD);
        }
    }

    /// Reads the files of shares. A file that can't be read changes nothing.
    pub(crate) fn read_shares(&self) {
        for (gpu, settings) in self.state.settings.gpus.iter().enumerate() {
            match share::read(&self.state.settings.state_dir, &settings.uuid) {
                Ok(said) => {
                    let said = said.unwrap_or_default();
                    let round = said.round(&self.state.settings.short_id);
                    let turns = said.turns(&self.state.settings.short_id);
                    let turns = turns.map(|(frame_us, spans)| (frame_us, spans.to_vec()));
                    let before = self.shares.on(gpu, |on| {
                        on.turns = turns;
                        on.frame = said.turns;
                        std::mem::replace(&mut on.round, round)
                    });
                    if before != round {
                        self.state.note_status_change();
                    }
                }
                Err(error) => tracing::debug!(%error, "shares stay as they are"),
            }
        }
    }

    /// Finds out which of several processes that compute were not on the GPU lately. Returns in how many milliseconds
    /// to look again; `None` where that isn't needed.
    pub(crate) fn find_resting_processes(&self) -> Option<u16> {
        let mut again_ms = None;
        for gpu in 0..self.state.uuids.len() {
            let adds_up = self.shares.round(gpu).is_some_and(|round| !round.each);
            let computing = {
                let books = self.state.books();
                books.groups.computing_processes(gpu, &books.processes)
            };
            let mut resting = BTreeSet::new();
            if adds_up && (2..=MOST_TOLD_APART).contains(&computing.len()) {
                let own = self.driver.own_client();
                let samples = own.map(|own| own.samples(gpu)).unwrap_or_default();
                let is_busy = computing.iter().any(|process| was_seen(&samples, *process));
                let look_ms = if is_busy { BUSY_LOOK_MS } else { IDLE_LOOK_MS };
                again_ms = again_ms.into_iter().chain([look_ms]).min();
                resting = self.shares.find_resting(gpu, &computing, &samples, Instant::now());
            }
            self.shares.on(gpu, |on| on.resting = resting);
        }
        again_ms
    }

    /// What the container's groups have of its round on a GPU; `None` where the monitor sets no slices.
    pub(crate) fn round_of_groups(&self, gpu: usize) -> Option<Round> {
        let round = self.shares.round(gpu)?;
        Some(round.beside_channels(self.state.books().outside_groups(gpu).len()))
    }

    /// Notes the driver's answer to setting a slice.
    pub(crate) fn note_slice_tried(&self, gpu: usize, done: Result<(), Failure>) {
        self.note_share_tried(gpu, "SET_TIMESLICE", done);
    }

    /// Notes the driver's answer to a control that holds a share, and tells the log of a new refusal.
    pub(crate) fn note_share_tried(
        &self,
        gpu: usize,
        what: &'static str,
        done: Result<(), Failure>,
    ) {
        if !self.shares.note_failure(gpu, what, done.err()) {
            return;
        }
        self.state.note_status_change();
        if let Err(error) = done {
            tracing::warn!(gpu, "a share of computing time can't be held: {what}: {error}");
        }
    }

    /// Sets the slices that are other than they are to be. `true` where each is set, or never will be.
    pub(crate) fn set_slices(&self) -> bool {
        let mut is_whole = true;
        // A process without a descriptor for one group isn't searched again for the next group.
        let mut out_of_reach = BTreeSet::new();
        for gpu in 0..self.state.uuids.len() {
            let round = self.round_of_groups(gpu);
            let due = {
                let books = self.state.books();
                books.groups.due_slices(gpu, round, &books.processes, &self.shares.resting(gpu))
            };
            self.shares.keep_out_of_reach(gpu, &due);
            for due in due {
                let process = due.reach.process;
                let all = !out_of_reach.contains(&process);
                let done = set_via_program(&self.state, &self.targets, &due, all);
                let group = (due.client, due.handle);
                match done {
                    // What the driver refuses of a group that exists, it refuses each time.
                    Some(done) if !done.is_err_and(is_no_such_object) => {
                        self.state.books().groups.note_slice(&due);
                        self.shares.note_in_reach(gpu, group);
                        self.note_slice_tried(gpu, done);
                    }
                    _ if self.forget_if_gone(&due) => self.shares.note_in_reach(gpu, group),
                    _ => {
                        out_of_reach.insert(process);
                        is_whole = false;
                        if round.is_some() && self.shares.note_out_of_reach(gpu, group) {
                            let pid = process.pid();
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

    /// Forgets the channel groups and channels that the driver frees together with this object.
    pub(crate) fn forget_freed(&self, client: u32, handle: u32) {
        let mut books = self.state.books();
        let groups = books.groups.freed(client, handle);
        let channels = books.channels.freed(client, handle, &groups);
        for (client, handle) in channels.into_iter().chain(groups) {
            books.write(Record::Ungroup { client, handle });
            self.shares.wake();
        }
    }

    /// Forgets the channel groups and channels of a GPU that the driver doesn't have any more.
    pub(crate) fn forget_gone_groups(&self, gpu: usize) {
        let own = self.driver.own_client();
        let Some(own) = own.filter(|own| own.can_tell()) else { return };
        let (known, channels) = {
            let books = self.state.books();
            (books.groups.on(gpu), books.outside_groups(gpu))
        };
        // A channel may still be in the making, as long as its client is there.
        for (client, handle) in channels {
            if own.presence(client, handle) == Presence::NoClient {
                self.state.books().write(Record::Ungroup { client, handle });
            }
        }
        for ((client, handle), group) in known {
            let is_gone = match own.presence(client, handle) {
                Presence::There => false,
                Presence::NoClient => true,
                // A group whose making was continued may still be in the making.
                Presence::NoObject => group.certain,
            };
            let mut books = self.state.books();
            // Another thread may have made a new group of that name.
            if is_gone && books.groups.named((client, handle)) == Some(group) {
                books.write(Record::Ungroup { client, handle });
            }
        }
    }

    /// Forgets a group that the driver doesn't have any more. `true` where that is so.
    fn forget_if_gone(&self, due: &DueSlice) -> bool {
        let Some(own) = self.driver.own_client() else { return false };
        let presence = own.presence(due.client, due.handle);
        let is_gone = presence != Presence::There && own.can_tell();
        if is_gone {
            self.forget_freed(due.client, due.handle);
        }
        is_gone
    }
}

/// Whether the driver says that there is no such client, or no such object.
fn is_no_such_object(failure: Failure) -> bool {
    let nothing = [NV_ERR_INVALID_CLIENT, NV_ERR_INVALID_OBJECT_HANDLE, NV_ERR_OBJECT_NOT_FOUND];
    matches!(failure, Failure::Status(status) if nothing.contains(&status))
}
