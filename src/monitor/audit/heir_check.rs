//! A client with memory ends with its maker.
//!
//! The driver reports memory under the number of the process that made its client
//! (`NV2080_CTRL_CMD_GPU_GET_PID_INFO`). When that process is dead and another one has the client's file
//! still, a fork's descriptor say, the memory stays, and the kernel may give the number to a process of
//! another container, which would seem to have it. So who keeps such a file is killed, as one is who takes
//! memory past the monitor; CUDA serves no process that was forked after it began, so none loses what it
//! could use.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use crate::events::Event;
use crate::gate::settings::NodeKind;
use crate::ledger::{Client, Process};
use crate::monitor::audit::heirs::{callers, seen, seen_with};
use crate::monitor::audit::holdings::DeadPids;
use crate::monitor::audit::look::Audit;
use crate::monitor::caller::target::compare_files;
use crate::monitor::driver::monitor_client::{MonitorClient, Presence};
use crate::monitor::journal::process_number::number;
use crate::monitor::journal::process_number::process_id;
use crate::process::ProcessId;
use crate::rm::about::Held;

/// How long memory may show under a dead process's number: the driver can close files later than the
/// kernel says that the process is gone.
const GRACE: Duration = Duration::from_millis(400);

/// How long, where no process was seen with the client: then those are killed that inherited a file and
/// never called.
const LONGER_GRACE: Duration = Duration::from_millis(900);

/// How long at most: then the container's processes are killed that called or have a file. The file may
/// be in a socket.
const LONGEST_GRACE: Duration = Duration::from_secs(5);

/// The kind of node whose files clients belong to.
const CLIENT: NodeKind = NodeKind::Control;

/// Whom it takes to end what shows under a dead process's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// Nobody yet.
    Nobody,
    /// Those who were seen with a client of that process; else those who inherited a file.
    SeenWithIt,
    Inheritors,
    /// All who called, or have a file.
    All,
}

/// Who is ended after so long, where processes were seen with a client of the dead one, or none were.
fn ends(lasted: Duration, were_seen: bool) -> Ends {
    match lasted {
        _ if lasted >= LONGEST_GRACE => Ends::All,
        _ if lasted >= GRACE && were_seen => Ends::SeenWithIt,
        _ if lasted >= LONGER_GRACE => Ends::Inheritors,
        _ => Ends::Nobody,
    }
}

impl Audit {
    /// Ends who keeps memory of those `dead` whose numbers nobody has, or of processes that are forgotten,
    /// of which the driver shows `all`.
    pub(crate) fn end_heirs(&self, dead: &[Process], all: &[Vec<Held>], numbers: &DeadPids) {
        let dead = dead.iter().filter(|process| !numbers.lost.contains(process));
        let dead = dead.map(|process| process_id(*process).pid.cast_unsigned());
        let numbers: BTreeSet<u32> = dead.chain(numbers.former.iter().copied()).collect();
        let held = all.iter().flatten().filter(|held| held.bytes() > 0).map(|held| held.pid);
        let lingering: BTreeSet<u32> = held.filter(|pid| numbers.contains(pid)).collect();
        if !lingering.is_empty() {
            self.state.books().due.schedule_by(Instant::now() + GRACE);
        }
        for (number, lasted) in self.memory.lingering.note(&lingering, Instant::now()) {
            let seen = seen_with(&self.state.books(), number);
            let heirs = match ends(lasted, !seen.is_empty()) {
                Ends::Nobody => continue,
                Ends::SeenWithIt => seen,
                Ends::Inheritors => self.inheritors(),
                Ends::All => {
                    let callers = callers(&self.state.books());
                    callers.into_iter().chain(self.silent_with_files(&[])).collect()
                }
            };
            heirs.into_iter().for_each(|heir| self.processes.kill(heir, Event::killed_as_heir()));
        }
    }

    /// Of those `dead`, the ones a client of whose is there: somebody has its file, who may come to have
    /// memory by it.
    pub(crate) fn with_clients(&self, own: &MonitorClient, dead: &[Process]) -> BTreeSet<Process> {
        if dead.is_empty() || !own.can_tell() {
            return BTreeSet::new();
        }
        let all: Vec<(Client, Process)> =
            seen(&self.state.books()).filter(|(_, process)| dead.contains(process)).collect();
        let is_there = |client: Client| own.presence(client.0, client.0) != Presence::NoClient;
        let there = all.into_iter().filter(|(client, _)| is_there(*client));
        there.map(|(_, process)| process).collect()
    }

    /// The container's processes that never called and have a client's file that no living caller has;
    /// none where that can't be told.
    fn inheritors(&self) -> BTreeSet<Process> {
        let callers = callers(&self.state.books());
        let of = |process: Process| {
            self.processes.open_files_of(process_id(process).pid.cast_unsigned(), CLIENT)
        };
        let theirs: Option<Vec<_>> = callers.into_iter().map(of).collect();
        theirs.map(|theirs| self.silent_with_files(&theirs.concat())).unwrap_or_default()
    }

    /// The container's processes that never called and have a client's file that isn't among those.
    fn silent_with_files(&self, theirs: &[(u32, i32)]) -> BTreeSet<Process> {
        let is_theirs = |file: (u32, i32)| {
            theirs.iter().any(|of| compare_files(file, *of).is_ok_and(|is| is.is_eq()))
        };
        let called = self.processes.caller_pids();
        let silent =
            self.processes.container_pids().into_iter().filter(|pid| !called.contains(pid));
        let with_files = silent.filter(|pid| {
            let files = self.processes.open_files_of(*pid, CLIENT).unwrap_or_default();
            files.into_iter().any(|file| !is_theirs(file))
        });
        with_files.filter_map(|pid| ProcessId::of(pid.cast_signed())).map(number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_seen_with_a_dead_ones_client_is_ended_first_and_all_who_called_last() {
        let at = |ms, were_seen| ends(Duration::from_millis(ms), were_seen);
        assert_eq!([at(0, true), at(399, true), at(899, false)], [Ends::Nobody; 3]);
        assert_eq!([at(400, true), at(4999, true)], [Ends::SeenWithIt; 2]);
        assert_eq!([at(900, false), at(4999, false)], [Ends::Inheritors; 2]);
        assert_eq!([at(5000, true), at(5000, false)], [Ends::All; 2]);
    }
}
